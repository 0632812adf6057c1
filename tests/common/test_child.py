"""A child with limits answers in JSON, refuses in its own words, and ends with its object."""

from __future__ import annotations

import os
from typing import Any

import pytest

from surgeon.common import child
from surgeon.common.child import Child, Failed, Limited
from surgeon.errors import BadInput


def answers(kind: str) -> Any:
    match kind:
        case "values":
            return [1, "\ud800 ж\n", None, {"a": [0.1]}, b"no text"]
        case "refused":
            raise BadInput("a file: no such thing")
        case "failed":
            raise KeyError("first\nsecond")
        case "memory":
            return bytearray(1 << 40)
        case "long":
            return "x" * 2000
    return os.environ[kind]


def test_what_a_child_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_LONGEST", 1000)
    opened = Child(lambda: answers)
    assert opened.ask("values") == [1, "\ud800 ж\n", None, {"a": [0.1]}, {"bytes": "b'no text'"}]
    with pytest.raises(BadInput, match=r"^a file: no such thing$"):
        opened.ask("refused")
    with pytest.raises(Failed, match="first"):
        opened.ask("failed")
    for kind in ("memory", "long"):
        with pytest.raises(Limited, match="more memory than it may have"):
            opened.ask(kind)
    assert opened.ask("values")


def test_tokenizers_make_no_threads_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """There they would wait for ever for threads that stayed behind; here what the user has set holds."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    assert Child(lambda: answers).ask("TOKENIZERS_PARALLELISM") == "false"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
