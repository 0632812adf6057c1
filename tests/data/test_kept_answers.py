"""What a model keeps of its base's answers, against greedy loops and KL in float64; prompts; what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import surgeon
from surgeon.common.cache import VARIABLE
from surgeon.data import kept_answers as module
from surgeon.data.kept_answers import KeptAnswers, Prompts, kept_answers, read_prompts
from surgeon.errors import BadInput
from tests import tiny
from tests.training.texts import CHAT_TEMPLATE, WORDS, add_tokenizer

ASKED = ["w3", "w7 w8 w9 w60 w2", "w1 w2", "w50 w60 w70", "w9 w8 w7 w6 w5 w4 w3"]
PROMPTS = Prompts("asked", tuple(ASKED), (("w1", "w2"), (), (), (), ()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model, and the same with every weight moved a little."""
    made = tmp_path_factory.mktemp("kept")
    add_tokenizer(tiny.checkpoint(made / "base", "llama", dtype="float32"), template=CHAT_TEMPLATE)
    shutil.copytree(made / "base", made / "moved")
    draw = torch.Generator().manual_seed(1)
    change(made / "moved", lambda value: value + torch.randn(value.shape, generator=draw) * float(value.norm()) / 200)
    return made


def change(folder: Path, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Write every tensor of a checkpoint anew."""
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = {name: changed(value) for name, value in load_file(shard).items()}
        save_file(tensors, shard, metadata={"format": "pt"})


def measured(base: Path, *models: Path, prompts: Prompts = PROMPTS, **given: Any) -> list[KeptAnswers]:
    opened = [surgeon.open_checkpoint(model) for model in models]
    return kept_answers(surgeon.open_checkpoint(base), opened, prompts, tokens=8, device="cpu", **given)


def greedy(model: Any, ids: list[int], most: int, ends: set[int]) -> tuple[list[int], bool]:
    """The tokens of a greedy loop over whole forwards, without the end, and whether it came."""
    found: list[int] = []
    while len(found) < most:
        with torch.no_grad():
            token = int(model(torch.tensor([ids + found])).logits[0, -1].argmax())
        if token in ends:
            return found, True
        found.append(token)
    return found, False


@pytest.mark.parametrize("ended", [False, True])
def test_against_greedy_loops_and_float64(folder: Path, tmp_path: Path, ended: bool) -> None:
    """Every figure, from transformers alone: prompts of five lengths are run in one padded batch.

    Where an answer ends, its end counts for KL too: there the base says that it stops.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    base, moved = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("base", "moved"))
    ends, names = {2}, ("base", "moved")
    if ended:
        turn = [{"role": "user", "content": ASKED[0]}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
        ends = {2, greedy(base, ids, 8, ends)[0][3]}
    copies = [shutil.copytree(folder / name, tmp_path / name) for name in names]
    for copy in copies:
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)}))
    some_end = False
    nats: list[float] = []
    tokens: list[int] = []
    shares, same = [], []
    for prompt in ASKED:
        turn = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
        (key, stops), (own, own_stops) = greedy(base, ids, 8, ends), greedy(moved, ids, 8, ends)
        some_end |= stops
        whole = torch.tensor([ids + key + [2] * stops])
        with torch.no_grad():
            p, q = (F.log_softmax(model.double()(whole).logits[0, len(ids) - 1 : -1], -1) for model in (base, moved))
        base.float(), moved.float()
        nats.append(float((p.exp() * (p - q)).sum()))
        tokens.append(len(key) + stops)
        texts = [tokenizer.decode(each, skip_special_tokens=True) for each in (key, own)]
        alike = 0
        while alike < min(map(len, texts)) and texts[0][alike] == texts[1][alike]:
            alike += 1
        shares.append(alike / len(texts[0]))
        same.append((key, stops) == (own, own_stops))
    assert some_end == ended
    (found,) = measured(*copies)
    assert found.kl is not None and found.kl.interval is not None
    assert found.kl.value == pytest.approx(sum(nats) / sum(tokens), rel=1e-4) and found.kl.value > 1e-3
    assert found.prefix.value == pytest.approx(sum(shares) / 5) and 0 < found.prefix.value < 1
    assert found.same.value == sum(same) / 5 < 1
    assert found.silent == 0 and len(found.answers) == 5
    # Few prompts have wide intervals, which end where the figures do.
    for share in (found.prefix, found.same):
        assert share.interval is not None and 0 <= share.interval[0] <= share.interval[1] <= 1
    assert found.kl.interval[0] >= 0


def test_a_model_that_did_not_change_keeps_every_answer(folder: Path) -> None:
    """Also grown, whose new tensors are silent."""
    grown = folder / "grown"
    surgeon.apply("neutral-residues", str(folder / "base"), grown)
    for found in measured(folder / "base", folder / "base", grown):
        assert found.kl is not None and (found.kl.value, found.prefix.value, found.same.value) == (0, 1, 1)


def test_expected_strings_are_judged_whatever_their_case(folder: Path) -> None:
    (found,) = measured(folder / "base", folder / "moved")
    base, own = (answers[0].text.casefold() for answers in (found.base_answers, found.answers))
    assert found.right is not None
    assert [each.value for each in found.right] == [float("w1" in text or "w2" in text) for text in (base, own)]
    word = next(word for word in WORDS if word in base)
    upper = Prompts("upper", (ASKED[0],), ((word.upper(),),))
    (judged,) = measured(folder / "base", folder / "moved", prompts=upper)
    assert judged.right is not None and judged.right[0].value == 1
    (unjudged,) = measured(folder / "base", folder / "moved", prompts=Prompts("none", (ASKED[0],), ((),)))
    assert unjudged.right is None and unjudged.to_json()["right"] is None


def test_other_tokens_are_compared_as_text(folder: Path, tmp_path: Path) -> None:
    """A model that writes another template's turns has no KL to the base."""
    other = shutil.copytree(folder / "base", tmp_path / "other")
    (other / "chat_template.jinja").write_text(
        CHAT_TEMPLATE.replace("<user>", "<system>").replace("m.role", "'system'")
    )
    (found,) = measured(folder / "base", other)
    assert found.kl is None and found.to_json()["kl"] is None and found.prefix.value < 1


def test_prompts_without_an_answer_are_left_out(folder: Path, tmp_path: Path) -> None:
    """A base that answers everything with nothing has nothing to keep."""
    mute = shutil.copytree(folder / "base", tmp_path / "mute")
    (full,) = measured(folder / "base", folder / "base")
    first = AutoTokenizer.from_pretrained(mute).convert_tokens_to_ids(full.base_answers[0].text.split()[0])
    (mute / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, first]}))
    silent = sum(each.text.split()[0] == full.base_answers[0].text.split()[0] for each in full.base_answers)
    assert 0 < silent < 5
    (found,) = measured(mute, mute)
    assert found.silent == silent and len(found.prompts) == 5 - silent and ASKED[0] not in found.prompts
    with pytest.raises(BadInput, match="answers every prompt of one with nothing"):
        measured(mute, mute, prompts=Prompts("one", (ASKED[0],), ((),)))


def test_a_model_without_the_bases_template_is_refused(folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder / "base", tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(BadInput, match=r"bare: has no chat template, by which the first model is asked; copy"):
        measured(folder / "base", bare)
    # A base that continues text is asked so, and so is what was made of it, whatever template it got.
    (found,) = measured(bare, folder / "base")
    assert found.kl is not None and found.kl.value == 0


def test_answers_are_kept_by_digest(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that changed is asked again."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    moved = shutil.copytree(folder / "moved", tmp_path / "moved")
    (first,) = measured(folder / "base", moved)
    asked: list[str] = []

    def watched(model: Any, *given: Any, **named: Any) -> Any:
        asked.append(model.name_or_path)
        return surgeon.answer(model, *given, **named)

    monkeypatch.setattr(module, "answer", watched)
    (again,) = measured(folder / "base", moved)
    assert not asked and again.to_json() == first.to_json() and again.answers == first.answers
    change(moved, lambda value: value * 1.01)
    measured(folder / "base", moved)
    assert asked == [str(moved)]


def test_shipped_prompts(tmp_path: Path) -> None:
    """About 120, none of which is among the instructions to replay; a file of the same rows is read alike."""
    shipped = read_prompts("shipped")
    assert len(shipped.prompts) == 120 and sum(map(bool, shipped.expected)) > 80
    replayed = read_prompts(Path(str(files("surgeon.data") / "instructions.jsonl")))
    assert len({each.casefold() for each in shipped.prompts + replayed.prompts}) == 240
    copied = tmp_path / "copy.jsonl"
    copied.write_bytes((files("surgeon.data") / "prompts.jsonl").read_bytes())
    assert read_prompts(copied).expected == shipped.expected
    lines = tmp_path / "lines.txt"
    lines.write_text("\ufeffOne prompt\r\n\n  Another: {a}\n", encoding="utf-8")
    assert read_prompts(lines).prompts == ("One prompt", "Another: {a}")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b"", "has no prompt; write one a line"),
        ("a.jsonl", b'{"prompt": "x"}\nHello\n', "line 2: no JSON object; write"),
        ("a.jsonl", b'{"text": "x"}', "line 1: `prompt` is missing or no text"),
        ("a.jsonl", b'{"prompt": " "}', "line 1: `prompt` is missing or no text"),
        ("a.jsonl", b'{"prompt": "x", "expected": [1]}', "line 1: `expected` is neither a text nor a list of texts"),
        ("a.jsonl", b"[" * 100_000, "line 1: no JSON object"),
        ("a.txt", b"\xff\xfe", "not UTF-8 text"),
        ("a.txt", b"x\n" * 10_001, "has 10,001 prompts; give at most 10,000"),
    ],
)
def test_wrong_prompts_are_one_line(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(BadInput) as refused:
        read_prompts(file)
    assert told in str(refused.value) and str(file) in str(refused.value) and "\n" not in str(refused.value)


def test_a_missing_file_of_prompts(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\.txt"):
        read_prompts(tmp_path / "none.txt")
