"""A tokenizer's files, and the same files with more tokens: bytes are only inserted, none is changed or removed.

Around the insertions the output is the base byte for byte, so removing the inserted bytes gives the base's files back.
Old ids stay. New ids come after the embedding's rows. Every lower id without an entry in the model's vocabulary
(special tokens above the vocabulary, padded rows) gets an entry, because `tokenizers` counts entries to find the next
free id. Entries without a merge are never produced from text, so they change nothing.

Added tokens, special or not, are matched in a text before it is split. They get the next free ids, as `tokenizers`
assigns them, and are added to every file that lists such tokens.

Format: https://huggingface.co/docs/tokenizers/api/models, as `tokenizers` reads and writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

from surgeon.checkpoint.source import MAX_SIDE_FILE_BYTES
from surgeon.checkpoint.strict_json import parse_json_strict, shaped
from surgeon.errors import BadInput, printable

TOKENIZER_FILE = "tokenizer.json"
_OWN = "get the model's own file"
# The most JSON items. A vocabulary of 250,000 tokens has 500,000 merges with three commas and brackets each.
_MOST_ITEMS = 8_000_000
# The files that list special tokens, and the keys that list special tokens without a named role.
_SETTINGS, _NAMED, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_DECODER_KEY = "added_tokens_decoder"
_LISTS = ("additional_special_tokens", "extra_special_tokens")
# The content of the entry for an id that has no token.
_UNUSED = "<|unused_{}|>"

Kind = Literal["BPE", "WordPiece", "Unigram"]
# Begin and length of each insertion, in bytes of the new file.
Places = tuple[tuple[int, int], ...]
# Insertions into a JSON file: pairs of a path of keys and the entries as text.
_Inserting = list[tuple[tuple[str, ...], list[str]]]


@dataclass(frozen=True)
class NewToken:
    """A token to add: its `content` as written in vocabularies, the BPE `merge` that produces it, its Unigram score.

    In a BPE, `merge` is None for a single character, which needs no merge.
    """

    content: str
    merge: tuple[str, str] | None = None
    score: float = 0.0


@dataclass(frozen=True)
class TokenizerJson:
    """A parsed tokenizer.json: the kind of its model and its vocabulary (contents to ids).

    `text` is the file's content, `model` its section of this name, and `scores` are a Unigram's scores by piece.
    `byte_level`: the vocabulary writes bytes as the characters of GPT-2's table. `ids` include the ids of added tokens.
    """

    text: str
    ids: set[Any]
    kind: Kind
    vocabulary: Mapping[str, int]
    model: Mapping[str, Any]
    scores: Mapping[str, float]
    byte_level: bool

    @classmethod
    def parse(cls, content: bytes) -> TokenizerJson:
        """Parse the content of a tokenizer.json.

        Raises BadInput for content that is no tokenizer.json, or of a kind that surgeon cannot change.
        """
        data = parse_json_strict(content, file=TOKENIZER_FILE, max_bytes=MAX_SIDE_FILE_BYTES, max_items=_MOST_ITEMS)
        model = data.get("model") if isinstance(data, dict) else None
        if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
            raise BadInput(f"{TOKENIZER_FILE}: no `model` with a `vocab`; get the base's own file")
        # Old files omit the type; the model's other keys reveal it.
        kind = model.get("type") or ("BPE" if "merges" in model else "Unigram" if "unk_id" in model else "WordPiece")
        if kind not in ("BPE", "WordPiece", "Unigram"):
            raise BadInput(
                f"{TOKENIZER_FILE}: its model is a {printable(str(kind), 40)}; surgeon changes BPE, WordPiece and"
                " Unigram"
            )
        if model.get("dropout"):
            raise BadInput(f"{TOKENIZER_FILE}: its BPE drops merges at random (`dropout`); take that out first")
        # Byte-level may be the pre-tokenizer or decoder itself, or one member of a sequence.
        byte_level = kind == "BPE" and '"ByteLevel"' in _json([data.get("pre_tokenizer"), data.get("decoder")])
        scores: dict[str, float] = {}
        if isinstance(model["vocab"], list):
            try:
                scores = {str(piece): float(score) for piece, score in model["vocab"]}
            except (TypeError, ValueError):
                raise BadInput(f"{TOKENIZER_FILE}: `model.vocab` is no list of pieces and scores; {_OWN}") from None
            vocabulary = {piece: number for number, (piece, _) in enumerate(model["vocab"])}
        else:
            vocabulary = model["vocab"]
        if any(type(number) is not int or number < 0 for number in vocabulary.values()):
            raise BadInput(f"{TOKENIZER_FILE}: `model.vocab` has an id that is no number; {_OWN}")
        added = [each.get("id") for each in data.get("added_tokens") or () if isinstance(each, dict)]
        return cls(
            content.decode(), {*vocabulary.values(), *added}, cast("Kind", kind), vocabulary, model, scores, byte_level
        )

    @property
    def shown(self) -> str:
        """The kind of the model, for people."""
        return "byte-level BPE" if self.byte_level else self.kind

    @cached_property
    def contents(self) -> dict[int, str]:
        """The contents of the model's own tokens, by id."""
        return {number: content for content, number in self.vocabulary.items()}

    @property
    def byte_tokens(self) -> dict[int, int]:
        """The byte of each single-byte token (`<0xC3>`), by token id; empty where the model has no byte fallback."""
        if not self.model.get("byte_fallback"):
            return {}
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        return {self.vocabulary[name]: byte for name, byte in names.items() if name in self.vocabulary}

    @property
    def prefix(self) -> str:
        """The prefix in the vocabulary of a piece that continues a word."""
        return str(self.model.get("continuing_subword_prefix") or "")


def grown_files(
    files: Mapping[str, bytes],
    taken: Mapping[str, int],
    rows: int,
    tokens: Sequence[NewToken],
    added: Mapping[str, bool],
) -> tuple[dict[str, bytes], dict[str, Places]]:
    """Return (files, places): by name, each tokenizer file that grows, and the places inserted into it.

    Args:
        files: the base's files by name.
        taken: the whole vocabulary (content to id), special tokens and `added` included.
        rows: the first id of `tokens`.
        tokens: the new tokens of the model's vocabulary.
        added: the new tokens that are matched before a text is split, each with whether it is special. Their ids end
            right before `rows`.
    """
    read = TokenizerJson.parse(files[TOKENIZER_FILE])
    names = {number: content for content, number in taken.items()}
    first = rows - len(added)
    entries: dict[str, int] = {}
    if tokens or read.ids != {*range(first)}:
        # Ids below the first new id without an entry in the model's vocabulary.
        used, last = set(read.vocabulary.values()), rows if tokens else first
        entries = {names.get(number) or _unused(number, taken): number for number in range(last) if number not in used}
        entries |= {token.content: rows + nth for nth, token in enumerate(tokens)}
    merges = [token.merge for token in tokens if token.merge is not None]
    inserting: _Inserting = [(("model", "vocab"), _pieces_text(read, entries, tokens))]
    if merges:
        old = read.model.get("merges") or []
        joined = bool(old) and isinstance(old[0], str)
        inserting.append((("model", "merges"), [_json(" ".join(m) if joined else list(m)) for m in merges]))
    grown: dict[str, tuple[bytes, Places]] = {}
    if added:
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        listed = {
            number: {"content": content, **plain, "normalized": not special, "special": special}
            for number, (content, special) in enumerate(added.items(), first)
        }
        inserting.append((("added_tokens",), [_json({"id": n, **each}) for n, each in listed.items()]))
        grown = _with_listed(files, listed)
    grown[TOKENIZER_FILE] = _into_values(read.text, inserting)
    if "vocab.json" in files and read.kind != "Unigram" and entries:
        with shaped("vocab.json"):
            grown["vocab.json"] = _into_values(files["vocab.json"].decode(), [((), _members_text(entries))])
    if "merges.txt" in files and merges:
        grown["merges.txt"] = _appended(files["merges.txt"], [" ".join(merge) for merge in merges])
    if "vocab.txt" in files and read.kind == "WordPiece" and entries:
        with shaped("vocab.txt"):
            lines = files["vocab.txt"].decode().splitlines()
        grown["vocab.txt"] = _appended(files["vocab.txt"], [c for c, number in entries.items() if number >= len(lines)])
    return {name: content for name, (content, _) in grown.items()}, {name: where for name, (_, where) in grown.items()}


def without(content: bytes, inserted: Iterable[Sequence[int]]) -> bytes:
    """Return a grown file without the insertions: the base's file, if the grown file was not edited since."""
    kept, at = [], 0
    for begin, length in inserted:
        kept.append(content[at:begin])
        at = begin + length
    return b"".join([*kept, content[at:]])


def _unused(number: int, taken: Mapping[str, int]) -> str:
    """Return a content for the unused id `number` that no token has yet."""
    name = _UNUSED.format(number)
    while name in taken:
        name = f"{name[:-2]}_|>"
    return name


def _with_listed(
    files: Mapping[str, bytes], listed: Mapping[int, Mapping[str, Any]]
) -> dict[str, tuple[bytes, Places]]:
    """Return the files other than tokenizer.json that list added tokens, with the new added tokens."""
    special = [_json(each["content"]) for each in listed.values() if each["special"]]
    into: dict[str, _Inserting] = {}
    for name in (_NAMED, _SETTINGS):
        if name in files:
            data = parse_json_strict(files[name], file=name, max_bytes=MAX_SIDE_FILE_BYTES)
            into[name] = [((key,), special) for key in _LISTS if isinstance(data.get(key), list)]
            if name == _SETTINGS and special and not any(into.values()):
                key = _LISTS[-1] if _LISTS[0] in data else _LISTS[0]
                into[name].append(((), [f'"{key}": [{", ".join(special)}]']))
            if _DECODER_KEY in data:
                into[name].append(((_DECODER_KEY,), [f'"{number}": {_json(each)}' for number, each in listed.items()]))
    if _ADDED in files:
        into[_ADDED] = [((), _members_text({each["content"]: number for number, each in listed.items()}))]
    return {name: _into_values(files[name].decode(), inserting) for name, inserting in into.items()}


def _pieces_text(read: TokenizerJson, entries: Mapping[str, int], tokens: Sequence[NewToken]) -> list[str]:
    """Return the JSON text of new vocabulary entries: members of an object, or (piece, score) pairs for a Unigram."""
    if read.kind != "Unigram":
        return _members_text(entries)
    # The lowest old score: a lower score would change the cost of an unknown character.
    lowest = min(read.scores.values(), default=0.0)
    scores = {token.content: token.score for token in tokens}
    return [_json([content, scores.get(content, lowest)]) for content in entries]


# One encoder is shared by all entries; json.dumps would make a new one for each.
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def _json(value: Any) -> str:
    return _ENCODER.encode(value)


def _members_text(entries: Mapping[str, int]) -> list[str]:
    """Return entries as the text of JSON object members."""
    return [f"{_json(content)}: {number}" for content, number in entries.items()]


def _into_values(text: str, inserting: _Inserting) -> tuple[bytes, Places]:
    """Insert entries at the end of objects and lists in a JSON text, at the given paths, spaced like older entries."""
    # Sorted by end: an object and another object inside it may both get entries.
    found = sorted(((_value_at(text, path), entries) for path, entries in inserting), key=lambda each: each[0][1])
    parts: list[bytes] = []
    places: list[tuple[int, int]] = []
    at = written = 0
    for (begin, end), entries in found:
        inside = text[begin + 1 : end - 1]
        # Insert after the last entry, before the white space in front of the closing bracket.
        place = begin + 1 + len(inside.rstrip())
        space = inside[: len(inside) - len(inside.lstrip())]
        added = f",{space}".join(entries)
        added = (f",{space}{added}" if inside.strip() else added) if entries else ""
        before, new = text[at:place].encode(), added.encode()
        parts += [before, new]
        if new:
            places.append((written + len(before), len(new)))
        written += len(before) + len(new)
        at = place
    return b"".join([*parts, text[at:].encode()]), tuple(places)


_DECODER = json.JSONDecoder()


def _value_at(text: str, path: tuple[str, ...]) -> tuple[int, int]:
    """Return (begin, end) of the value at a path of keys in a JSON text.

    Raises StopIteration where a key is missing.
    """
    begin = len(text) - len(text.lstrip())
    end = len(text.rstrip())
    for key in path:
        begin, end = next((first, last) for name, first, last in _members(text, begin) if name == key)
    return begin, end


def _members(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """Yield (key, begin, end) for each member of the object that begins at `at`; begin and end are the value's."""
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)
        _, end = _DECODER.raw_decode(text, begin)
        yield key, begin, end
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    """Return the position of the first character from `at` on that is no JSON white space."""
    while text[at] in " \t\r\n":
        at += 1
    return at


def _appended(content: bytes, lines: Sequence[str]) -> tuple[bytes, Places]:
    """Append lines to a text file; return the new content and the place of the insertion."""
    added = "".join(f"{line}\n" for line in lines).encode()
    if content and not content.endswith(b"\n"):
        added = b"\n" + added
    return content + added, ((len(content), len(added)),) if added else ()
