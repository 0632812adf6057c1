"""Pieces: which bytes of which tensors a tensor holds, and where in it they lie.

A surgery is a map from the tensors of its output to pieces of the base's. Maps compose (`Pieces.through`) and are
turned round (`turned`), so where a base lies in an output of many surgeries is the composition of their maps.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from surgeon.checkpoint.header import TensorInfo


@dataclass(frozen=True, slots=True)
class Span:
    """`count` runs of `length` bytes of `tensor`.

    Run i is read from byte `offset + i · step` of `tensor`, and lies at byte `at + i · every` of what holds it.
    """

    tensor: str
    offset: int
    length: int
    at: int = 0
    count: int = 1
    step: int = 0
    every: int = 0

    def __post_init__(self) -> None:
        assert self.length >= 0 < self.count, self
        assert self.count == 1 or min(self.step, self.every) >= self.length, self

    @property
    def nbytes(self) -> int:
        """Bytes of all runs together."""
        return self.length * self.count

    @property
    def places(self) -> Iterator[tuple[int, int]]:
        """Return where its runs lie in what holds it, as (from, to)."""
        return ((at, at + self.length) for at in (self.at + run * self.every for run in range(self.count)))

    def runs(self, first: int, stop: int) -> Span:
        """The runs from `first` to before `stop`."""
        if (first, stop) == (0, self.count):
            return self
        count = stop - first
        offset, at = self.offset + first * self.step, self.at + first * self.every
        step, every = (self.step, self.every) if count > 1 else (0, 0)
        return replace(self, offset=offset, at=at, count=count, step=step, every=every)

    def merged(self) -> Span:
        """The same bytes as one run, where runs follow each other on both sides."""
        one = Span(self.tensor, self.offset, self.nbytes, self.at)
        return one if self.count == 1 or self.step == self.every == self.length else self

    def turned(self, holder: str) -> Span:
        """Where its bytes lie in `holder`, seen from `tensor`."""
        return Span(holder, self.at, self.length, self.offset, self.count, self.every, self.step)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tensor of `nbytes` bytes and the `spans` of other tensors in it, by their places, none over another.

    What no span covers is made otherwise: constant, or computed.
    """

    nbytes: int
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, nbytes: int, spans: Iterable[Span]) -> Pieces:
        """The spans in order, those joined into one that follow each other on both sides."""
        found: list[Span] = []
        for span in sorted((each.merged() for each in spans), key=lambda each: each.at):
            if found and (joined := _joined(found[-1], span)) is not None:
                found[-1] = joined
            else:
                found.append(span)
        return cls(nbytes, tuple(found))

    @classmethod
    def whole(cls, tensor: str, nbytes: int) -> Pieces:
        """All of a tensor, byte for byte."""
        return cls(nbytes, (Span(tensor, 0, nbytes),))

    @property
    def covered(self) -> bool:
        """Whether every byte is of another tensor."""
        return sum(span.nbytes for span in self.spans) == self.nbytes

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors whose bytes it holds, each once, in their order."""
        return tuple(dict.fromkeys(span.tensor for span in self.spans))

    @property
    def repeats(self) -> bool:
        """Whether a byte of another tensor lies at more than one place in it."""
        by_tensor: dict[str, list[Span]] = {}
        for span in self.spans:
            by_tensor.setdefault(span.tensor, []).append(span.turned(""))
        return not all(map(_apart, by_tensor.values()))

    def through(self, maps: Mapping[str, Pieces]) -> Pieces:
        """The same bytes as pieces of what the tensors are made of, as `maps` says; one of no map is made otherwise."""
        found = [
            part
            for span in self.spans
            if span.tensor in maps
            for inner in maps[span.tensor].spans
            for part in _through(span, inner)
        ]
        return Pieces.of(self.nbytes, found)

    def origin_of(self, byte: int) -> tuple[str, int]:
        """The tensor that a byte is of, and where in it."""
        for span in self.spans:
            run, within = divmod(byte - span.at, span.every) if span.every else (0, byte - span.at)
            if 0 <= run < span.count and 0 <= within < span.length:
                return span.tensor, span.offset + run * span.step + within
        raise IndexError(byte)

    def is_all_of(self, info: TensorInfo) -> bool:
        """Whether it is a tensor whole, byte for byte."""
        return self == Pieces.whole(info.name, info.nbytes)


def _joined(first: Span, second: Span) -> Span | None:
    """Two spans as one, where the runs of the second follow those of the first on both sides."""
    if any(getattr(first, name) != getattr(second, name) for name in ("tensor", "count", "step", "every")):
        return None
    if (first.offset + first.length, first.at + first.length) != (second.offset, second.at):
        return None
    length = first.length + second.length
    # Longer than from one run to the next they may be read, where an order repeats slices, but are not one span.
    if first.count > 1 and length > min(first.step, first.every):
        return None
    return replace(first, length=length).merged()


def _through(outer: Span, inner: Span) -> Iterator[Span]:
    """The bytes of `outer` that `inner` lays into the tensor which `outer` reads, read where `inner` reads them."""
    if not outer.nbytes:
        yield Span(inner.tensor, inner.offset, 0, outer.at)
    elif outer.count > 1 < inner.count and outer.step != inner.every:
        # Runs of other distances meet one by one.
        if outer.count <= inner.count:
            for run in range(outer.count):
                yield from _through(outer.runs(run, run + 1), inner)
        else:
            for run in range(inner.count):
                yield from _through(outer, inner.runs(run, run + 1))
    elif outer.count > 1 < inner.count:
        yield from _row_by_row(outer, inner)
    elif inner.count == 1:
        for first, stop, begin, end in _within(outer.offset, outer.length, outer.step, outer.count, inner):
            part = outer.runs(first, stop)
            offset = inner.offset + part.offset - inner.at + begin
            yield Span(inner.tensor, offset, end - begin, part.at + begin, part.count, part.step, part.every)
    else:
        region = Span("", 0, outer.length, outer.offset)
        for first, stop, begin, end in _within(inner.at, inner.length, inner.every, inner.count, region):
            part = inner.runs(first, stop)
            at = outer.at + part.at - outer.offset + begin
            every, step = (part.every, part.step) if part.count > 1 else (0, 0)
            yield Span(inner.tensor, part.offset + begin, end - begin, at, part.count, step, every)


def _within(begin: int, length: int, step: int, count: int, region: Span) -> Iterator[tuple[int, int, int, int]]:
    """Yield the runs in a region, of those that begin at `begin`, `begin + step`, …, as (first, stop, from, to).

    Runs `first` to before `stop` have their bytes `from` to `to` in the region at `region.at`: all of them where a run
    lies in it whole, a part of those at its two ends.
    """
    low, high = region.at, region.at + region.length
    if count == 1:
        start, end = max(begin, low), min(begin + length, high)
        if start < end:
            yield 0, 1, start - begin, end - begin
        return
    first = max(0, -((begin - low) // step))
    stop = min(count, (high - length - begin) // step + 1)
    if first < stop:
        yield first, stop, 0, length
    for run in {first - 1, max(stop, first)}:
        if 0 <= run < count and not first <= run < stop:
            start, end = max(begin + run * step, low), min(begin + run * step + length, high)
            if start < end:
                yield run, run + 1, start - begin - run * step, end - begin - run * step


def _row_by_row(outer: Span, inner: Span) -> Iterator[Span]:
    """`_through` where the runs of both lie at one distance: run i of `outer` meets runs i + shift and next of it."""
    shift, within = divmod(outer.offset - inner.at, inner.every)
    for moved, start in ((shift, within), (shift + 1, within - inner.every)):
        # In the row of `inner`: its own bytes are 0 to length, those of `outer` begin at `start`.
        begin, end = max(0, start), min(inner.length, start + outer.length)
        first, stop = max(0, -moved), min(outer.count, inner.count - moved)
        if begin < end and first < stop:
            part = outer.runs(first, stop)
            yield Span(
                inner.tensor,
                inner.offset + (first + moved) * inner.step + begin,
                end - begin,
                part.at + begin - start,
                part.count,
                inner.step if part.count > 1 else 0,
                part.every,
            )


def turned(maps: Mapping[str, Pieces], sizes: Mapping[str, int]) -> dict[str, Pieces]:
    """Return where the tensors that maps read lie in the tensors that they make: the maps seen from the other side.

    `sizes` are the bytes of those to look for. A byte that is at several places is taken from the first, but where one
    tensor holds all of another it is taken from there. Tensors that are not there whole have less than all of their
    bytes covered (`Pieces.covered`).
    """
    places: dict[str, dict[str, list[Span]]] = {name: {} for name in sizes}
    for holder, pieces in maps.items():
        for span in pieces.spans:
            if span.tensor in places:
                places[span.tensor].setdefault(holder, []).append(span.turned(holder))
    return {name: _assembled(sizes[name], list(by_holder.values())) for name, by_holder in places.items()}


def _assembled(nbytes: int, by_holder: Sequence[list[Span]]) -> Pieces:
    """Return a tensor as put together from what several others have of it."""
    alone = (Pieces.of(nbytes, spans) for spans in by_holder)
    if (found := next((one for one in alone if one.covered and _apart(one.spans)), None)) is not None:
        return found
    every = [span for spans in by_holder for span in spans]
    return Pieces.of(nbytes, every if _apart(every) else _first_of_each(every))


def _apart(spans: Sequence[Span]) -> bool:
    """Whether no two spans of one tensor lie over each other."""
    runs = sorted(place for span in spans for place in span.places)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(runs))


def _first_of_each(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans without the bytes that one before them has."""
    # The places that are taken, in order, none over another.
    taken: list[tuple[int, int]] = []
    for span in spans:
        for run in (span.runs(number, number + 1) for number in range(span.count)):
            at, end = run.at, run.at + run.length
            first = bisect.bisect_right(taken, at, key=lambda place: place[1])
            last = bisect.bisect_left(taken, end, lo=first, key=lambda place: place[0])
            edges = [at, *(edge for place in taken[first:last] for edge in place), end]
            for begin, stop in zip(edges[::2], edges[1::2], strict=True):
                if begin < stop:
                    yield replace(run, offset=run.offset + begin - at, at=begin, length=stop - begin)
            taken[first:last] = [(min(edges), max(edges))]


def side_by_side(sizes: Sequence[int], *, before: int) -> list[Span]:
    """How tensors lie in one that has them side by side, tensor n as `str(n)`: of each `before` runs of its size."""
    begins = [0, *itertools.accumulate(sizes)]
    return [
        Span(str(n), 0, size, begin, before, *((size, begins[-1]) if before > 1 else (0, 0))).merged()
        for n, (size, begin) in enumerate(zip(sizes, begins, strict=False))
        if size and before
    ]


def stacked(parts: Sequence[Pieces], *, before: int) -> Pieces:
    """Tensors side by side in one, `before` times a run of each."""
    places = side_by_side([part.nbytes // before if before else 0 for part in parts], before=before)
    inner = {str(nth): part for nth, part in enumerate(parts)}
    return Pieces.of(sum(part.nbytes for part in parts), places).through(inner)


def indices(tensor: str, shape: Sequence[int], bits: int, axis: int, order: Sequence[int]) -> Pieces:
    """The slices `order` of a tensor along `axis`, one behind the other; `bits` are those of one element."""
    width = math.prod(shape[axis + 1 :]) * bits // 8
    before, size = math.prod(shape[:axis]), shape[axis]
    spans: list[Span] = []
    at = 0
    for first, count in _runs(order):
        length = count * width
        if not length * before:
            continue
        pitch = (size * width, len(order) * width) if before > 1 else (0, 0)
        spans.append(Span(tensor, first * width, length, at, before, *pitch).merged())
        at += length
    return Pieces.of(before * len(order) * width, spans)


def _runs(order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The runs of numbers that follow each other, by their first and how many they are."""
    if isinstance(order, range) and order.step == 1:
        if order:
            yield order.start, len(order)
        return
    for _, group in itertools.groupby(enumerate(order), key=lambda item: item[1] - item[0]):
        members = [index for _, index in group]
        yield members[0], len(members)
