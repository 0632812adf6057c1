"""Tokens to compare checkpoints on: the user's text or a built-in one, encoded by the checkpoint's tokenizer."""

from __future__ import annotations

import functools
import json
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgeon.errors import BadInput, printable
from surgeon.models.load import LOAD_FAILURES, first_line, quiet_transformers

# A folder with none of these has no tokenizer; any other failure to load one gets a message of its own.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)

# Enough characters for the tokens asked for, in any script, without reading all of a large file.
_CHARACTERS_A_TOKEN = 32


@functools.cache
def probe_text() -> tuple[str, ...]:
    """The built-in documents: prose in several languages, code and mathematics."""
    return tuple((files("surgeon.models") / "probe.txt").read_text(encoding="utf-8").split("=====\n"))


@dataclass(frozen=True)
class TokenBatches:
    """`ids` (windows, window), int64; `source` describes in words where they come from."""

    ids: Tensor
    source: str


def token_batches(
    folder: Path,
    *,
    text: Path | None,
    window: int = 128,
    windows: int | None = 8,
    vocabulary: int,
    seed: int = 0,
) -> TokenBatches:
    """Cut `text`, tokenised by the tokenizer in `folder`, into at most `windows` windows of `window` tokens.

    `text` is UTF-8: .jsonl with a "text" a line, or plain text as one document; None means a built-in probe
    in several languages. Documents are joined with the end-of-sequence token where the tokenizer has one.
    `windows` 0 or None takes all of the text; a last window that is not full is dropped. Without a text and
    without a usable tokenizer the ids are random, seeded by `seed`, below `vocabulary`, and `source` says so.
    Raises BadInput for a text that cannot be read, gives no full window, or has tokens beyond `vocabulary`.
    """
    if window < 2 or vocabulary < 1:
        raise ValueError(f"window must be at least 2 and vocabulary at least 1, not {window} and {vocabulary}")
    limit = window * windows if windows else None
    if text is not None:
        # Read before the tokenizer is loaded, so that a wrong path is reported at once.
        shown = printable(str(text))
        documents = _documents(text, None if limit is None else limit * _CHARACTERS_A_TOKEN)
        tokenizer, why_not = find_tokenizer(folder)
        if tokenizer is None:
            raise BadInput(
                f"{printable(str(folder))}: {why_not}, so {shown} cannot be tokenised; add the tokenizer's files"
            )
        source = shown
    else:
        tokenizer, why_not = find_tokenizer(folder)
        if tokenizer is None:
            made = torch.Generator().manual_seed(seed)
            ids = torch.randint(vocabulary, (windows or 8, window), generator=made)
            return TokenBatches(ids, f"random tokens (seed {seed}), because {why_not}")
        documents, source = iter(probe_text()), "the built-in probe text (several languages and code)"
    stream = _token_stream(tokenizer, documents)
    tokens = torch.tensor(list(stream if limit is None else islice(stream, limit)), dtype=torch.long)
    full = len(tokens) // window
    if full == 0:
        raise BadInput(f"{source} gives {len(tokens)} tokens, fewer than one window of {window}; use a smaller window")
    ids = tokens[: full * window].view(full, window)
    if int(ids.max()) >= vocabulary:
        raise BadInput(
            f"{printable(str(folder))}: its tokenizer gives token {int(ids.max())}, but the model has only"
            f" {vocabulary} tokens; the tokenizer belongs to another model"
        )
    return TokenBatches(ids, source)


def _token_stream(tokenizer: Any, documents: Iterator[str]) -> Iterator[int]:
    between = False
    for document in documents:
        with quiet_transformers():
            encoded = tokenizer.encode(document, add_special_tokens=False)
        if between and tokenizer.eos_token_id is not None:
            yield tokenizer.eos_token_id
        between = True
        yield from encoded


def find_tokenizer(folder: Path) -> tuple[Any, str]:
    """The tokenizer in `folder`, or None and the reason in words. Never runs code from the folder."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None, "there is no tokenizer in the folder"
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True), ""
    except LOAD_FAILURES as error:
        return None, f"the tokenizer in the folder cannot be loaded ({first_line(error)})"


def _documents(path: Path, characters: int | None) -> Iterator[str]:
    """The documents of a text file; of a plain text at most the first `characters`."""
    shown = printable(str(path))
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise BadInput(f"{shown}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise BadInput(f"{shown}: not a regular file; expected .jsonl or plain text")
    return _json_lines(path, shown) if path.suffix.lower() == ".jsonl" else _plain(path, shown, characters)


def _plain(path: Path, shown: str, characters: int | None) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield file.read(-1 if characters is None else characters)
    except UnicodeDecodeError as error:
        raise BadInput(f"{shown}: not UTF-8 text (byte {error.start}: {error.reason})") from error
    except OSError as error:
        raise BadInput(f"{shown}: cannot be read: {error.strerror}") from error


def _json_lines(path: Path, shown: str) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_of(line, f"{shown}, line {number}")
    except OSError as error:
        raise BadInput(f"{shown}: cannot be read: {error.strerror}") from error


def _text_of(line: bytes, where: str) -> str:
    try:
        entry = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadInput(f"{where}: not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f'{where}: not JSON ({first_line(error)}); expected {{"text": "…"}}') from error
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise BadInput(f'{where}: no "text" that is a string; expected {{"text": "…"}}')
    found: str = entry["text"]
    return found
