"""Tokens to compare checkpoints on: the user's text or a built-in one, encoded by the checkpoint's tokenizer."""

from __future__ import annotations

import functools
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from surgeon.checkpoint.text_lines import MAX_DOCUMENT_BYTES, parsed, text_lines, too_long
from surgeon.errors import BadInput, printable
from surgeon.models.tokenizer import Tokenizer, open_tokenizer

# Characters to read per token: enough in any script, without reading all of a large file.
_CHARACTERS_A_TOKEN = 32


@functools.cache
def probe_text() -> tuple[str, ...]:
    """Return the built-in documents: prose in several languages, code and mathematics."""
    return tuple((files("surgeon.models") / "probe.txt").read_text(encoding="utf-8").split("=====\n"))


@dataclass(frozen=True)
class TokenBatches:
    """Token ids, `ids` (windows, window), int64; `source` describes in words where they come from."""

    ids: Tensor
    source: str


def token_batches(
    folder: Path,
    *,
    text: Path | None,
    window: int = 128,
    windows: int | None = 8,
    vocabulary: int,
    kept: Sequence[int] | None = None,
) -> TokenBatches:
    """Cut `text`, tokenised by the tokenizer in `folder`, into at most `windows` windows of `window` tokens.

    Documents are joined with the end-of-sequence token where the tokenizer has one. A last window that is not full is
    dropped. Without a text and without a usable tokenizer the ids are random, and `source` says so.

    Args:
        folder: the checkpoint, with its tokenizer.
        text: UTF-8: .jsonl with a "text" per line, or plain text as one document; None: a built-in probe in several
            languages.
        window: tokens of a window.
        windows: 0 or None: all of the text.
        vocabulary: rows of the model's embedding.
        kept: ids become positions in this list of the tokenizer's ids; tokens that are not in it are skipped.

    Raises:
        BadInput: a text cannot be read, gives no full window, or has tokens beyond `vocabulary`.
    """
    if window < 2 or vocabulary < 1:
        raise ValueError(f"window must be at least 2 and vocabulary at least 1, not {window} and {vocabulary}")
    limit = window * windows if windows else None
    if text is not None:
        # Read before the tokenizer is loaded, so that a wrong path is reported at once.
        shown = printable(str(text))
        documents = documents_of(text, None if limit is None else limit * _CHARACTERS_A_TOKEN)
        tokenizer, why_not = open_tokenizer(folder)
        if tokenizer is None:
            raise BadInput(
                f"{printable(str(folder))}: {why_not}, so {shown} cannot be tokenised; add the tokenizer's files"
            )
        source = shown
    else:
        tokenizer, why_not = open_tokenizer(folder)
        if tokenizer is None:
            made = torch.Generator().manual_seed(0)
            ids = torch.randint(vocabulary if kept is None else len(kept), (windows or 8, window), generator=made)
            return TokenBatches(ids, f"random tokens, because {why_not}")
        documents, source = iter(probe_text()), "the built-in probe text (several languages and code)"
    stream = _token_stream(tokenizer, documents)
    if kept is not None:
        new = {number: place for place, number in enumerate(kept)}
        stream = (new[number] for number in stream if number in new)
        source += ", without the tokens that went" if len(kept) < vocabulary else ""
    tokens = torch.tensor(list(stream if limit is None else islice(stream, limit)), dtype=torch.long)
    full = len(tokens) // window
    if full == 0:
        raise BadInput(
            f"{source} gives {len(tokens)} tokens, fewer than one window of {window}; give more text, or a smaller"
            " window"
        )
    ids = tokens[: full * window].view(full, window)
    check_ids((int(ids.min()), int(ids.max())), tokenizer, rows=vocabulary)
    return TokenBatches(ids, source)


def check_ids(ids: Sequence[int], tokenizer: Tokenizer, *, rows: int) -> None:
    """Raise BadInput, naming the token, where an id is not a row of an embedding with `rows` rows."""
    outside = next((token for token in (min(ids, default=0), max(ids, default=0)) if not 0 <= token < rows), None)
    if outside is None:
        return
    try:
        called = repr(printable(tokenizer.decode([outside]), 40))
    except BadInput:
        called = "a token"
    raise BadInput(
        f"{printable(str(tokenizer.folder))}: its tokenizer gives {called} the id {outside}, the model's embedding has"
        f" only {rows} rows (ids 0 to {rows - 1}); use the model's own tokenizer, or add rows (`pad_to`,"
        f" `vocabulary: {outside + 1}`)"
    )


def _token_stream(tokenizer: Tokenizer, documents: Iterator[str]) -> Iterator[int]:
    """Yield the tokens of documents, with the end-of-sequence token (if there is one) between two documents."""
    between = False
    for document in documents:
        encoded = tokenizer.ids(document, special=False)
        if between and tokenizer.eos_token_id is not None:
            yield tokenizer.eos_token_id
        between = True
        yield from encoded


def documents_of(path: Path, characters: int | None = None) -> Iterator[str]:
    """Return an iterator over the documents of a text file: UTF-8, .jsonl with a "text" per line, or plain text.

    From plain text at most the first `characters` are read. Raises BadInput, also while it is read.
    """
    shown = printable(str(path))
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise BadInput(f"{shown}: cannot be read ({error.strerror}); check the path") from error
    if not stat.S_ISREG(mode):
        raise BadInput(f"{shown}: not a regular file; expected .jsonl or plain text; give a file")
    if path.suffix.lower() == ".json":
        raise BadInput(
            f"{shown}: brackets and quotes of a .json file would count as text; write a line"
            ' {"text": "…"} for each text, and name the file .jsonl'
        )
    return _json_lines(path, shown) if path.suffix.lower() == ".jsonl" else _plain(path, shown, characters)


def _plain(path: Path, shown: str, characters: int | None) -> Iterator[str]:
    """Yield a text file as one document, cut after `characters` (None: uncut). Raises BadInput."""
    try:
        with path.open(encoding="utf-8") as file:
            content = file.read(MAX_DOCUMENT_BYTES + 1 if characters is None else min(characters, MAX_DOCUMENT_BYTES))
        if len(content) > MAX_DOCUMENT_BYTES:
            raise too_long(str(path), "this text")
        yield content
    except UnicodeDecodeError as error:
        raise BadInput(f"{shown}: not UTF-8 text (byte {error.start}: {error.reason}); save it as UTF-8") from error
    except OSError as error:
        raise BadInput(f"{shown}: cannot be read ({error.strerror}); check the path") from error


def _json_lines(path: Path, shown: str) -> Iterator[str]:
    """Yield the text of each line of a .jsonl file that is not empty. Raises BadInput naming the line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(text_lines(file, str(path)), start=1):
                if line.strip():
                    yield _text_of(line, f"{shown}, line {number}")
    except OSError as error:
        raise BadInput(f"{shown}: cannot be read ({error.strerror}); check the path") from error


def _text_of(line: bytes, where: str) -> str:
    """Return the "text" of a line of JSON. Raises BadInput where it is missing, no string, or not valid Unicode."""
    entry = parsed(line, where, 'expected {"text": "…"}')
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise BadInput(f'{where}: no "text" that is a string; expected {{"text": "…"}}')
    try:
        entry["text"].encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(f"{where}: half of a UTF-16 pair, which no tokenizer takes; remove or replace it") from None
    found: str = entry["text"]
    return found
