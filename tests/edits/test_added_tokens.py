"""Special and added tokens, as transformers' `add_special_tokens` and `add_tokens` add them, and the rows they get."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import surgeon
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.tokenizer_files import without
from surgeon.edits.vocabulary.grow import grow
from surgeon.errors import BadInput
from surgeon.models.compare import Tally
from tests import tiny, vocabularies
from tests.checkpoints import weights
from tests.manifest.edits import resealed

SPECIAL = ["<think>", "</think>", "<b\n>", ' "q\\', "<s>x"]
ADDED = ["<tool>", "été"]
MARKS = {"op": "grow_vocabulary", "special": SPECIAL[:2], "added": ADDED[:1]}
TEXTS = [
    "the cat sat",
    *(text for mark in (*SPECIAL, *ADDED) for text in (mark, f"a{mark}b {mark} the")),
    "".join(SPECIAL),
    "<s>the <think>cat</s>",
]


def base_of(folder: Path, *, rows: int, family: str = "llama") -> Path:
    """Of 300 tokens."""
    return vocabularies.byte_level(
        tiny.checkpoint(folder, family, vocab_size=rows, num_hidden_layers=2, dtype="bfloat16")
    )


def plan_of(folder: Path, *operations: dict[str, Any]) -> Path:
    path = folder / "plan.yaml"
    path.write_text(json.dumps({"surgeon": 1, "operations": list(operations)}))
    return path


def as_of_version_4(folder: Path) -> None:
    """The files as transformers 4 writes them: every added token is listed in four."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    settings["added_tokens_decoder"] = {str(each.pop("id")): each for each in added}
    settings["additional_special_tokens"] = ["<pad>"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["<pad>"]}))
    ids = {each["content"]: int(number) for number, each in settings["added_tokens_decoder"].items()}
    (folder / "added_tokens.json").write_text(json.dumps(ids))


def check_same(one: Any, other: Any) -> None:
    """The same ids, texts, special tokens and chats."""
    assert one.get_vocab() == other.get_vocab() and set(one.all_special_ids) == set(other.all_special_ids)
    for text in TEXTS:
        ids = one(text)["input_ids"]
        assert ids == other(text)["input_ids"], text
        for skip in (False, True):
            assert one.decode(ids, skip_special_tokens=skip) == other.decode(ids, skip_special_tokens=skip), text
    chat = [{"role": "user", "content": "<think>the</think> cat"}]
    assert one.apply_chat_template(chat, tokenize=False) == other.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize("version_4", [False, "with a list", "without one"])
@pytest.mark.parametrize(
    "make",
    [vocabularies.byte_level, vocabularies.sentencepiece_like, vocabularies.word_piece, vocabularies.unigram],
)
def test_the_tokenizer_is_that_of_transformers(make: Callable[[Path], Path], version_4: object, tmp_path: Path) -> None:
    base = make(tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=1, vocab_size=400))
    if version_4:
        as_of_version_4(base)
    if version_4 == "without one":
        # As Llama 3's.
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            settings = json.loads((base / name).read_text())
            del settings["additional_special_tokens"]
            (base / name).write_text(json.dumps(settings, indent=2))
    marks = dict.fromkeys(SPECIAL, True) | dict.fromkeys(ADDED, False)
    folder, out = CheckpointFolder.open(base), tmp_path / "out"
    grown = grow(folder, (), rows=400, added=marks)
    out.mkdir()
    for name in folder.side_files:
        (out / name).write_bytes(grown.files.get(name) or (base / name).read_bytes())
        assert without((out / name).read_bytes(), grown.inserted.get(name, ())) == (base / name).read_bytes()
    wanted, made = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(out)
    wanted.add_special_tokens({"additional_special_tokens": SPECIAL}, replace_extra_special_tokens=False)
    wanted.add_tokens(ADDED)
    check_same(wanted, made)
    listed = {"tokenizer.json"} | {"tokenizer_config.json"}
    listed |= {"added_tokens.json"} if version_4 else set()
    listed |= {"special_tokens_map.json"} if version_4 == "with a list" else set()
    assert {name for name in grown.files if grown.files[name] != (base / name).read_bytes()} == listed
    made.save_pretrained(tmp_path / "saved")
    check_same(wanted, AutoTokenizer.from_pretrained(tmp_path / "saved"))


# Rows of the base, the type, and what else the operation says; with 3 new tokens behind 300.
ROWS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "free rows": (320, "llama", {}),
    "free rows, tied": (320, "qwen3", {}),
    "no free row": (300, "llama", {}),
    "some": (302, "qwen3", {}),
    "no multiple of four": (303, "llama", {}),
    "padding": (320, "llama", {"pad_to_multiple_of": 64}),
    "words too": (320, "llama", {"tokens": [" zebra"]}),
}


@pytest.mark.parametrize("case", ROWS)
def test_free_rows_come_first_and_old_logits_stay(case: str, tmp_path: Path) -> None:
    rows, family, settings = ROWS[case]
    base, out = base_of(tmp_path / "base", rows=rows, family=family), tmp_path / "out"
    applied = surgeon.apply(plan_of(tmp_path, MARKS | settings), base, out, device="cpu")
    new = applied.preview.blueprint.new_rows
    for streamed in (False, True):
        found = surgeon.verify(base, out, device="cpu", windows=2, window=16, streamed=streamed)
        assert found.holds and found.bounded, found.checks
        assert {grown.added for grown in found.grown.values()} == {len(new)}
    before, after = weights(base), weights(out)
    for name, value in after.items():
        if value.shape != before[name].shape or not torch.equal(value, before[name]):
            assert torch.equal(value[:300], before[name][:300])
            assert torch.equal(value[new.stop : rows], before[name][new.stop :])
            assert not torch.equal(value[300], before[name][300]) if rows > 300 else len(value) == new.stop
    head = after.get("lm_head.weight", after["model.embed_tokens.weight"])
    mean = before.get("lm_head.weight", before["model.embed_tokens.weight"]).double().mean(0).bfloat16()
    assert torch.equal(head[new.start : new.stop], mean.expand(len(new), -1))
    assert AutoTokenizer.from_pretrained(out)("<think>a</think><tool>")["input_ids"][::2] == [300, 301]
    if rows == 300:
        surgeon.revert(out, tmp_path / "back")
        assert all((tmp_path / "back" / f.name).read_bytes() == f.read_bytes() for f in base.glob("*token*"))
    else:
        with pytest.raises(BadInput, match="so its earlier value is lost; take the base"):
            surgeon.revert(out, tmp_path / "back")


def test_trained_and_operated_on_again(tmp_path: Path) -> None:
    base, out = base_of(tmp_path / "base", rows=320), tmp_path / "out"
    surgeon.apply(plan_of(tmp_path, MARKS), base, out, device="cpu")
    assert "the rows from 300 on" in (out / "README.md").read_text()
    vocabularies.write_text(tmp_path / "fr.jsonl", ["le <think>chat</think> était <tool> assis"], times=40)
    config = {
        "surgeon_train": 1,
        "steps": 3,
        "batch": 2,
        "length": 16,
        "validation_sequences": 2,
        "optimizer": {"lr": 1e-2, "warmup": 1, "weight_decay": 0.5},
        "sources": [{"name": "fr", "path": "fr.jsonl", "share": 1.0, "validation": 0.1, "control_tokens": "as_tokens"}],
    }
    (tmp_path / "train.yaml").write_text(json.dumps(config))
    surgeon.train(out, tmp_path / "train.yaml", tmp_path / "run", device="cpu")
    born, trained = weights(out), weights(tmp_path / "run")
    changed = {n: (trained[n] != value).any(-1).nonzero().flatten() for n, value in born.items() if value.ndim > 1}
    assert {n: {*rows.tolist()} for n, rows in changed.items() if len(rows)} == {
        name: {300, 301, 302} for name in ("lm_head.weight", "model.embed_tokens.weight")
    }
    assert surgeon.verify(base, tmp_path / "run", device="cpu", windows=2, window=16).holds
    trim = {"op": "trim_vocabulary", "tokens": ["the cat"], "pad_to_multiple_of": 1}
    more = {"op": "grow_vocabulary", "special": ["<more>"], "tokens": [" zebra"]}
    for name, operation in (("trim", trim), ("more", more)):
        surgeon.apply(plan_of(tmp_path, operation), out, tmp_path / name, device="cpu")
        assert surgeon.verify(out, tmp_path / name, device="cpu", windows=2, window=16).holds
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert tokenizer.tokenize("<think>the<tool>") == ["<think>", "the", "<tool>"]
        assert "<think>" in tokenizer.all_special_tokens


def test_a_row_that_a_token_uses_is_not_a_free_one(tmp_path: Path) -> None:
    """Neither by a manifest that was edited, nor by a config or generation settings that have an id of their own."""
    base, out = base_of(tmp_path / "base", rows=320), tmp_path / "out"
    surgeon.apply(plan_of(tmp_path, MARKS), base, out, device="cpu")
    manifest = json.loads((out / "surgery.json").read_text())
    manifest["facts"]["0"]["rows"] = 299
    (out / "surgery.json").write_text(json.dumps(resealed(manifest)))
    wrong = {check.name for check in surgeon.verify(base, out, logits=False).checks if not check.holds}
    assert "tokenizer" in wrong
    for file in ("generation_config.json", "config.json"):
        said = json.loads((base / file).read_text())
        (base / file).write_text(json.dumps(said | {"eos_token_id": [2, 301]}))
        with pytest.raises(
            BadInput, match=rf" {file}: uses the id 301, which the tokenizer gives .* it out of {file}$"
        ):
            surgeon.preview(plan_of(tmp_path, MARKS), base)
        (base / file).write_text(json.dumps(said))


def test_the_bound_of_rows_that_the_base_has() -> None:
    """Of rows made anew logits may be any within the bound; those of all others may not differ."""
    base = torch.zeros(1, 2, 8)
    after, targets = base.clone(), torch.zeros(1, 2, dtype=torch.long)
    for value, kept in ((-3.0, True), (0.0, True), (5.0, False)):
        after[..., 5:7] = value
        tally = Tally("prefill", "float32", range(5, 7))
        tally.add(base, after, targets)
        found = tally.result()
        assert found.identical and (found.grown is None or found.grown.kept is kept)
    after[..., 7] = 1.0
    tally.add(base, after, targets)
    assert not tally.result().identical


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"special": [], "added": []}, "empty, so there is nothing to add"),
    "empty": ({"special": ["<a>", ""]}, "'': write a token of 1 to 200 characters"),
    "white space": ({"added": ["\n "]}, "not of white space only"),
    "long": ({"special": ["x" * 201]}, "write a token of 1 to 200 characters"),
    "no text": ({"special": [1]}, "`operations.0.special.0` is 1; it takes text"),
    "no list": ({"special": "<a>"}, r"`operations.0.special` is \"<a>\"; it takes \[TEXT"),
    "there": ({"special": ["<a>", "<s>", " the"]}, r"1 \('<s>'\): already a token \('<s>', id 1\), and so are 2"),
    "a word": ({"special": ["zebra"], "tokens": ["zebra"]}, r"`tokens` 0 \('zebra'\): already a token"),
    "twice": ({"special": ["<a>", "<a>"]}, r"plan.yaml:1: .*'<a>': 2 times in `special` and `added`; list it once"),
    "special and not": ({"special": ["<a>"], "added": ["<a>"]}, r"'<a>': 2 times in `special` and `added`"),
    "a byte": (
        {"special": ["é"]},
        r"0 \('é'\): the vocabulary writes a single byte so \(id 169\).* in `tokens`",
    ),
    "taken apart": ({"added": ["<s>x"]}, "makes '<s>', 'x' of it, no token of its own: an added token of the base"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_added_is_refused(case: str, tmp_path: Path) -> None:
    settings, reason = REFUSED[case]
    base = base_of(tmp_path / "base", rows=320)
    with pytest.raises(BadInput, match=reason):
        surgeon.preview(plan_of(tmp_path, {"op": "grow_vocabulary", **settings}), base)


def test_tokens_that_the_tokenizer_makes_the_same_are_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", rows=320)
    held = json.loads((base / "tokenizer.json").read_text())
    (base / "tokenizer.json").write_text(json.dumps(held | {"normalizer": {"type": "Lowercase"}}))
    plan = plan_of(tmp_path, {"op": "grow_vocabulary", "added": ["ZEBRA", "<x>", "Zebra"]})
    with pytest.raises(BadInput, match=r"2 \('Zebra'\): the grown tokenizer makes .* of it, no token of its own"):
        surgeon.preview(plan, base)


def test_more_tokens_than_rows_lead_to_rows(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"op": "grow_vocabulary", "special": ["<a>"]})
    with pytest.raises(BadInput, match=r"add rows first \(`pad_to`, `vocabulary: 300`\)"):
        surgeon.preview(plan, base_of(tmp_path / "base", rows=290))


def test_an_id_that_transformers_gives_otherwise_is_named(tmp_path: Path) -> None:
    """It gives added tokens the next free ids, whatever the file says."""
    base = base_of(tmp_path / "base", rows=320)
    made = json.loads((base / "tokenizer.json").read_text())
    made["added_tokens"].append(made["added_tokens"][0] | {"id": 310, "content": "<late>"})
    (base / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(BadInput, match=r"has the id 310, and transformers none above 300; save it with this version"):
        surgeon.preview(plan_of(tmp_path, MARKS), base)
