"""Pieces learned from texts: which pairs may be joined, and new tokens for characters written by byte fallback.

Pieces are learned by byte-pair encoding that continues from the old tokenizer; `tokenizers`' trainers start from
nothing. The words of a corpus are given as the old tokenizer segments them, and the most frequent pair of neighbours is
joined, again and again (Sennrich et al., 2016, Algorithm 1). Merges that come after all old ones act on the result of
the old ones, so a pair that never occurs in the segmentation of a text changes nothing in it, and neither does any
later piece made of that pair.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from surgeon.checkpoint.tokenizer_files import NewToken
from surgeon.common import formatting
from surgeon.common.listener import Listener
from surgeon.edits.vocabulary.growing import Maker, New, Old, Pair, bytes_of, with_characters
from surgeon.edits.vocabulary.texts import counted_words, named, segmented_words
from surgeon.errors import BadInput
from surgeon.models.tokenizer import Tokenizer

How = Literal["unseen", "appended"]

# The most characters of a piece, as the vocabulary writes it: about a word.
_LONGEST = 64
# A character that a SentencePiece-like BPE lacks gets a token if it occurs so often; at most half of all new tokens.
_LEAST_CHARACTER = 10


@dataclass(frozen=True)
class LearnedTokens:
    """A plan's `learn`: `count` pieces from the texts `learn`; `how` selects pairs, and `keep` is to stay as it is."""

    learn: tuple[Path, ...]
    count: int
    keep: tuple[Path, ...]
    how: How


def learned(old: Old, tokenizer: Tokenizer, wanted: LearnedTokens, listener: Listener) -> New:
    """Return the pieces to add, in the order they are learned. Raises BadInput where there is none."""
    counted = counted_words(tokenizer, wanted.learn, listener)
    new = New()
    words = segmented_words(tokenizer, counted)
    kept_words = counted_words(tokenizer, wanted.keep, listener) if wanted.how == "unseen" else Counter()
    if old.read.byte_tokens:
        _add_characters(old, new, counted, set("".join(kept_words)), wanted)
        words = {word: with_characters(old, new, ids) for word, ids in words.items()}
    allowed = _allowed(old, wanted.how, kept_words, segmented_words(tokenizer, kept_words))
    maker = Maker(old, new, allowed, _LONGEST)
    listener.say(f"learning at most {formatting.counted(wanted.count, 'token')} from {len(words):,} different words")
    listener.begin("learning", wanted.count, "tokens")

    def join(one: int, other: int) -> bool:
        """Join a pair where that is allowed, and report progress."""
        joined = maker.join(one, other)
        listener.advance(int(joined))
        return joined

    found = learn_merges(
        [(ids, counted[word]) for word, ids in words.items() if len(ids) > 1],
        wanted.count - len(new.tokens),
        first=old.rows + len(new.tokens),
        joined=join,
    )
    if not found and not new.tokens:
        raise BadInput(
            f"{named(wanted.learn)}: no pair in it occurs twice that may be joined, so there is nothing to add; give"
            " more text, or another `how`"
        )
    return new


def _allowed(
    old: Old, how: How, kept: Mapping[str, int], segmented: Mapping[str, Sequence[int]]
) -> Callable[[Pair, str], bool]:
    """Return the test `allowed(pair, content)`: whether a pair, which makes a piece of this content, may be joined.

    `kept` are the words of `keep`, `segmented` their ids.
    """
    if how == "appended":
        return lambda _pair, _content: True
    pairs = pairs_in(segmented.values())
    # Such a tokenizer takes a word that is a token whole, whatever its merges.
    whole = set(kept) if old.read.model.get("ignore_merges") else set()
    return lambda pair, content: pair not in pairs and content not in whole


def _add_characters(old: Old, new: New, counted: Mapping[str, int], kept: set[str], wanted: LearnedTokens) -> None:
    """Add the most frequent characters that a BPE with byte fallback lacks; with `unseen`, none that `keep` has."""
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
        and bytes_of(old, character)
    ]
    for _, character in sorted(missing, key=lambda entry: (-entry[0], entry[1]))[: wanted.count // 2]:
        new.add(NewToken(character, score=old.lowest), bytes_of(old, character))


# A pair that occurs less often is not joined.
_LEAST = 2


def pairs_in(segmented: Iterable[Sequence[int]]) -> set[Pair]:
    """Return the pairs of neighbours in segmented words."""
    return {pair for ids in segmented for pair in pairwise(ids)}


def learn_merges(
    words: Sequence[tuple[Sequence[int], int]],
    count: int,
    *,
    first: int,
    joined: Callable[[int, int], bool],
) -> list[Pair]:
    """Return at most `count` pairs, in the order in which they are joined; the n-th makes the id `first` + n.

    The most frequent pair comes first; of equally frequent ones, the pair of smaller ids. A pair that occurs once is
    not joined.

    Args:
        words: segmented words, and how often each occurs.
        count: pairs at most.
        first: the id that the first pair makes.
        joined: `joined(a, b)` accepts a pair for good, or returns False; called once for each pair, at its turn.
    """
    held = [list(ids) for ids, _ in words]
    often = [number for _, number in words]
    counts: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, ids in enumerate(held):
        for pair in pairwise(ids):
            counts[pair] += often[index]
            where[pair].add(index)
    heap = [(-number, pair) for pair, number in counts.items() if number >= _LEAST]
    heapq.heapify(heap)
    found: list[Pair] = []
    while heap and len(found) < count:
        number, pair = heapq.heappop(heap)
        now = counts.get(pair, 0)
        if now < _LEAST:
            continue
        if -number != now:
            heapq.heappush(heap, (-now, pair))
            continue
        if not joined(*pair):
            del counts[pair]
            continue
        new = first + len(found)
        changed: set[Pair] = set()
        for index in where.pop(pair):
            changed |= _join(held[index], pair, new, often[index], counts, where, index)
        counts.pop(pair, None)
        found.append(pair)
        for other in changed:
            if counts.get(other, 0) >= _LEAST:
                heapq.heappush(heap, (-counts[other], other))
    return found


def _join(
    ids: list[int],
    pair: Pair,
    new: int,
    often: int,
    counts: Counter[Pair],
    where: defaultdict[Pair, set[int]],
    index: int,
) -> set[Pair]:
    """Join a pair in one word, from left to right, and return the pairs that are new in the word.

    Updates `counts` and `where`.
    """
    before = Counter(pairwise(ids))
    made: list[int] = []
    at = 0
    while at < len(ids):
        if at + 1 < len(ids) and (ids[at], ids[at + 1]) == pair:
            made.append(new)
            at += 2
        else:
            made.append(ids[at])
            at += 1
    ids[:] = made
    after = Counter(pairwise(ids))
    grew = set()
    for other in before.keys() | after.keys():
        change = (after[other] - before[other]) * often
        if change and (other in counts or before[other] == 0):
            # A refused pair is no longer counted.
            counts[other] += change
        if after[other] and not before[other]:
            where[other].add(index)
            grew.add(other)
    return grew
