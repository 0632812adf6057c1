"""The old tokenizer, and the tokens to add to it, each made of old tokens pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from surgeon.checkpoint.tokenizer_files import TOKENIZER_FILE, NewToken, TokenizerJson
from surgeon.errors import BadInput, printable
from surgeon.models.tokenizer import Tokenizer

Pair = tuple[int, int]
# How much better a new piece of a Unigram scores than the pieces it is made of.
BETTER = 1e-4


@dataclass
class Old:
    """The old tokenizer: its file, and its whole vocabulary."""

    read: TokenizerJson
    shown: str
    rows: int
    taken: dict[str, int] = field(default_factory=dict)

    def ask(self, tokenizer: Tokenizer) -> None:
        """Set `taken` from transformers' tokenizer. Raises BadInput where an id is not below the model's rows."""
        self.taken = tokenizer.vocabulary() | dict(self.read.vocabulary)
        content, highest = max(self.taken.items(), key=lambda entry: entry[1])
        if highest >= self.rows:
            raise BadInput(
                f"{self.shown}: its tokenizer gives {printable(repr(content), 40)} the id {highest}, the embedding has"
                f" only {self.rows} rows (ids 0 to {self.rows - 1}); use the model's own tokenizer, or add rows first"
                f" (`pad_to`, `vocabulary: {highest + 1}`)"
            )

    @cached_property
    def lowest(self) -> float:
        """Return the lowest score of a Unigram, which is the score of new tokens for single characters."""
        return min(self.read.scores.values(), default=0.0)

    @cached_property
    def refused(self) -> set[int]:
        """Return tokens that no piece may contain: fallback bytes, which decode by themselves, and unknown tokens."""
        unknown = self.read.model.get("unk_token")
        number = self.read.model.get("unk_id") if self.read.kind == "Unigram" else self.taken.get(str(unknown))
        return {*self.read.byte_tokens, *([number] if isinstance(number, int) else [])}


def check_ids(old: Old, wanted: Mapping[str, int], found: Mapping[str, int]) -> None:
    """Raise BadInput where transformers gives a token another id than `wanted`, or has a token that is not wanted."""
    for content in {**wanted, **found}:
        if found.get(content) != wanted.get(content):
            raise BadInput(
                f"{old.shown}: with other tokens, {printable(repr(content), 40)} would have the id {found.get(content)}"
                f" in place of {wanted.get(content)}: transformers makes this tokenizer otherwise than {TOKENIZER_FILE}"
                " says; save it with this version of transformers once, and operate on that"
            )


@dataclass
class New:
    """The tokens to add, in the order of their ids, and the old ids that each is made of."""

    tokens: list[NewToken] = field(default_factory=list)
    made_of: list[tuple[int, ...]] = field(default_factory=list)
    contents: set[str] = field(default_factory=set)
    # By merge, the number of the new token that it makes, counted from 0.
    merges: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, token: NewToken, made_of: tuple[int, ...]) -> None:
        """Add one token, made of the old ids `made_of`."""
        if token.merge is not None:
            self.merges[token.merge] = len(self.tokens)
        self.tokens.append(token)
        self.made_of.append(made_of)
        self.contents.add(token.content)


@dataclass(frozen=True)
class Maker:
    """A maker of new tokens from pairs that `allowed` accepts."""

    old: Old
    new: New
    allowed: Callable[[Pair, str], bool]
    longest: int

    def content(self, number: int) -> str:
        """Return the content of an old or a new token."""
        return (
            self.old.read.contents[number]
            if number < self.old.rows
            else self.new.tokens[number - self.old.rows].content
        )

    def made_of(self, number: int) -> tuple[int, ...]:
        """Return the old ids that a token is made of; for an old token, its own id."""
        return (number,) if number < self.old.rows else self.new.made_of[number - self.old.rows]

    def join(self, one: int, other: int) -> bool:
        """Add the token that the pair (one, other) makes, and return True; return False where it is not allowed."""
        if one in self.old.refused or other in self.old.refused:
            return False
        read = self.old.read
        first, second = self.content(one), self.content(other)
        content = first + second.removeprefix(read.prefix)
        if (
            len(content) > self.longest
            or content in self.old.taken
            or content in self.new.contents
            or any(each.isspace() for each in content)
            or not self.allowed((one, other), content)
        ):
            return False
        made_of = (*self.made_of(one), *self.made_of(other))
        merge = (first, second) if read.kind == "BPE" else None
        self.new.add(NewToken(content, merge, self.score(one) + self.score(other) + BETTER), made_of)
        return True

    def score(self, number: int) -> float:
        """Return the score of an old or a new Unigram token; 0 for other kinds."""
        if number < self.old.rows:
            return self.old.read.scores.get(self.old.read.contents[number], 0.0)
        return self.new.tokens[number - self.old.rows].score


def with_characters(old: Old, new: New, ids: Sequence[int]) -> list[int]:
    """Return a segmented word with the bytes of each new character replaced by the new token."""
    made: list[int] = []
    known = {made_of: old.rows + nth for nth, made_of in enumerate(new.made_of)}
    byte_tokens = old.read.byte_tokens
    at = 0
    while at < len(ids):
        length = _length_of(byte_tokens.get(ids[at]))
        number = known.get(tuple(ids[at : at + length]))
        if number is None:
            made += ids[at : at + length]
        else:
            made.append(number)
        at += length
    return made


def _length_of(first: int | None) -> int:
    """Return how many bytes a UTF-8 character has, by its first byte; 1 where it is no first byte."""
    return 1 if first is None or first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def bytes_of(old: Old, character: str) -> tuple[int, ...]:
    """Return the tokens of a character's bytes; empty where a byte has no token."""
    tokens = {byte: number for number, byte in old.read.byte_tokens.items()}
    encoded = character.encode()
    return tuple(tokens[byte] for byte in encoded) if all(byte in tokens for byte in encoded) else ()
