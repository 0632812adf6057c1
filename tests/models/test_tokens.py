from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from surgeon.errors import BadInput
from surgeon.models.tokens import probe_text, token_batches

EOS = 1
VOCABULARY = 2 + 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), eos=True)


def byte_tokenizer(folder: Path, *, eos: bool) -> Path:
    """A tokenizer of one token a byte: what it gives can be worked out by hand."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE(vocab={"<unk>": 0, "</s>": EOS} | {c: i + 2 for i, c in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>" if eos else None).save_pretrained(folder)
    return folder


def spelled(folder: Path, ids: torch.Tensor) -> str:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).decode(ids.flatten())


def test_plain_text_is_cut_into_windows(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("abcdefghijklmnopqrstuvwxyz")
    found = token_batches(folder, text=text, window=5, windows=3, vocabulary=VOCABULARY)
    assert found.ids.shape == (3, 5) and found.ids.dtype == torch.long
    assert spelled(folder, found.ids) == "abcdefghijklmno"
    assert str(text) in found.source


@pytest.mark.parametrize("all_of_it", [0, None])
def test_all_of_the_text(all_of_it: int | None, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("0123456789" * 1000 + "rest")
    found = token_batches(folder, text=text, window=10, windows=all_of_it, vocabulary=VOCABULARY)
    assert found.ids.shape == (1000, 10)


def test_fewer_windows_than_asked(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("abcdefghijkl")
    assert token_batches(folder, text=text, window=5, windows=8, vocabulary=VOCABULARY).ids.shape == (2, 5)
    with pytest.raises(BadInput, match="12 tokens, fewer than one window of 13"):
        token_batches(folder, text=text, window=13, vocabulary=VOCABULARY)


def test_documents_are_joined_by_the_end_of_sequence_token(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "ab"}\n\n{"text": "cde", "id": 7}\n{"text": "é"}\n')
    found = token_batches(folder, text=text, window=9, windows=1, vocabulary=VOCABULARY)
    assert spelled(folder, found.ids) == "ab</s>cde</s>é"
    bare = byte_tokenizer(tmp_path / "bare", eos=False)
    found = token_batches(bare, text=text, window=7, windows=1, vocabulary=VOCABULARY)
    assert spelled(bare, found.ids) == "abcdeé"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{'text': 1}", "not JSON"),
        (b'{"text": "cut', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'["text"]', 'no "text"'),
        (b'{"txt": "a"}', 'no "text"'),
        (b'{"text": 3}', 'no "text"'),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
def test_a_malformed_line_is_named(line: bytes, words: str, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "bad.jsonl"
    text.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(BadInput, match=rf"bad\.jsonl, line 2: {words}") as caught:
        token_batches(folder, text=text, window=2, vocabulary=VOCABULARY)
    assert "\n" not in str(caught.value)


def test_texts_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    binary = tmp_path / "binary"
    binary.write_bytes(b"abc\xff")
    empty = tmp_path / "empty.txt"
    empty.touch()
    listed = tmp_path / "list.json"
    listed.write_text('["a text", "ano')
    for path, words in (
        (tmp_path / "absent", "No such file"),
        (tmp_path, "not a regular file"),
        (fifo, "not a regular file"),
        (binary, r"not UTF-8 text \(byte 3"),
        (empty, "0 tokens.* give more text"),
        (listed, "would count as text; write a line"),
    ):
        with pytest.raises(BadInput, match=words):
            token_batches(folder, text=path, window=2, vocabulary=VOCABULARY)


def test_the_probe_text_serves_when_none_is_given(folder: Path) -> None:
    found = token_batches(folder, text=None, vocabulary=VOCABULARY)
    assert found.ids.shape == (8, 128) and "built-in" in found.source
    assert spelled(folder, found.ids[0]) == probe_text()[0][:128]
    assert sum(len(part.split()) for part in probe_text()) > 400


def test_without_a_tokenizer_the_tokens_are_random_and_said_to_be(tmp_path: Path) -> None:
    found = token_batches(tmp_path, text=None, windows=4, window=16, vocabulary=50)
    again = token_batches(tmp_path, text=None, windows=4, window=16, vocabulary=50)
    assert found.source == "random tokens, because there is no tokenizer in the folder"
    assert found.ids.shape == (4, 16) and found.ids.min() >= 0 and 40 < found.ids.max() < 50
    assert torch.equal(found.ids, again.ids)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "cannot be loaded" in token_batches(tmp_path, text=None, vocabulary=50).source


def test_a_text_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("abc")
    with pytest.raises(BadInput, match=r"no tokenizer in the folder, so .* cannot be tokenised"):
        token_batches(tmp_path, text=text, vocabulary=50)


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(BadInput, match="the model's own tokenizer"):
        token_batches(folder, text=None, vocabulary=50)


def test_code_of_a_tokenizer_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": ["strange.Strange", None]}})
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "strange.py").write_text("raise SystemExit('the code of the checkpoint has run')\n")
    found = token_batches(tmp_path, text=None, windows=1, vocabulary=50)
    assert "random" in found.source and "\n" not in found.source
