"""Tokenizers and chat templates of strangers: what loops, bloats or dies ends in one line, soon, and nothing hangs."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surgeon.common import child
from surgeon.data.chats import Chat, Message
from surgeon.data.encoding import Encoder
from surgeon.errors import BadInput
from surgeon.models.tokenizer import open_tokenizer
from tests.training.texts import CHAT_TEMPLATE, add_tokenizer

CHAT = Chat((Message("user", "w1 w2"), Message("assistant", "w3")))


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(child, "SECONDS", 0.3)
    monkeypatch.setattr(child, "MEMORY", 1 << 30)
    before = children()
    yield
    # No child outlives its tokenizer.
    gc.collect()
    assert children() <= before


def children() -> set[str]:
    """The processes that this one has begun and not let go of."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def refused(folder: Path, document: Any = CHAT) -> str:
    before = children()
    with pytest.raises(BadInput) as caught:
        opened = Encoder(folder, vocabulary=128)
        # A child computes, this process waits.
        assert len(children() - before) == 1
        opened.encode(document)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES: dict[str, tuple[str, str | tuple[str, ...]]] = {
    "loops": (LOOP, "its chat template was stopped after 0.3 seconds of computing"),
    "marked loops": ("{% generation %}" + LOOP + "{% endgeneration %}", "was stopped after 0.3 seconds"),
    "multiplies": ("{{ 'a' * 10 ** 10 }}", "its chat template needs more memory than it may have"),
    "formats": ("{{ '%10000000000d' % 1 }}", "needs more memory than it may have"),
    "doubles": (
        "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        ("needs more memory than it may have", "was stopped after 0.3 seconds"),
    ),
    "recurses": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ("fails on a text (maximum recursion", "was stopped after 0.3 seconds"),
    ),
    "refuses": ("{{ raise_exception('roles must\nalternate') }}", "fails on a text (roles must"),
    "reaches out": ("{{ ''.__class__.__mro__ }}", "fails on a text (access to attribute '__class__' of 'str'"),
    "is none": ("{% if %}", "its chat template fails on a text (Expected an expression"),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_that_does_not_end_well(kind: str, tmp_path: Path) -> None:
    template, told = TEMPLATES[kind]
    add_tokenizer(tmp_path, template=template)
    found = refused(tmp_path)
    assert any(words in found for words in ([told] if isinstance(told, str) else told))
    assert found.startswith(str(tmp_path / "chat_template.jinja"))


def changed(folder: Path, **parts: Any) -> Path:
    """A tokenizer.json with other parts."""
    add_tokenizer(folder, template=CHAT_TEMPLATE)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return folder


def replaced(pattern: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": by}


def test_a_tokenizer_that_does_not_end_well(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    found = refused(changed(tmp_path / "backtracks", pre_tokenizer=split), "x" * 200_000)
    assert found.startswith(str(tmp_path / "backtracks" / "tokenizer.json"))
    # Either the library's own limit of steps, or ours of time.
    assert "fails on a text" in found or "was stopped after" in found
    bombs = {"type": "Sequence", "normalizers": [replaced("a", "a" * 100)] * 6}
    found = refused(changed(tmp_path / "bloats", normalizer=bombs), "a")
    assert "was stopped after" in found or "short of memory perhaps" in found or "fails on a text" in found


def test_nothing_that_is_open_here_stays_open_in_it(tmp_path: Path) -> None:
    """Another process that waits for the end of its input is not kept waiting."""
    add_tokenizer(tmp_path, template=CHAT_TEMPLATE)
    reads, writes = os.pipe()
    found, _ = open_tokenizer(tmp_path)
    assert found is not None and found.ids("w5") == [15]
    os.close(writes)
    os.set_blocking(reads, False)
    # Where the child had the other end, this would be a BlockingIOError.
    assert os.read(reads, 1) == b""
    os.close(reads)
    assert found.ids("w5") == [15]


def test_it_is_the_tokenizer_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Numbers and text come back as transformers gives them, from several at once, and nothing is shown."""
    from transformers import AutoTokenizer

    add_tokenizer(tmp_path, template=CHAT_TEMPLATE)
    plain = AutoTokenizer.from_pretrained(tmp_path)
    # An output with grafts: of a type that transformers lacks, with Llama 3.1's positions.
    scaled = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    config = {"model_type": "upcycled_llama", "max_position_embeddings": 512}
    for key in ("rope_scaling", "rope_parameters"):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: scaled}))
        assert open_tokenizer(tmp_path)[1] == ""
    # What older libraries say of a vocabulary with holes when it is saved.
    capfd.readouterr()
    (first, _), (second, _) = open_tokenizer(tmp_path), open_tokenizer(tmp_path)
    assert first is not None
    assert second is not None
    turns = [{"role": message.role, "content": message.content} for message in CHAT.messages]
    for words in ("", "w1 w2", "w1 \ud800 ".encode("utf-8", "ignore").decode() + "é" * 70_000):
        whole = plain(words, return_offsets_mapping=True)
        assert first.ids(words) == whole["input_ids"]
        assert first.offsets(words) == (whole["input_ids"], whole["offset_mapping"])
    assert second.render(turns) == plain.apply_chat_template(turns, tokenize=False)
    assert second.decode([10, 11]) == "w0 w1"
    assert (first.eos_token_id, first.all_special_ids) == (plain.eos_token_id, plain.all_special_ids)
    # One that is gone stays gone, and the other does not mind.
    del second
    assert first.ids("w5") == [15]
    with pytest.raises(BadInput, match="was stopped after"):
        first.render(turns, template=LOOP)
    with pytest.raises(BadInput, match="was stopped after"):
        first.ids("w5")
    assert capfd.readouterr() == ("", "")
