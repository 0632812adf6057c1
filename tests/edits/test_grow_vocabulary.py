"""`grow_vocabulary` from plan to training and back: by plain transformers, old logits stay and the bound holds.

Logits are compared with those of transformers' own classes on the base, and the loss on every old token in float64.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import surgeon
from surgeon.anatomy.decoders import USUAL_DECODERS
from surgeon.anatomy.skeleton import CAUSAL, IMAGE_TEXT
from surgeon.blueprint.blueprint import Output
from surgeon.blueprint.recipes import recipe
from surgeon.cli import app
from surgeon.errors import BadInput, PromiseBroken
from surgeon.models.compare import Tally
from surgeon.verification.verification import verification_view
from surgeon.writing.compute import Evaluator
from tests import tiny, vocabularies
from tests.checkpoints import add_letters, weights
from tests.decoders import tiny_decoder
from tests.vocabularies import ENGLISH, FRENCH, write_text

ROWS = 320
GROW = {"op": "grow_vocabulary", "tokens": {"learn": "fr.jsonl", "count": 12, "keep": "en.jsonl"}}
# Model types that surgeon derives: experts, a tower for images and tied embeddings, a head with a bias.
DERIVED = {"qwen3_moe": CAUSAL, "gemma3": IMAGE_TEXT, "phi": CAUSAL}


def plan_of(folder: Path, *operations: dict[str, Any], name: str = "plan.yaml") -> Path:
    """A plan, and the texts that it learns from beside it."""
    write_text(folder / "fr.jsonl", FRENCH, times=5)
    write_text(folder / "en.jsonl", ENGLISH)
    path = folder / name
    path.write_text(json.dumps({"surgeon": 1, "operations": list(operations)}))
    return path


def base_of(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    overrides = {"vocab_size": ROWS, "num_hidden_layers": 2, "dtype": "bfloat16"} | overrides
    return vocabularies.byte_level(tiny.checkpoint(folder / "base", family, **overrides))


def logits_of(folder: Path, ids: torch.Tensor, dtype: str, auto: str = CAUSAL) -> torch.Tensor:
    """By plain transformers; every parameter in memory of its own, so that both models compute on the same footing."""
    options = {"dtype": getattr(torch, dtype), "trust_remote_code": True}
    model = getattr(transformers, auto).from_pretrained(folder, **options).eval()
    for value in model.parameters():
        value.data = value.data.clone()
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


def check_promise(base: Path, out: Path, rows: int, dtypes: Sequence[str], auto: str = CAUSAL) -> None:
    """Old logits bit for bit; the loss on every old token, whichever comes next, up by at most log(1 + k/V)."""
    ids = torch.randint(4, min(rows, 38), (2, 12), generator=torch.Generator().manual_seed(0))
    for dtype in dtypes:
        before, after = logits_of(base, ids, dtype, auto), logits_of(out, ids, dtype, auto)
        assert torch.equal(before, after[..., :rows]), dtype
        old, new = (-torch.log_softmax(each.double(), -1)[..., :rows] for each in (before, after))
        bound = math.log1p((after.shape[-1] - rows) / rows)
        slack = 2 * torch.finfo(before.dtype).eps * float(after.abs().max())
        assert 0 < float((new - old).max()) <= bound + slack, dtype


@pytest.mark.parametrize("family", USUAL_DECODERS)
def test_every_family_keeps_its_logits_and_the_bound(family: str, tmp_path: Path) -> None:
    base = base_of(tmp_path, family)
    surgeon.apply(plan_of(tmp_path, GROW), base, tmp_path / "out", device="cpu")
    dtypes = ("float32", "bfloat16") if family in ("llama", "gemma2") else ("bfloat16",)
    check_promise(base, tmp_path / "out", ROWS, dtypes)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((base / "config.json").read_text()) | {"vocab_size": ROWS + 12}


@pytest.mark.parametrize("model_type", DERIVED)
def test_derived_model_types_take_it_with_layers_and_adapters_too(model_type: str, tmp_path: Path) -> None:
    auto = DERIVED[model_type]
    base = add_letters(tiny_decoder(tmp_path / "base", model_type, auto, dtype="bfloat16"))
    layers = {"op": "insert_layers", "where": {"after": [1]}, "init": {"kind": "copy"}}
    words = {"op": "grow_vocabulary", "tokens": ["abba", " cab", "abbot"], "pad_to_multiple_of": 64}
    adapters = {"op": "gated_adapters", "layers": [0], "size": 4}
    others = [layers, adapters] if model_type == "phi" else []
    surgeon.apply(plan_of(tmp_path, *others, words), base, tmp_path / "out", device="cpu")
    assert surgeon.verify(base, tmp_path / "out", device="cpu", windows=1, window=16).holds
    check_promise(base, tmp_path / "out", 256, ("float32",), auto)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, tmp_path / "out"))
    text = "text_config" if "text_config" in before else ""
    assert (after[text] if text else after)["vocab_size"] == 320
    surgeon.revert(tmp_path / "out", tmp_path / "back")
    assert_same(base, tmp_path / "back")


def assert_same(base: Path, back: Path) -> None:
    """Every tensor byte for byte, and every small file, tokenizer and config among them."""
    one, other = weights(base), weights(back)
    assert one.keys() == other.keys()
    assert all(torch.equal(value.view(torch.uint8), other[name].view(torch.uint8)) for name, value in one.items())
    for file in base.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            content = file.read_bytes() if file.name != "config.json" else json.loads(file.read_text())
            there = back / file.name
            assert content == (there.read_bytes() if file.name != "config.json" else json.loads(there.read_text()))


@pytest.mark.usefixtures("unproven")
def test_old_rows_are_read_back_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of an old row that is written otherwise is found; digests of base and output are those of their bytes."""
    base, out = base_of(tmp_path), tmp_path / "out"
    plan = plan_of(tmp_path, GROW)
    manifest = surgeon.apply(plan, base, out, device="cpu").manifest
    for folder, values in ((base, manifest.base.tensors), (out, manifest.new_tensors)):
        held = weights(folder)["lm_head.weight"]
        assert values["lm_head.weight"].sha256 == hashlib.sha256(held.view(torch.uint8).numpy().tobytes()).hexdigest()

    def with_another_bit(self: Evaluator, output: Output) -> Iterator[memoryview]:
        for nth, piece in enumerate(made(self, output)):
            yield piece if nth else memoryview(bytes([piece[0] ^ 1]) + bytes(piece[1:]))

    made = Evaluator.make
    monkeypatch.setattr(Evaluator, "make", with_another_bit)
    with pytest.raises(
        PromiseBroken, match=r"what was read back is not what (lm_head|model.embed_tokens).weight holds"
    ):
        surgeon.apply(plan, base, tmp_path / "other", device="cpu")


def test_rows_are_what_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of all rows of the output, the mean of the pieces' rows of the input, in float64, rounded once.

    However many rows are in memory at once, which are fewer than there are, and no divisor of them.
    """
    monkeypatch.setattr(recipe, "_ROW_BYTES_AT_ONCE", 7 * 32 * 2)
    base = base_of(tmp_path)
    padded = GROW | {"pad_to_multiple_of": 64}
    applied = surgeon.apply(plan_of(tmp_path, padded), base, tmp_path / "out", device="cpu")
    before, after = weights(base), weights(tmp_path / "out")
    mean = before["lm_head.weight"].double().mean(0).bfloat16()
    assert torch.equal(after["lm_head.weight"], torch.cat([before["lm_head.weight"], mean.expand(64, -1)]))
    read, reads = before["model.embed_tokens.weight"], after["model.embed_tokens.weight"]
    old = transformers.AutoTokenizer.from_pretrained(base)
    new = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for number in range(ROWS, ROWS + 12):
        pieces = old.backend_tokenizer.model.tokenize(new.convert_ids_to_tokens(number))
        wanted = read[[piece.id for piece in pieces]].double().mean(0).bfloat16()
        assert torch.equal(reads[number], wanted)
    assert torch.equal(reads[ROWS + 12 :], read.double().mean(0).bfloat16().expand(52, -1))
    assert applied.preview.parameters_new == 2 * 64 * 32
    means = surgeon.apply(plan_of(tmp_path, GROW | {"input_init": "mean"}), base, tmp_path / "means", device="cpu")
    assert torch.equal(weights(means.path)["model.embed_tokens.weight"][ROWS:], reads[ROWS + 12 : ROWS + 24])


def test_with_layers_and_adapters_in_one_plan_trained_and_taken_back(tmp_path: Path) -> None:
    base = base_of(tmp_path, num_hidden_layers=3)
    layers = {"op": "insert_layers", "where": {"after": [1]}, "init": {"kind": "copy"}}
    adapters = {"op": "gated_adapters", "layers": "all", "size": 4}
    surgeon.apply(plan_of(tmp_path, layers, GROW, adapters), base, tmp_path / "out", device="cpu")
    check_promise(base, tmp_path / "out", ROWS, ("float32", "bfloat16"))
    train(tmp_path, "out", weight_decay=0.1)
    trained = weights(tmp_path / "out-run")
    changed = {name for name, value in weights(tmp_path / "out").items() if not torch.equal(value, trained[name])}
    assert {"lm_head.weight", "model.embed_tokens.weight"} < changed
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(trained[name][:ROWS], weights(base)[name])
    assert surgeon.verify(base, tmp_path / "out-run", device="cpu", windows=2, window=16).holds
    surgeon.revert(tmp_path / "out-run", tmp_path / "back")
    assert_same(base, tmp_path / "back")


def train(folder: Path, out: str, *, steps: int = 4, **optimizer: float) -> None:
    config = {
        "surgeon_train": 1,
        "steps": steps,
        "batch": 2,
        "length": 16,
        "validation_sequences": 2,
        "optimizer": {"lr": 1e-2, "warmup": 1, **optimizer},
        "sources": [{"name": "fr", "path": "fr.jsonl", "share": 1.0, "validation": 0.1}],
    }
    (folder / "train.yaml").write_text(json.dumps(config))
    surgeon.train(folder / out, folder / "train.yaml", folder / f"{out}-run", device="cpu")


def test_training_moves_the_new_rows_alone(tmp_path: Path) -> None:
    """Tied (untied: the test before); with weight decay, which would move rows that get no gradient."""
    base = base_of(tmp_path, "qwen3")
    surgeon.apply(plan_of(tmp_path, GROW), base, tmp_path / "out", device="cpu")
    train(tmp_path, "out", weight_decay=0.5)
    before, born, after = (weights(folder) for folder in (base, tmp_path / "out", tmp_path / "out-run"))
    grown = [name for name, value in born.items() if value.shape[0] == ROWS + 12]
    assert grown == ["model.embed_tokens.weight"]
    for name, value in after.items():
        old = value[:ROWS] if name in grown else value
        assert torch.equal(old.view(torch.uint8), before[name].view(torch.uint8)), name
        assert name not in grown or not torch.equal(value[ROWS:], born[name][ROWS:])
    proof = surgeon.verify(base, tmp_path / "out-run", device="cpu", windows=2, window=16)
    assert proof.holds and proof.trained
    surgeon.revert(tmp_path / "out-run", tmp_path / "back")
    assert_same(base, tmp_path / "back")


def test_a_second_growth_a_delta_and_every_state(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    surgeon.apply(plan_of(tmp_path, GROW), base, tmp_path / "one", device="cpu")
    more = {"op": "grow_vocabulary", "tokens": [" zebra", "quagga"]}
    surgeon.apply(plan_of(tmp_path, more, name="more.yaml"), tmp_path / "one", tmp_path / "two", device="cpu")
    for earlier in (base, tmp_path / "one"):
        proof = surgeon.verify(earlier, tmp_path / "two", device="cpu", windows=2, window=16)
        assert proof.holds and proof.bounded, [check for check in proof.checks if not check.holds]
    surgeon.revert(tmp_path / "two", tmp_path / "back-one")
    assert_same(tmp_path / "one", tmp_path / "back-one")
    surgeon.revert(tmp_path / "two", tmp_path / "back", to=0)
    assert_same(base, tmp_path / "back")
    assert surgeon.verify(base, tmp_path / "back-one", device="cpu", windows=2, window=16).holds

    surgeon.make_delta(tmp_path / "one", tmp_path / "delta")
    surgeon.apply_delta(tmp_path / "delta", str(base), tmp_path / "again")
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    found = surgeon.diff(base, tmp_path / "one")
    assert set(found.extended) == {"lm_head.weight", "model.embed_tokens.weight"} and not found.changed


def test_what_was_edited_since_is_found(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    surgeon.apply(plan_of(tmp_path, GROW), base, tmp_path / "out", device="cpu")
    kept = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    holding = next(path for path in kept if path.suffix == ".safetensors" and "lm_head.weight" in load_file(path))

    def failing() -> set[str]:
        found = {check.name for check in surgeon.verify(base, tmp_path / "out", logits=False).checks if not check.holds}
        for path, content in kept.items():
            path.write_bytes(content)
        return found

    tensors = load_file(holding)
    tensors["lm_head.weight"][5] += 1
    save_file(tensors, holding, metadata={"format": "pt"})
    assert {"base tensors", "new tensors"} <= failing()
    file = tmp_path / "out" / "tokenizer.json"
    file.write_bytes(kept[file].replace(b'"the"', b'"eht"'))
    assert {"inserted", "files"} <= failing()
    assert not failing()


def test_a_bound_that_is_broken_is_said(tmp_path: Path) -> None:
    """Rows of the output that are far from the mean take more than their share."""
    from tests.compared_logits import compare_logits

    base = base_of(tmp_path)
    surgeon.apply(plan_of(tmp_path, GROW), base, tmp_path / "out", device="cpu")
    ids = torch.arange(4, 36).reshape(2, 16)
    (kept, _) = compare_logits(base, tmp_path / "out", ids, new=range(ROWS, ROWS + 12))
    assert kept.identical and kept.grown is not None and kept.grown.kept
    before, after = logits_of(base, ids, "bfloat16").double(), logits_of(tmp_path / "out", ids, "bfloat16").double()
    rise = torch.logsumexp(after, -1) - torch.logsumexp(before, -1)
    assert kept.grown.rise == pytest.approx(float(rise.max()), rel=1e-9)
    assert kept.out_loss - kept.base_loss == pytest.approx(float(rise[:, :-1].mean()), rel=1e-6)
    holding = next(p for p in (tmp_path / "out").glob("*.safetensors") if "lm_head.weight" in load_file(p))
    tensors = load_file(holding)
    tensors["lm_head.weight"][ROWS:] = 40 * tensors["lm_head.weight"][7]
    save_file(tensors, holding, metadata={"format": "pt"})
    (broken, _) = compare_logits(base, tmp_path / "out", ids, new=range(ROWS, ROWS + 12))
    assert broken.identical and broken.grown is not None and not broken.grown.kept


def test_old_rows_that_are_no_multiple_of_four(tmp_path: Path) -> None:
    """The last V mod 4 logits are promised to rounding, all others to the bit; verify judges by that."""
    base = base_of(tmp_path, vocab_size=ROWS + 3, dtype="float32")
    plan, out = plan_of(tmp_path, GROW), tmp_path / "out"
    (record,) = surgeon.preview(plan, base).blueprint.operations
    assert record.claim.promise == "rounding" and "those of the last 3 old tokens" in record.claim.reason
    surgeon.apply(plan, base, out, device="cpu")
    found = surgeon.verify(base, out, device="cpu", windows=2, window=16)
    assert found.holds and found.same_before_tail and found.bounded
    comparison = next(c for c in found.comparisons if c.mode == "prefill")
    # A difference that rounding allows of any logit is broken where it is of one before them.
    off = dataclasses.replace(comparison, identical=False, max_abs_difference=1e-7, largest=1.0)
    for same_before_tail in (True, False):
        found.comparisons[:] = [dataclasses.replace(off, same_before_tail=same_before_tail)]
        assert found.holds is same_before_tail
    tally = Tally("prefill", "float32", range(7, 9))
    logits = torch.zeros(1, 2, 7)
    for number, before_tail in ((6, True), (4, True), (3, False)):
        apart = torch.cat([logits, torch.full((1, 2, 2), -1.0)], -1)
        apart[..., number] = 1e-7
        tally.add(logits, apart, torch.zeros(1, 2, dtype=torch.long))
        assert tally.result().same_before_tail is before_tail and not tally.result().identical


def test_the_command_line_shows_fertility_and_the_bound(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    plan = plan_of(tmp_path, GROW | {"measure": "en.jsonl"})
    wide = {"COLUMNS": "200"}
    shown = CliRunner().invoke(app, ["preview", str(plan), str(base)], env=wide)
    assert shown.exit_code == 0 and "tokens a word" in shown.output and "learned from" in shown.output
    applied = surgeon.apply(plan, base, tmp_path / "out", device="cpu")
    assert [text["use"] for text in applied.to_json()["texts"]] == ["learned from", "kept", "measured"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "documents that tokenise as before" in card and "`fr.jsonl`" in card and "rows from 320 on" in card
    assert "4 of 4" in CliRunner().invoke(app, ["inspect", str(tmp_path / "out")], env=wide).output
    found = surgeon.verify(base, tmp_path / "out", device="cpu", windows=2, window=16)
    assert found.holds and found.identical and found.bounded
    told = io.StringIO()
    Console(file=told, width=200).print(verification_view(found))
    assert "log(1 + k/V)" in told.getvalue() and "every old logit is bit-identical" in told.getvalue()


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "twice": ([GROW, GROW], "join the two"),
    "no keep": ([GROW | {"tokens": {"learn": "fr.jsonl", "count": 3}}], "needs `keep`"),
    "keep for nothing": ([GROW | {"tokens": GROW["tokens"] | {"how": "appended"}}], "no meaning"),  # type: ignore[operator]
    "no such text": ([GROW | {"tokens": {"learn": "no.jsonl", "count": 3, "how": "appended"}}], "no such text"),
    "nothing": ([GROW | {"tokens": []}], "empty"),
    "not UTF-8": ([GROW | {"tokens": "latin.txt"}], "not UTF-8"),
    "no such file": ([GROW | {"tokens": "no.txt"}], "no such text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    operations, reason = REFUSED[case]
    base = base_of(tmp_path)
    (tmp_path / "latin.txt").write_bytes("été\n".encode("latin-1"))
    with pytest.raises(BadInput, match=reason) as told:
        surgeon.preview(plan_of(tmp_path, *operations), base)
    assert "\n" not in str(told.value)


def test_surgeon_families_tries_it(tmp_path: Path) -> None:
    assert surgeon.families(base_of(tmp_path, num_hidden_layers=1)).takes("grow_vocabulary")


def test_pieces_for_tied_embeddings_and_words_of_a_file(tmp_path: Path) -> None:
    base = base_of(tmp_path, "qwen3")
    with pytest.raises(BadInput, match="tied"):
        surgeon.preview(plan_of(tmp_path, GROW | {"input_init": "pieces"}), base)
    plan = plan_of(tmp_path, {"op": "grow_vocabulary", "tokens": "words.txt"})
    (tmp_path / "words.txt").write_text(" zebra\n\nquagga\n", encoding="utf-8")
    rows = surgeon.preview(plan, base).blueprint.new_rows
    assert len(rows) >= 2
    # As some editors save it, with a byte order mark and line ends of two characters.
    (tmp_path / "words.txt").write_bytes(b"\xef\xbb\xbf zebra\r\n\r\nquagga\r\n")
    assert surgeon.preview(plan, base).blueprint.new_rows == rows
    (tmp_path / "words.txt").write_text("quagga\n\nzebra\nquagga\n", encoding="utf-8")
    with pytest.raises(
        BadInput, match=r"words.txt, line 4 \('quagga'\): given before, .*words.txt, line 1; leave it out"
    ):
        surgeon.preview(plan, base)
