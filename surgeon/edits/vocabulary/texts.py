"""Texts as a tokenizer cuts them: their words and tokens, and how a changed tokenizer cuts them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from surgeon.common.formatting import size
from surgeon.common.listener import Listener
from surgeon.errors import printable
from surgeon.models.tokenizer import Tokenizer
from surgeon.models.tokens import documents_of
from surgeon.operations.prepare import TextCounts

# How many characters a tokenizer gets at once; and how many of a text are used to measure a change.
_AT_ONCE = 1 << 20
_MEASURED = 1 << 21


def counted_words(tokenizer: Tokenizer, paths: Sequence[Path], listener: Listener) -> Counter[str]:
    """Return the words of texts, and how often each occurs."""
    counted: Counter[str] = Counter()
    total = sum(path.stat().st_size for path in paths)
    listener.say(f"counting the words of {named(paths)} ({size(total)})")
    listener.begin("counting words", total)
    for batch in _batches(_texts(paths)):
        counted.update(tokenizer.words(batch))
        listener.advance(sum(len(text.encode()) for text in batch))
    return counted


def counted_tokens(tokenizer: Tokenizer, paths: Sequence[Path]) -> Counter[int]:
    """Return the tokens of texts, and how often each occurs."""
    counted: Counter[int] = Counter()
    for batch in _batches(_texts(paths)):
        for ids in tokenizer.many(batch):
            counted.update(ids)
    return counted


def segmented_words(tokenizer: Tokenizer, words: Iterable[str]) -> dict[str, list[int]]:
    """Return the ids of each word's pieces."""
    found: dict[str, list[int]] = {}
    for batch in _batches(iter(words)):
        found |= zip(batch, tokenizer.pieces(batch), strict=True)
    return found


def _texts(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the documents of all files."""
    for path in paths:
        yield from documents_of(path)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield texts in lists of about `_AT_ONCE` characters; a longer text is cut at ends of lines."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        for part in [text] if len(text) <= _AT_ONCE else text.splitlines(keepends=True):
            batch.append(part)
            characters += len(part)
            if characters >= _AT_ONCE:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def measured_text(
    use: str, paths: Sequence[Path], before: Tokenizer, after: Tokenizer, kept: Sequence[int] | None = None
) -> TextCounts:
    """Measure how a changed tokenizer cuts the beginning of a text, `_MEASURED` characters of it.

    Args:
        use: what the text is for.
        paths: its files.
        before: the tokenizer of the base.
        after: the changed one.
        kept: the base's id of each of its tokens, where these have other ids.
    """
    left = _MEASURED
    documents = unchanged = words = old_tokens = new_tokens = 0
    for batch in _batches(_texts(paths)):
        part = list(_within(batch, left))
        for text, one, other in zip(part, before.many(part), after.many(part), strict=True):
            documents += 1
            unchanged += one == (other if kept is None else [kept[number] for number in other])
            words += len(text.split())
            old_tokens += len(one)
            new_tokens += len(other)
            left -= len(text)
        if left <= 0:
            break
    return TextCounts(
        use=use,
        text=named(paths),
        sha256=digest_of(paths),
        documents=documents,
        unchanged=unchanged,
        words=words,
        before=old_tokens,
        after=new_tokens,
    )


def digest_of(paths: Sequence[Path]) -> str:
    """Return the sha256 of the files' bytes, one after another."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _within(batch: Sequence[str], left: int) -> Iterator[str]:
    """Yield texts until they have `left` characters together."""
    for text in batch:
        if left <= 0:
            return
        yield text
        left -= len(text)


def named(paths: Sequence[Path]) -> str:
    """Return the files' names in one line."""
    return ", ".join(printable(path.name, 60) for path in paths)
