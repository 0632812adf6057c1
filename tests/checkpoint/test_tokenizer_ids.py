"""Files of a tokenizer that give a token different ids, against what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.tokenizer_ids import disagreement
from tests.checkpoint.files import sharded

VOCABULARY = {"<unk>": 0, "a": 1, "b": 2}


def token(content: str, **more: Any) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {**plain, "special": True, "content": content, **more}


def decoder(**ids: int) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(number): token(name) for name, number in ids.items()}}


# Files beside tokenizer.json (ids 0 to 2, and end 3), and words of the line: none where transformers does as they say.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing beside": ({}, ""),
    "the same": ({"vocab.json": VOCABULARY, "tokenizer_config.json": decoder(end=3, a=1)}, ""),
    "the next ids": ({"added_tokens.json": {"x": 4, "y": 5}}, ""),
    "a gap": ({"added_tokens.json": {"x": 4, "y": 9}}, "gives 'y' the id 9; tokenizer.json, by which transformers"),
    "another id": ({"vocab.json": {"a": 1, "b": 3}}, "vocab.json gives 'b' the id 3; tokenizer.json, by which"),
    "an id taken": ({"tokenizer_config.json": decoder(x=2)}, "tokenizer_config.json gives 'x' the id 2"),
    "two of them": ({"tokenizer_config.json": decoder(a=7, b=8)}, "the id 7, and 1 more otherwise;"),
    "broken": ({"tokenizer_config.json": {"added_tokens_decoder": {"one": token("x")}}}, ""),
}


def made(folder: Path, beside: dict[str, Any]) -> Path:
    model = {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "<unk>"}
    added = [token("end", id=3)]
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    content |= {"normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None}
    (sharded(folder) / "tokenizer.json").write_text(json.dumps(content | {"model": model}))
    for name, each in beside.items():
        (folder / name).write_text(json.dumps(each))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_line_where_transformers_gives_other_ids_than_a_file_says(case: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    beside, words = CASES[case]
    found = disagreement(CheckpointFolder.open(made(tmp_path, beside)))
    assert words in found and bool(words) == bool(found)
    if case == "broken":
        return
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path).get_vocab()
    listed = beside.get("tokenizer_config.json", {}).get("added_tokens_decoder", {})
    given = {each["content"]: int(number) for number, each in listed.items()}
    given |= beside.get("vocab.json", {}) | beside.get("added_tokens.json", {})
    assert bool(found) == any(loaded[name] != number for name, number in given.items())
