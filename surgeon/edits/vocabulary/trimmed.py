"""A tokenizer with fewer tokens: which tokens must stay together, and its files with ids without gaps.

The tokens that stay keep their order, so the new id of a token is its place among them. Everything follows from the
base's files and the kept ids, so `verify` can make the files again and compare them.

A text whose tokens all stay is cut as before. Of all possible merges, BPE applies the one that was learnt first; all
merges that lead to a token that stays are kept, and no merge is new. WordPiece takes the longest piece that it knows,
Unigram the best path: with fewer candidates, the chosen one stays the choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES
from surgeon.checkpoint.strict_json import parse_json_strict, shaped
from surgeon.checkpoint.tokenizer_files import TOKENIZER_FILE, TokenizerJson
from surgeon.errors import BadInput, printable

# Tokenizer files of other programs, which hold a vocabulary of their own.
OTHER_VOCABULARIES = re.compile(r"(\.model(\.v\w+)?|\.tiktoken|tekken\.json)$")
# Files that tokenizers of transformers without tokenizer.json are made of.
_SLOW = ("vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
# Files and keys that name special tokens: settings of the tokenizer, of generation, of image processing.
_SETTINGS = ("tokenizer_config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json")
_IDS = ("_token_id", "_token_ids", "_token_index", "_token_indices")
_LISTS = frozenset({"suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"})
# Keys whose values mix ids with positions or other numbers.
_MIXED = frozenset({"forced_decoder_ids", "sequence_bias"})
# A key whose entries are keyed by ids.
_ADDED = "added_tokens_decoder"
_MOST_ITEMS = 8_000_000


def renumbered(data: Any, change: Callable[[int], int]) -> Any:
    """Return JSON data with its ids changed: values of keys that end in `_token_id` and the like, at any depth."""
    if isinstance(data, list):
        return [renumbered(each, change) for each in data]
    if not isinstance(data, Mapping):
        return data
    return {key: _ids(value, change) if _names_ids(key) else renumbered(value, change) for key, value in data.items()}


def with_tokens(config: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Return a config.json with the new ids of the tokens `kept`; other numbers stay (-1, or beyond the vocabulary)."""
    new = {old: number for number, old in enumerate(kept)}
    made: dict[str, Any] = renumbered(config, lambda number: new.get(number, number))
    return made


def ids_in(data: Any, file: str) -> set[int]:
    """Return the ids in JSON data, as `renumbered` finds them.

    Raises BadInput for settings that mix them with numbers.
    """
    for name, value in _members(data):
        if name in _MIXED and value:
            raise BadInput(f"{printable(file)}: `{name}` mixes ids with other numbers; take it out before trimming")
        if name == "vocabulary_map" and value:
            raise BadInput(f"{printable(file)}: `{name}` maps tokens of pictures to words by their ids; not supported")
    return ids_named(data)


def ids_named(data: Any) -> set[int]:
    """Return the ids in JSON data, as `renumbered` finds them."""
    return _noted(renumbered, data)


def _noted(walk: Callable[[Any, Callable[[int], int]], Any], data: Any) -> set[int]:
    """Return the ids in JSON data that `walk` passes to the function that is to change them."""
    found: set[int] = set()

    def note(number: int) -> int:
        """Add an id to the found ones."""
        found.add(number)
        return number

    walk(data, note)
    return found


def _members(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for every entry, at any depth."""
    for name, value in data.items() if isinstance(data, Mapping) else ():
        yield name, value
        yield from _members(value)
    for each in data if isinstance(data, list) else ():
        yield from _members(each)


def _names_ids(key: object) -> bool:
    """Return whether the values of a key are token ids."""
    return isinstance(key, str) and (key.endswith(_IDS) or key in _LISTS)


def _ids(value: Any, change: Callable[[int], int]) -> Any:
    """Return an id, or a list of ids at any depth, with each id changed; other values stay."""
    if isinstance(value, list):
        return [_ids(each, change) for each in value]
    # True would also be an int in Python.
    return change(value) if type(value) is int else value


@dataclass(frozen=True)
class Closure:
    """The rule for which tokens must stay with a token, so that texts of kept tokens are cut as before."""

    read: TokenizerJson

    def check(self) -> None:
        """Raise BadInput for a tokenizer for which the rule is not known."""
        for key in ("continuing_subword_prefix", "end_of_word_suffix"):
            if self.read.kind == "BPE" and self.read.model.get(key):
                raise BadInput(
                    f"{TOKENIZER_FILE}: its BPE has a `{key}`, of which surgeon does not know what merges need; such a"
                    " vocabulary cannot be trimmed"
                )

    @cached_property
    def pairs(self) -> list[tuple[str, str]]:
        """Return every merge of a BPE, in the file's order. Raises BadInput where one is no pair."""
        try:
            return [
                (one, other)
                for one, other in (
                    each.split(" ") if isinstance(each, str) else each for each in self.read.model.get("merges") or ()
                )
            ]
        except (TypeError, ValueError):
            raise BadInput(f"{TOKENIZER_FILE}: a merge is no pair of pieces; get the model's own file") from None

    @cached_property
    def ranks(self) -> dict[tuple[str, str], int]:
        """Return the rank of each pair: its number in the file's order, from 0."""
        return {pair: rank for rank, pair in enumerate(self.pairs)}

    def parts(self, content: str) -> set[str]:
        """Return the pieces from which merges build a token, with the token and its characters.

        Only the token is returned where its merges lead to other tokens: then merges never make it from text.
        """
        pieces, seen = list(content), {content, *content}
        while len(pieces) > 1:
            ranked = [
                (rank, at)
                for at in range(len(pieces) - 1)
                if (rank := self.ranks.get((pieces[at], pieces[at + 1]))) is not None
            ]
            if not ranked:
                return {content}
            _, at = min(ranked)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
            seen.add(pieces[at])
        return seen

    def of(self, number: int) -> set[int]:
        """Return a token and, for a BPE, the tokens that it is merged from."""
        content = self.read.contents.get(number)
        if content is None or self.read.kind != "BPE":
            return {number}
        vocabulary = self.read.vocabulary
        return {number} | {vocabulary[part] for part in self.parts(content) if part in vocabulary}

    def always(self) -> set[int]:
        """Return tokens that every text may need: single bytes, the unknown token, and a Unigram's worst piece.

        A Unigram derives the cost of an unknown character from its worst piece's score.
        """
        read = self.read
        found = set(read.byte_tokens)
        if read.byte_level:
            found |= {read.vocabulary[each] for each in byte_characters().values() if each in read.vocabulary}
        unknown = read.model.get("unk_token")
        if isinstance(unknown, str) and unknown in read.vocabulary:
            found.add(read.vocabulary[unknown])
        if read.kind == "Unigram":
            if isinstance(number := read.model.get("unk_id"), int):
                found.add(number)
            found.add(read.vocabulary[min(read.scores, key=read.scores.__getitem__)])
        return found


def byte_characters() -> dict[int, str]:
    """Return the character by which a byte-level vocabulary writes each byte (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + nth) for nth, byte in enumerate(others)}


def ids_of_file(name: str, content: bytes) -> set[int]:
    """Return the ids that a side file names outside its vocabulary, which must stay; none for files without such ids.

    Raises BadInput for a file that cannot be read, or that mixes ids with other numbers.
    """
    if name == TOKENIZER_FILE:
        data = _parsed(name, content)
        named = ids_in({key: data[key] for key in ("padding", "truncation") if key in data}, name)
        return named | _noted(_beside_model, data)
    if name not in _SETTINGS:
        return set()
    data = _parsed(name, content)
    return ids_in(data, name) | _noted(_settings, data)


def trimmed_files(files: Mapping[str, bytes], kept: Sequence[int]) -> dict[str, bytes | None]:
    """Return the side files that change where only the tokens `kept` stay; None: the file is left out.

    `files` are the base's by name. Raises BadInput for a file that cannot be read.
    """
    new = {old: number for number, old in enumerate(kept)}

    def change(number: int) -> int:
        """Return the new id of a kept token; any other number as it is."""
        # A number that is no id of the base stays: -1, or a mark beyond the vocabulary.
        return new.get(number, number)

    made: dict[str, bytes | None] = {}
    for name, content in files.items():
        with shaped(name):
            if name == TOKENIZER_FILE:
                made[name] = _trimmed_json(content, new, change)
            elif name in _SLOW or OTHER_VOCABULARIES.search(name):
                made[name] = None
            elif name in _SETTINGS:
                made[name] = _with_ids(name, content, change)
    return {name: content for name, content in made.items() if content != files[name]}


def _with_ids(name: str, content: bytes, change: Callable[[int], int]) -> bytes:
    """Return a settings file with its ids changed; the same bytes where no id changes."""
    data = _parsed(name, content)
    made = _settings(data, change)
    return content if made == data else _json(made)


def _settings(data: Mapping[str, Any], change: Callable[[int], int]) -> dict[str, Any]:
    """Return the content of a settings file with its ids changed."""
    made: dict[str, Any] = renumbered(data, change)
    if isinstance(entries := data.get(_ADDED), Mapping):
        made[_ADDED] = {str(change(int(n))) if n.isdecimal() else n: entry for n, entry in entries.items()}
    return made


def _trimmed_json(content: bytes, new: Mapping[int, int], change: Callable[[int], int]) -> bytes:
    """Return tokenizer.json with only the kept tokens and merges, under their new ids."""
    data = _parsed(TOKENIZER_FILE, content)
    read = TokenizerJson.parse(content)
    model = dict(data["model"])
    if isinstance(model["vocab"], list):
        model["vocab"] = [piece for number, piece in enumerate(model["vocab"]) if number in new]
        if isinstance(model.get("unk_id"), int):
            model["unk_id"] = change(model["unk_id"])
    else:
        model["vocab"] = {token: new[number] for token, number in model["vocab"].items() if number in new}
    if read.kind == "BPE":
        there = {token for token, number in read.vocabulary.items() if number in new}
        pairs = zip(model["merges"], Closure(read).pairs, strict=True)
        model["merges"] = [each for each, (one, other) in pairs if {one, other, one + other} <= there]
    return _json(_beside_model(data, change) | {"model": model})


def _beside_model(data: Mapping[str, Any], change: Callable[[int], int]) -> dict[str, Any]:
    """Return the content of tokenizer.json with the ids changed that it names outside its model."""
    made = {**data, "post_processor": _processed(data.get("post_processor"), change)}
    if made.get("added_tokens"):
        made["added_tokens"] = [entry | {"id": change(entry["id"])} for entry in data["added_tokens"]]
    if isinstance(padding := data.get("padding"), dict) and type(padding.get("pad_id")) is int:
        made["padding"] = padding | {"pad_id": change(padding["pad_id"])}
    return made


def _processed(data: Any, change: Callable[[int], int]) -> Any:
    """Return the post-processor, which puts special tokens around a text, with its ids changed."""
    if not isinstance(data, dict):
        return data
    made = dict(data)
    for name in ("sep", "cls"):
        if isinstance(pair := data.get(name), list) and len(pair) == 2 and type(pair[1]) is int:
            made[name] = [pair[0], change(pair[1])]
    if isinstance(named := data.get("special_tokens"), dict):
        made["special_tokens"] = {
            token: entry | {"ids": [change(number) for number in entry["ids"]]} for token, entry in named.items()
        }
    if isinstance(inner := data.get("processors"), list):
        made["processors"] = [_processed(each, change) for each in inner]
    return made


def _parsed(name: str, content: bytes) -> dict[str, Any]:
    """Return a file's JSON object. Raises BadInput where it holds none."""
    data = parse_json_strict(content, file=name, max_bytes=MAX_SIDE_FILE_BYTES, max_items=_MOST_ITEMS)
    if not isinstance(data, dict):
        raise BadInput(f"{printable(name)}: no JSON object; get the model's own file")
    return data


def _json(data: Any) -> bytes:
    """Return JSON data as the bytes of a file."""
    return (json.dumps(data, ensure_ascii=False, indent=2) + "\n").encode()


def to_bits(kept: Iterable[int], rows: int) -> str:
    """Return ids as a hexadecimal number in which bit n is set where id n stays."""
    flags = bytearray((rows + 7) // 8)
    for number in kept:
        flags[number // 8] |= 1 << number % 8
    bits = int.from_bytes(flags, "little")
    return f"{bits:0{(rows + 3) // 4}x}"


def from_bits(bits: str) -> tuple[int, ...]:
    """Return the ids that `to_bits` wrote, in order."""
    flags = int(bits, 16).to_bytes((len(bits) + 1) // 2, "little")
    return tuple(8 * nth + bit for nth, byte in enumerate(flags) if byte for bit in range(8) if byte >> bit & 1)
