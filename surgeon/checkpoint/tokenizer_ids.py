"""A check that a tokenizer's files agree on each token's id: transformers uses tokenizer.json without a warning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.tokenizer_files import TOKENIZER_FILE, value_in
from surgeon.errors import BadInput, printable

_SETTINGS, _VOCABULARY, _ADDED = "tokenizer_config.json", "vocab.json", "added_tokens.json"


def disagreement(folder: CheckpointFolder) -> str:
    """Return a line on the first token to which two files give different ids; "" where they agree, or cannot be read.

    Tokens missing in tokenizer.json get the next free ids in transformers, so files that give these same ids agree.
    Only the compared parts of a large file are parsed.
    """
    if TOKENIZER_FILE not in folder.side_files or not folder.source.at_hand:
        return ""
    try:
        return _first(folder)
    except (BadInput, ValueError, TypeError, LookupError, AttributeError, StopIteration, RecursionError):
        # Loading the tokenizer reports what is wrong with its files.
        return ""


def _first(folder: CheckpointFolder) -> str:
    """Return the line of `disagreement`; errors of unreadable files are passed on."""
    text = folder.read_side_file(TOKENIZER_FILE).decode()
    known = {str(each["content"]): int(each["id"]) for each in value_in(text, "added_tokens") or ()}
    others = {file: given for file, given in _given(folder) if any(known.get(token) != given[token] for token in given)}
    if not others:
        return ""
    known = _entries(value_in(text, "model", "vocab")) | known
    free = max(known.values(), default=-1) + 1
    for file, given in others.items():
        new = sorted((number, token) for token, number in given.items() if token not in known)
        wrong = [token for token, number in given.items() if known.get(token, number) != number]
        wrong += [token for nth, (number, token) in enumerate(new) if number != free + nth]
        if wrong:
            token, more = wrong[0], f", and {len(wrong) - 1} more otherwise" if wrong[1:] else ""
            here = f"gives it {known[token]}" if token in known else "lacks it, so that it gets the next free id"
            return (
                f"{file} gives {printable(repr(token), 40)} the id {given[token]}{more}; {TOKENIZER_FILE}, by which"
                f" transformers goes, {here}: are they of two tokenizers?"
            )
    return ""


def _given(folder: CheckpointFolder) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield each file other than tokenizer.json with the ids that it gives (content to id)."""
    for file in (_VOCABULARY, _ADDED, _SETTINGS):
        if file in folder.side_files:
            content = json.loads(folder.read_side_file(file))
            if file == _SETTINGS:
                listed = content.get("added_tokens_decoder") or {}
                content = {str(each["content"]): int(number) for number, each in listed.items()}
            yield file, content


def _entries(vocabulary: Any) -> dict[str, int]:
    """Return a model's vocabulary as content to id; a Unigram's vocabulary is a list of pieces."""
    if isinstance(vocabulary, list):
        return {str(piece): number for number, (piece, _) in enumerate(vocabulary)}
    return dict(vocabulary)
