"""Growing a tokenizer: which tokens to add, the files that have them, and what that makes of texts.

Learned pieces of a BPE go in as merges behind all old ones. By default only pairs that never occur in the segmentation
of a text that is to stay as it is: then every word of it is cut as before. `added_tokens` are never used: they are
matched before words are cut, and decode as they are written, so that accents come out as their bytes' characters.

A WordPiece takes the longest piece that it knows: there a new piece is refused where it would match in a word that is
to stay. A Unigram weighs all pieces of a word at once and keeps no such promise: what changes is measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.tokenizer_files import (
    TOKENIZER_FILE,
    GrownVocabulary,
    MeasuredText,
    NewToken,
    TokenizerJson,
    grown_files,
)
from surgeon.errors import BadInput, printable
from surgeon.models.learner import Pair, learn_merges, pairs_in
from surgeon.models.tokenizer import Tokenizer, open_tokenizer
from surgeon.models.tokens import documents_of

How = Literal["unseen", "appended", "non_ascii"]

# Characters that are asked of a tokenizer at once, and of a text on which is measured what a growth makes of it.
_AT_ONCE = 1 << 20
_MEASURED = 1 << 21
# Words of a list that are asked of a tokenizer at once.
_WORDS_AT_ONCE = 4096
# Words of a list that are tokens already and are named in one line.
_NAMED = 20
# A learned piece of a vocabulary is a word at most; one that is asked for may be longer, as vocabularies write it.
_LONGEST = 64
_LONGEST_ASKED = 1024
# What a new piece of a Unigram is better by than the pieces that it is made of.
_BETTER = 1e-4
# Characters that a SentencePiece-like BPE lacks get a token where they occur this often; at most half of all.
_LEAST_CHARACTER = 10


@dataclass(frozen=True)
class LearnedTokens:
    """What is asked for: `count` pieces learned from `learn`, of which `how` says which may go in; `keep` stays."""

    learn: tuple[Path, ...]
    count: int
    keep: tuple[Path, ...]
    how: How


@dataclass(frozen=True)
class Listed:
    """Where words that are asked for stand: in the plan, or in a `file`, one on each of its `lines`."""

    file: str = ""
    lines: tuple[int, ...] = ()

    def full(self, nth: int) -> str:
        """Where a word stands."""
        return f"{self.file}, line {self.lines[nth]}" if self.file else f"`tokens` {nth}"

    def short(self, nth: int) -> str:
        """Where a word stands, behind one of which all is said."""
        return f"line {self.lines[nth]}" if self.file else str(nth)


@dataclass(frozen=True)
class Grown:
    """A growth: the facts, the new files by name, and the contents of the new tokens in the order of their ids."""

    facts: GrownVocabulary
    files: Mapping[str, bytes]
    tokens: tuple[str, ...]


def grow(
    base: CheckpointFolder,
    wanted: Sequence[str] | LearnedTokens,
    *,
    rows: int,
    measure: Sequence[Path] = (),
    listed: Listed = Listed(),
) -> Grown:
    """The growth of the tokenizer in `base`, whose model has `rows` rows of embeddings, by the tokens `wanted`.

    `measure` are texts on which is measured what changes, beside those of `wanted`. `listed` says where words stand.
    Raises BadInput for a base without a tokenizer.json, with more tokens than rows, of a kind that cannot grow, and for
    tokens that cannot be added.
    """
    if TOKENIZER_FILE not in base.side_files:
        raise BadInput(
            f"{base.source.shown}: no {TOKENIZER_FILE}, and a vocabulary grows in it; save the tokenizer with"
            " transformers once (`AutoTokenizer.from_pretrained(BASE).save_pretrained(BASE)`)"
        )
    files = {name: base.read_side_file(name) for name in base.side_files}
    old = _Old(TokenizerJson.parse(files[TOKENIZER_FILE]), base.source.shown, rows)
    with _opened(files, base) as tokenizer:
        old.ask(tokenizer)
        if isinstance(wanted, LearnedTokens):
            new = _learned(old, tokenizer, wanted)
            texts = [("learned from", wanted.learn), ("kept", wanted.keep), ("measured", tuple(measure))]
            how = {
                "unseen": f"pairs that never occur in {_named(wanted.keep)}",
                "appended": "every pair, behind the old merges",
                "non_ascii": "pairs with a byte beyond ASCII",
            }[wanted.how]
        else:
            wanted = _marked_once(tokenizer, wanted)
            new = _asked(old, tokenizer, wanted, listed)
            texts, how = [("measured", tuple(measure))], "the words asked for"
        grown, inserted = grown_files(files, old.taken, rows, new.tokens)
        with _opened(files | grown, base) as after:
            _check_ids(old, new.tokens, after)
            if not isinstance(wanted, LearnedTokens):
                _check_words(wanted, after, rows, listed)
            measured = tuple(_measured(use, paths, tokenizer, after) for use, paths in texts if paths)
    facts = GrownVocabulary(
        kind="byte-level BPE" if old.read.byte_level else old.read.kind,
        how=how,
        rows=rows,
        made_of=tuple(new.made_of),
        inserted=inserted,
        measured=measured,
    )
    return Grown(facts, grown, tuple(token.content for token in new.tokens))


@dataclass
class _Old:
    """A tokenizer as it was: its file, and its whole vocabulary."""

    read: TokenizerJson
    shown: str
    rows: int
    taken: dict[str, int] = field(default_factory=dict)

    def ask(self, tokenizer: Tokenizer) -> None:
        """Take the whole vocabulary from the tokenizer that transformers makes of the files. Raises BadInput."""
        self.taken = tokenizer.vocabulary() | dict(self.read.vocabulary)
        content, highest = max(self.taken.items(), key=lambda entry: entry[1])
        if highest >= self.rows:
            raise BadInput(
                f"{self.shown}: its tokenizer gives {printable(repr(content), 40)} the id {highest}, the embedding has"
                f" only {self.rows} rows (ids 0 to {self.rows - 1}); use the model's own tokenizer, or add a row first"
            )

    @cached_property
    def contents(self) -> dict[int, str]:
        """The contents of the model's own tokens, by id."""
        return {number: content for content, number in self.read.vocabulary.items()}

    @cached_property
    def lowest(self) -> float:
        """Of a Unigram the lowest score: what a character costs at most that has a token of its own."""
        return min(self.read.scores.values(), default=0.0)

    @cached_property
    def refused(self) -> set[int]:
        """Tokens that no piece is made of: single bytes of a fallback, which decode by themselves, and unknown ones."""
        unknown = self.read.model.get("unk_token")
        number = self.read.model.get("unk_id") if self.read.kind == "Unigram" else self.taken.get(str(unknown))
        return {*self.read.byte_tokens, *([number] if isinstance(number, int) else [])}


@dataclass
class _New:
    """The tokens to add, in the order of their ids, and the old ids that each is made of."""

    tokens: list[NewToken] = field(default_factory=list)
    made_of: list[tuple[int, ...]] = field(default_factory=list)
    contents: set[str] = field(default_factory=set)
    # The number of the token that a merge makes, counted from 0.
    merges: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, token: NewToken, made_of: tuple[int, ...]) -> None:
        """One more."""
        if token.merge is not None:
            self.merges[token.merge] = len(self.tokens)
        self.tokens.append(token)
        self.made_of.append(made_of)
        self.contents.add(token.content)


@dataclass(frozen=True)
class _Maker:
    """Makes tokens of pairs, where that is allowed."""

    old: _Old
    new: _New
    allowed: Callable[[Pair, str], bool]
    longest: int = _LONGEST

    def content(self, number: int) -> str:
        """The content of an old or a new token."""
        return self.old.contents[number] if number < self.old.rows else self.new.tokens[number - self.old.rows].content

    def made_of(self, number: int) -> tuple[int, ...]:
        """The old ids that a token is made of: of an old one itself."""
        return (number,) if number < self.old.rows else self.new.made_of[number - self.old.rows]

    def join(self, one: int, other: int, _new: int) -> bool:
        """Add the token that a pair makes; False where it is not allowed."""
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
        self.new.add(NewToken(content, merge, self.score(one) + self.score(other) + _BETTER), made_of)
        return True

    def score(self, number: int) -> float:
        """The score of an old or a new token of a Unigram; 0 elsewhere."""
        if number < self.old.rows:
            return self.old.read.scores.get(self.old.contents[number], 0.0)
        return self.new.tokens[number - self.old.rows].score


def _learned(old: _Old, tokenizer: Tokenizer, wanted: LearnedTokens) -> _New:
    counted = _counted(tokenizer, wanted.learn)
    new = _New()
    words = _segmented(tokenizer, counted)
    kept_words = _counted(tokenizer, wanted.keep) if wanted.how == "unseen" else Counter()
    if old.read.byte_tokens:
        _add_characters(old, new, counted, set("".join(kept_words)), wanted)
        words = {word: _with_characters(old, new, ids) for word, ids in words.items()}
    allowed = _allowed(old, wanted.how, kept_words, _segmented(tokenizer, kept_words))
    maker = _Maker(old, new, allowed)
    found = learn_merges(
        [(ids, counted[word]) for word, ids in words.items() if len(ids) > 1],
        wanted.count - len(new.tokens),
        first=old.rows + len(new.tokens),
        joined=maker.join,
    )
    if not found and not new.tokens:
        raise BadInput(
            f"{_named(wanted.learn)}: no pair in it occurs twice that may be joined, so there is nothing to add; give"
            " more text, or another `how`"
        )
    return new


def _allowed(
    old: _Old, how: How, kept: Mapping[str, int], segmented: Mapping[str, Sequence[int]]
) -> Callable[[Pair, str], bool]:
    """Whether a pair, which makes a content, may go in."""
    if how == "appended":
        return lambda _pair, _content: True
    if how == "non_ascii":
        return lambda _pair, content: _beyond_ascii(content, byte_level=old.read.byte_level)
    if old.read.kind == "WordPiece":
        blocked = _matched(old, segmented)
        return lambda _pair, content: content not in blocked
    pairs = pairs_in(segmented.values())
    # Where a word that is a token is taken whole, whatever merges would make of it.
    whole = set(kept) if old.read.model.get("ignore_merges") else set()
    return lambda pair, content: pair not in pairs and content not in whole


def _beyond_ascii(content: str, *, byte_level: bool) -> bool:
    """Whether the bytes that a piece stands for are not all ASCII."""
    if byte_level:
        return any(character in _HIGH_BYTES for character in content)
    return any(ord(character) > 127 and character != "▁" for character in content)


def _high_bytes() -> frozenset[str]:
    """The characters by which GPT-2's table writes bytes from 128 on (openai/gpt-2, encoder.py)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown} | {byte: chr(256 + nth) for nth, byte in enumerate(others)}
    return frozenset(table[byte] for byte in range(128, 256))


_HIGH_BYTES = _high_bytes()


def _matched(old: _Old, segmented: Mapping[str, Sequence[int]]) -> set[str]:
    """Of a WordPiece, the pieces that would be taken in one of these words in the place of a shorter one."""
    found: set[str] = set()
    for word, ids in segmented.items():
        at = 0
        for number in ids:
            content = old.contents.get(number, "")
            length = len(content.removeprefix(old.read.prefix)) if at else len(content)
            prefix = old.read.prefix if at else ""
            found.update(f"{prefix}{word[at:end]}" for end in range(at + length + 1, len(word) + 1))
            at += length
    return found


def _add_characters(old: _Old, new: _New, counted: Mapping[str, int], kept: set[str], wanted: LearnedTokens) -> None:
    """The most frequent characters that a BPE with a byte fallback lacks; with `unseen` none that `keep` has."""
    often: Counter[str] = Counter()
    for word, number in counted.items():
        for character in word:
            often[character] += number
    missing = [
        (number, character)
        for character, number in often.items()
        if character not in old.taken
        and number >= _LEAST_CHARACTER
        and not character.isspace()
        and not (wanted.how == "unseen" and character in kept)
        and (wanted.how != "non_ascii" or ord(character) > 127)
        and _bytes_of(old, character)
    ]
    for _, character in sorted(missing, key=lambda entry: (-entry[0], entry[1]))[: wanted.count // 2]:
        new.add(NewToken(character, score=old.lowest), _bytes_of(old, character))


def _with_characters(old: _Old, new: _New, ids: Sequence[int]) -> list[int]:
    """A segmented word in which the bytes of new characters are those characters."""
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
    """Bytes of a character of UTF-8, by its first byte; 1 where it is none."""
    return 1 if first is None or first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def _marked_once(tokenizer: Tokenizer, wanted: Sequence[str]) -> list[str]:
    """The words, less the space (or mark) before them where the tokenizer puts one before every text by itself.

    With both, `▁▁word` would be made, which stands in no text but where there are two spaces.
    """
    (bare, spaced) = (found[0] if found else "" for found in tokenizer.cut(["a", " a"]))
    if not (bare.startswith("▁") and spaced == f"▁{bare}"):
        return list(wanted)
    return [text[1:] if text[:1] in (" ", "▁") and text[1:].strip() else text for text in wanted]


def _asked(old: _Old, tokenizer: Tokenizer, wanted: Sequence[str], listed: Listed) -> _New:
    """The tokens that make whole words: with BPE also those on the way to them."""
    new = _New()
    maker = _Maker(old, new, lambda _pair, _content: True, _LONGEST_ASKED)
    cut = list(_cut(tokenizer, wanted))
    _check_new(old, cut, tokenizer, listed)
    for nth, (text, found, ids) in enumerate(cut):
        shown = f"{listed.full(nth)} ({printable(repr(text), 60)})"
        if not text.strip():
            raise BadInput(f"{shown}: empty; write a word, with the space before it where it has one")
        if len(found) != 1:
            raise BadInput(
                f"{shown}: the tokenizer cuts it into {', '.join(printable(repr(word), 30) for word in found[:4])}"
                " before it looks for tokens, so it cannot be one; give its parts"
            )
        word = found[0]
        if any(character.isspace() for character in word):
            raise BadInput(f"{shown}: has white space inside, which no new token may; give its parts")
        if len(word) > _LONGEST_ASKED:
            raise BadInput(
                f"{shown}: {len(word)} characters as the vocabulary writes it, of {_LONGEST_ASKED} that a token may"
                " have; give its parts"
            )
        # With BPE it may be on the way to an earlier one, but not by the merges that make it of its own pieces.
        if old.read.kind == "BPE" or word not in new.contents:
            _add_word(maker, word, ids, shown)
    return new


def _check_new(
    old: _Old,
    cut: Sequence[tuple[str, list[str], list[int]]],
    tokenizer: Tokenizer,
    listed: Listed,
) -> None:
    """BadInput that names every text of a list that is a token already, or that the list has twice.

    So that one edit leaves all of them out.
    """
    there: list[int] = []
    twice: dict[int, int] = {}
    words: dict[str, int] = {}
    for nth, ((text, found, _), whole) in enumerate(
        zip(cut, tokenizer.many([text for text, _, _ in cut]), strict=True)
    ):
        word = found[0] if len(found) == 1 else ""
        # A special token is one whatever it would be cut into; what is not known is one token too.
        if text.strip() and ((word and word in old.taken) or (len(whole) == 1 and whole[0] not in old.refused)):
            there.append(nth)
        elif word and words.setdefault(word, nth) != nth:
            twice[nth] = words[word]

    def rest(numbers: Sequence[int]) -> str:
        if len(numbers) == 1:
            return "; leave it out"
        others = ", ".join(
            f"{listed.short(nth)} ({printable(repr(cut[nth][0]), 30)})" for nth in numbers[1 : 1 + _NAMED]
        )
        more = f" and {len(numbers) - 1 - _NAMED} more" if len(numbers) > 1 + _NAMED else ""
        return f", and so are {others}{more}; leave these {len(numbers)} out"

    if there:
        text, found, _ = cut[there[0]]
        as_written = f" ({printable(repr(found[0]), 60)})" if len(found) == 1 and found[0] != text else ""
        raise BadInput(
            f"{listed.full(there[0])} ({printable(repr(text), 60)}): already a token{as_written}{rest(there)}"
        )
    if twice:
        nth, first = next(iter(twice.items()))
        raise BadInput(
            f"{listed.full(nth)} ({printable(repr(cut[nth][0]), 60)}): given before, as the tokenizer makes the same"
            f" token of {listed.full(first)}{rest(list(twice))}"
        )


def _cut(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[tuple[str, list[str], list[int]]]:
    """Each text, what it is cut into, and the tokens of that where it is one word."""
    for begin in range(0, len(texts), _WORDS_AT_ONCE):
        part = texts[begin : begin + _WORDS_AT_ONCE]
        cut = tokenizer.cut(part)
        pieces = iter(tokenizer.pieces([found[0] for found in cut if len(found) == 1]))
        for text, found in zip(part, cut, strict=True):
            yield text, found, next(pieces) if len(found) == 1 else []


def _add_word(maker: _Maker, word: str, ids: list[int], shown: str) -> None:
    old, new = maker.old, maker.new
    if old.read.byte_tokens:
        for character in dict.fromkeys(word):
            made_of = _bytes_of(old, character)
            if character not in old.taken and character not in new.contents and made_of:
                new.add(NewToken(character, score=old.lowest), made_of)
        ids = _with_characters(old, new, ids)
    if old.read.kind == "WordPiece" and any(number in old.refused for number in ids):
        # A word with an unknown character is unknown as a whole, so nothing is known of its pieces.
        new.add(NewToken(word), ())
        return
    if any(number in old.refused for number in ids):
        raise BadInput(f"{shown}: has a character that the tokenizer does not know; leave it out")
    if old.read.kind != "BPE":
        if word not in new.contents:
            made_of = tuple(old_id for number in ids for old_id in maker.made_of(number))
            new.add(NewToken(word, None, sum(map(maker.score, ids)) + _BETTER), made_of)
        return
    while len(ids) > 1:
        pairs = [(maker.content(one), maker.content(other)) for one, other in pairwise(ids)]
        # As the tokenizer will: an earlier new merge is applied before a later one.
        there = [at for at, pair in enumerate(pairs) if pair in new.merges]
        if there:
            at = min(there, key=lambda at: new.merges[pairs[at]])
        else:
            number = old.rows + len(new.tokens)
            # A pair whose content is a token of other pieces already cannot make another token of that content.
            found = next((n for n in range(len(pairs)) if maker.join(ids[n], ids[n + 1], number)), None)
            if found is None:
                raise BadInput(
                    f"{shown}: none of its pieces {', '.join(repr(maker.content(number)) for number in ids[:8])} can be"
                    " joined to a token that is not there already; leave it out"
                )
            at = found
        ids[at : at + 2] = [old.rows + new.merges[pairs[at]]]


def _bytes_of(old: _Old, character: str) -> tuple[int, ...]:
    """The tokens of a character's bytes; none where one has no token."""
    tokens = {byte: number for number, byte in old.read.byte_tokens.items()}
    encoded = character.encode()
    return tuple(tokens[byte] for byte in encoded) if all(byte in tokens for byte in encoded) else ()


def _counted(tokenizer: Tokenizer, paths: Sequence[Path]) -> Counter[str]:
    """The words of texts, and how often each occurs."""
    counted: Counter[str] = Counter()
    for batch in _batches(_texts(paths)):
        counted.update(tokenizer.words(batch))
    return counted


def _segmented(tokenizer: Tokenizer, words: Iterable[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for batch in _batches(iter(words)):
        found |= zip(batch, tokenizer.pieces(batch), strict=True)
    return found


def _texts(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        yield from documents_of(path)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Texts in lists of about `_AT_ONCE` characters; a longer one is cut at ends of lines."""
    batch: list[str] = []
    size = 0
    for text in texts:
        for part in [text] if len(text) <= _AT_ONCE else text.splitlines(keepends=True):
            batch.append(part)
            size += len(part)
            if size >= _AT_ONCE:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _measured(use: str, paths: Sequence[Path], before: Tokenizer, after: Tokenizer) -> MeasuredText:
    """What the growth makes of the beginning of a text, `_MEASURED` characters of it."""
    left = _MEASURED
    documents = unchanged = words = old_tokens = new_tokens = 0
    for batch in _batches(_texts(paths)):
        part = list(_within(batch, left))
        for text, one, other in zip(part, before.many(part), after.many(part), strict=True):
            documents += 1
            unchanged += one == other
            words += len(text.split())
            old_tokens += len(one)
            new_tokens += len(other)
            left -= len(text)
        if left <= 0:
            break
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return MeasuredText(use, _named(paths), digest.hexdigest(), documents, unchanged, words, old_tokens, new_tokens)


def _within(batch: Sequence[str], left: int) -> Iterator[str]:
    for text in batch:
        if left <= 0:
            return
        yield text
        left -= len(text)


def _named(paths: Sequence[Path]) -> str:
    return ", ".join(printable(path.name, 60) for path in paths)


def _check_ids(old: _Old, tokens: Sequence[NewToken], after: Tokenizer) -> None:
    """BadInput where transformers gives an old or a new token another id than it should have."""
    found = after.vocabulary()
    wanted = old.taken | {token.content: old.rows + nth for nth, token in enumerate(tokens)}
    for content, number in wanted.items():
        if found.get(content) != number:
            raise BadInput(
                f"{old.shown}: with more tokens, {printable(repr(content), 40)} would have the id"
                f" {found.get(content)} in place of {number}: transformers makes this tokenizer otherwise than"
                f" {TOKENIZER_FILE} says; save it with this version of transformers once, and operate on that"
            )


def _check_words(wanted: Sequence[str], after: Tokenizer, rows: int, listed: Listed) -> None:
    """BadInput where a word that was asked for is not one token, of an id from `rows` on."""
    for nth, (text, ids) in enumerate(zip(wanted, after.many(wanted), strict=True)):
        if len(ids) == 1 and ids[0] < rows:
            raise BadInput(
                f"{listed.full(nth)} ({printable(repr(text), 60)}): the tokenizer makes"
                f" {printable(repr(after.decode(ids)), 30)} of it all the same, as of words that are too long; leave it"
                " out"
            )
        if len(ids) != 1:
            parts = ", ".join(printable(repr(after.decode([number])), 30) for number in ids[:4])
            parts += ", …" if len(ids) > 4 else ""
            raise BadInput(
                f"{listed.full(nth)} ({printable(repr(text), 60)}): still {len(ids)} tokens ({parts}): an"
                " added token of the base or other words of the list take a part of it; put it before them, or leave"
                " it out"
            )


@contextlib.contextmanager
def _opened(files: Mapping[str, bytes], base: CheckpointFolder) -> Iterator[Tokenizer]:
    """The tokenizer that transformers makes of side files. Raises BadInput where it makes none, or a slow one."""
    with tempfile.TemporaryDirectory(prefix="surgeon-tokenizer-") as room:
        folder = Path(room) / "tokenizer"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        hint = base.source.small("config.json", max_bytes=1 << 24)
        (folder / "config.json").write_bytes(hint)
        tokenizer, why_not = open_tokenizer(folder)
        if tokenizer is None or not tokenizer.is_fast:
            why = (why_not or f"it is not made of {TOKENIZER_FILE}").replace(str(folder), base.source.shown)
            raise BadInput(f"{base.source.shown}: its vocabulary cannot grow: {why}")
        yield tokenizer
