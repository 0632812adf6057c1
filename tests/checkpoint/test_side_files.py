"""Side files of another shape or encoding: each is refused by name or passed over, none ends as a bug."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surgeon.cli import app
from tests.decoders import tiny_decoder
from tests.house import HERE
from tests.vocabularies import byte_level

FILES = ("vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "preprocessor_config.json")
SETTINGS = ("tokenizer_config.json", "generation_config.json", "chat_template.json", "special_tokens_map.json")
NESTED = {"added_tokens_decoder": [1], "added_tokens": {"a": 1}, "model": 3, "chat_template": {"a": 1}, "eos_token": 5}
ODD = {
    "no UTF-8": b"\xff{}",
    "a list within": b'{"a": [1]}',
    "a list": b"[1]",
    "null": b"null",
    "cut": b"{",
    "deep": b"[" * 5_000,
    "nested": json.dumps(NESTED).encode(),
}


@pytest.mark.parametrize("file", [*FILES, *SETTINGS])
def test_no_side_file_ends_as_a_bug(file: str, plan: Callable[..., Path], tmp_path: Path) -> None:
    base = byte_level(tiny_decoder(tmp_path / "base", "llama", vocab_size=400))
    words = tmp_path / "words.txt"
    words.write_text("zorblax\nfoobarix\n", encoding="utf-8")
    grow = plan({"op": "grow_vocabulary", "tokens": str(words)}, name="grow.yaml")
    trim = plan({"op": "trim_vocabulary", "scripts": ["Latin"]}, name="trim.yaml")
    for what, content in ODD.items():
        (base / file).write_bytes(content)
        for arguments in (["inspect", base], ["preview", grow, base], ["preview", trim, base]):
            result = CliRunner().invoke(app, [*map(str, arguments)])
            assert result.exit_code in (0, 2), (what, arguments, result.stderr)


def test_they_are_read_through_one_function_of_each_kind() -> None:
    """No parser and no decoder that raises what is not BadInput stands right around what was read of a base."""
    # What cannot be read is passed over there, by an `except` of both lines.
    allowed = {"surgeon.checkpoint.trust"}
    for module in HERE.modules.keys() - allowed:
        for node in ast.walk(HERE.trees[module]):
            match node:
                case ast.Call(func=ast.Attribute(attr="loads"), args=[ast.Call(func=ast.Attribute(attr=read))]):
                    assert read not in ("read_side_file", "small"), f"{module}:{node.lineno}"
                case ast.Call(func=ast.Attribute(attr="decode", value=ast.Call(func=ast.Attribute(attr=read)))):
                    assert node.args[1:] or read not in ("read_side_file", "small"), f"{module}:{node.lineno}"
