"""Requested tokens: words that must each become one token (with BPE, intermediate pieces too), and added tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from surgeon.checkpoint.tokenizer_files import NewToken
from surgeon.edits.vocabulary.growing import BETTER, Maker, New, Old, bytes_of, with_characters
from surgeon.errors import BadInput, printable
from surgeon.models.tokenizer import Tokenizer

# How many words of a list the tokenizer gets at once.
_WORDS_AT_ONCE = 4096
# How many words that are already tokens one message names.
_NAMED = 20
# The most characters of a requested word, as the vocabulary writes it; it may be longer than a learned piece.
_LONGEST = 1024


@dataclass(frozen=True)
class Listed:
    """The source of requested words: the plan's `key`, or a `file`, one on each of its `lines`."""

    file: str = ""
    lines: tuple[int, ...] = ()
    key: str = "`tokens`"

    def full(self, nth: int) -> str:
        """Return the full source of a word, for a message."""
        return f"{self.file}, line {self.lines[nth]}" if self.file else f"{self.key} {nth}"

    def short(self, nth: int) -> str:
        """Return the short source of a word, for a list in a message."""
        return f"line {self.lines[nth]}" if self.file else str(nth)


def marked_once(tokenizer: Tokenizer, wanted: Sequence[str]) -> list[str]:
    """Return the words without their leading space (or mark), if the tokenizer itself puts one before every text.

    With both, the tokenizer would make `▁▁word`, which occurs in a text only after two spaces.
    """
    (bare, spaced) = (found[0] if found else "" for found in tokenizer.cut(["a", " a"]))
    if not (bare.startswith("▁") and spaced == f"▁{bare}"):
        return list(wanted)
    return [text[1:] if text[:1] in (" ", "▁") and text[1:].strip() else text for text in wanted]


def requested_tokens(old: Old, tokenizer: Tokenizer, wanted: Sequence[str], listed: Listed) -> New:
    """Return the tokens that make whole words; with BPE, also the intermediate pieces.

    Raises BadInput for a word that is already a token, or cannot become one.
    """
    new = New()
    maker = Maker(old, new, lambda _pair, _content: True, _LONGEST)
    cut = list(_cut(tokenizer, wanted))
    check_new(old, cut, tokenizer, listed)
    for nth, (text, found, ids) in enumerate(cut):
        shown = f"{listed.full(nth)} ({printable(repr(text), 60)})"
        if not text.strip():
            raise BadInput(f"{shown}: empty; write a word, with the space before it where it has one")
        if len(found) != 1:
            raise BadInput(
                f"{shown}: the tokenizer cuts it into {', '.join(printable(repr(word), 30) for word in found[:4])}"
                " before it looks for tokens, so it cannot be one; give its parts, or list it in `special` or `added`"
            )
        word = found[0]
        if any(character.isspace() for character in word):
            raise BadInput(f"{shown}: has white space inside, which no new token may; give its parts")
        if len(word) > _LONGEST:
            raise BadInput(
                f"{shown}: {len(word)} characters as the vocabulary writes it, of {_LONGEST} that a token may"
                " have; give its parts"
            )
        # With BPE, it may be an intermediate piece of an earlier word, but made by other merges.
        if old.read.kind == "BPE" or word not in new.contents:
            _add_word(maker, word, ids, shown)
    return new


def check_new(
    old: Old,
    cut: Sequence[tuple[str, list[str], list[int]]],
    tokenizer: Tokenizer,
    listed: Listed,
) -> None:
    """Raise BadInput with every text of a list that is already a token, or that the list has twice.

    All are named, so that one edit can remove them. `cut` gives each text, the words it is cut into, and their tokens.
    """
    there: dict[int, int] = {}
    twice: dict[int, int] = {}
    words: dict[str, int] = {}
    for nth, ((text, found, _), whole) in enumerate(
        zip(cut, tokenizer.many([text for text, _, _ in cut]), strict=True)
    ):
        word = found[0] if len(found) == 1 else ""
        # A special token is one token in any case; an unknown text is one token too.
        if text.strip() and ((word and word in old.taken) or (len(whole) == 1 and whole[0] not in old.refused)):
            there[nth] = old.taken.get(word, *whole[:1])
        elif word and words.setdefault(word, nth) != nth:
            twice[nth] = words[word]

    def rest(numbers: Sequence[int]) -> str:
        """Return words for a message on the other entries that are wrong in the same way."""
        if len(numbers) == 1:
            return "; leave it out"
        others = ", ".join(
            f"{listed.short(nth)} ({printable(repr(cut[nth][0]), 30)})" for nth in numbers[1 : 1 + _NAMED]
        )
        more = f" and {len(numbers) - 1 - _NAMED} more" if len(numbers) > 1 + _NAMED else ""
        return f", and so are {others}{more}; leave these {len(numbers)} out"

    if there:
        nth, number = next(iter(there.items()))
        as_written = next(content for content, other in old.taken.items() if other == number)
        if old.read.byte_level and len(as_written) == 1 and not as_written.isascii():
            raise BadInput(
                f"{listed.full(nth)} ({printable(repr(cut[nth][0]), 60)}): the vocabulary writes a single byte so (id"
                f" {number}), which takes the name; list it in `tokens`"
            )
        raise BadInput(
            f"{listed.full(nth)} ({printable(repr(cut[nth][0]), 60)}): already a token"
            f" ({printable(repr(as_written), 60)}, id {number}){rest(list(there))}"
        )
    if twice:
        nth, first = next(iter(twice.items()))
        raise BadInput(
            f"{listed.full(nth)} ({printable(repr(cut[nth][0]), 60)}): given before, as the tokenizer makes the same"
            f" token of {listed.full(first)}{rest(list(twice))}"
        )


def _cut(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[tuple[str, list[str], list[int]]]:
    """Yield (text, words, ids) for each text: the words it is cut into, and the tokens of a text that is one word."""
    for begin in range(0, len(texts), _WORDS_AT_ONCE):
        part = texts[begin : begin + _WORDS_AT_ONCE]
        cut = tokenizer.cut(part)
        pieces = iter(tokenizer.pieces([found[0] for found in cut if len(found) == 1]))
        for text, found in zip(part, cut, strict=True):
            yield text, found, next(pieces) if len(found) == 1 else []


def _add_word(maker: Maker, word: str, ids: list[int], shown: str) -> None:
    """Add the token of one word, with the characters and, for BPE, the intermediate pieces that it needs.

    `ids` are the word's old pieces. Raises BadInput where the word cannot become one token.
    """
    old, new = maker.old, maker.new
    if old.read.byte_tokens:
        for character in dict.fromkeys(word):
            made_of = bytes_of(old, character)
            if character not in old.taken and character not in new.contents and made_of:
                new.add(NewToken(character, score=old.lowest), made_of)
        ids = with_characters(old, new, ids)
    if any(number in old.refused for number in ids):
        raise BadInput(f"{shown}: has a character that the tokenizer does not know; leave it out")
    if old.read.kind != "BPE":
        if word not in new.contents:
            made_of = tuple(old_id for number in ids for old_id in maker.made_of(number))
            new.add(NewToken(word, None, sum(map(maker.score, ids)) + BETTER), made_of)
        return
    while len(ids) > 1:
        pairs = [(maker.content(one), maker.content(other)) for one, other in pairwise(ids)]
        # The same order as the tokenizer's: an earlier new merge is applied before a later one.
        there = [at for at, pair in enumerate(pairs) if pair in new.merges]
        if there:
            at = min(there, key=lambda at: new.merges[pairs[at]])
        else:
            # A pair cannot make a token whose content another pair has made already.
            found = next((n for n in range(len(pairs)) if maker.join(ids[n], ids[n + 1])), None)
            if found is None:
                raise BadInput(
                    f"{shown}: none of its pieces {', '.join(repr(maker.content(number)) for number in ids[:8])} can be"
                    " joined to a token that is not there already; leave it out"
                )
            at = found
        ids[at : at + 2] = [old.rows + new.merges[pairs[at]]]


def check_words(wanted: Sequence[str], after: Tokenizer, rows: int, listed: Listed) -> None:
    """Raise BadInput where a requested word is not one token, with an id from `rows` on that no other word has.

    Args:
        wanted: the words.
        after: the grown tokenizer.
        rows: the model's rows of embeddings.
        listed: where the words are listed, for the message.
    """
    seen: set[int] = set()
    for nth, (text, ids) in enumerate(zip(wanted, after.many(wanted), strict=True)):
        if len(ids) != 1 or ids[0] < rows or ids[0] in seen:
            parts = ", ".join(printable(repr(after.decode([number])), 30) for number in ids[:4])
            raise BadInput(
                f"{listed.full(nth)} ({printable(repr(text), 60)}): the grown tokenizer makes {parts} of it, no token"
                " of its own: an added token of the base or other words of the list take it or a part of it; put it"
                " before them, or leave it out"
            )
        seen.add(ids[0])
