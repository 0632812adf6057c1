"""Learning more pieces for a vocabulary: byte-pair encoding that goes on from where an old tokenizer ended.

`tokenizers`' trainers begin from nothing. Here the words of a corpus are given as the old tokenizer segments them, and
the most frequent pair of neighbours is joined, again and again (Sennrich et al., 2016, Algorithm 1). Merges that come
behind all old ones act on what the old ones leave, so a pair that never occurs in the segmentation of a text changes
nothing of it: neither it nor any later piece that is made of it.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

Pair = tuple[int, int]
# A pair that occurs less often is left alone.
_LEAST = 2


def pairs_in(segmented: Iterable[Sequence[int]]) -> set[Pair]:
    """The pairs of neighbours in segmented words."""
    return {pair for ids in segmented for pair in pairwise(ids)}


def learn_merges(
    words: Sequence[tuple[Sequence[int], int]],
    count: int,
    *,
    first: int,
    joined: Callable[[int, int, int], bool],
) -> list[Pair]:
    """Return at most `count` pairs, in the order in which they are joined; the n-th makes the id `first` + n.

    The more frequent of two pairs is first, of equally frequent ones that of the smaller ids. A pair that occurs once
    is left alone.

    Args:
        words: segmented words, and how often each occurs.
        count: pairs at most.
        first: the id that the first pair makes.
        joined: `joined(a, b, new)` takes a pair for good, or returns False; called once for each pair, at its turn.
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
        new = first + len(found)
        if not joined(*pair, new):
            del counts[pair]
            continue
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
    """Join a pair in one word, from left to right; the pairs whose counts grew."""
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
            # A pair that was refused is not counted any more.
            counts[other] += change
        if after[other] and not before[other]:
            where[other].add(index)
            grew.add(other)
    return grew
