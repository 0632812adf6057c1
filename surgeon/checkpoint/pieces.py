"""Pieces: which byte ranges of other tensors a tensor consists of, and their positions in it.

A surgery is a map from each output tensor to pieces of base tensors. Maps compose (`Pieces.through`) and can be
inverted (`turned`), so composing maps locates a base in an output of many surgeries.
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
    """A strided range of bytes: `count` runs of `length` bytes of `tensor`.

    Run i is read from byte `offset + i · step` of `tensor` and is placed at byte `at + i · every` of the holding
    tensor.
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
        """The number of bytes in all runs together."""
        return self.length * self.count

    @property
    def places(self) -> Iterator[tuple[int, int]]:
        """The (from, to) byte positions of the runs in the holding tensor."""
        return ((at, at + self.length) for at in (self.at + run * self.every for run in range(self.count)))

    def runs(self, first: int, stop: int) -> Span:
        """Return the runs from `first` to before `stop` as a span."""
        if (first, stop) == (0, self.count):
            return self
        count = stop - first
        offset, at = self.offset + first * self.step, self.at + first * self.every
        step, every = (self.step, self.every) if count > 1 else (0, 0)
        return replace(self, offset=offset, at=at, count=count, step=step, every=every)

    def merged(self) -> Span:
        """Return the same bytes as one run where the runs are contiguous in both tensors; else the span itself."""
        one = Span(self.tensor, self.offset, self.nbytes, self.at)
        return one if self.count == 1 or self.step == self.every == self.length else self

    def turned(self, holder: str) -> Span:
        """Return the inverse span: the same bytes, read from `holder` (the holding tensor) and placed in `tensor`."""
        return Span(holder, self.at, self.length, self.offset, self.count, self.every, self.step)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tensor of `nbytes` bytes and the `spans` of other tensors in it, sorted by position, without overlaps.

    Bytes that no span covers have another origin: they are constant, or computed.
    """

    nbytes: int
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, nbytes: int, spans: Iterable[Span]) -> Pieces:
        """Build pieces from spans: sort them by position and join spans that are contiguous in both tensors."""
        found: list[Span] = []
        for span in sorted((each.merged() for each in spans), key=lambda each: each.at):
            if found and (joined := _joined(found[-1], span)) is not None:
                found[-1] = joined
            else:
                found.append(span)
        return cls(nbytes, tuple(found))

    @classmethod
    def whole(cls, tensor: str, nbytes: int) -> Pieces:
        """Return pieces that copy a whole tensor, byte for byte."""
        return cls(nbytes, (Span(tensor, 0, nbytes),))

    @property
    def covered(self) -> bool:
        """Whether every byte comes from another tensor."""
        return sum(span.nbytes for span in self.spans) == self.nbytes

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors whose bytes it holds, each once, in order of position."""
        return tuple(dict.fromkeys(span.tensor for span in self.spans))

    @property
    def repeats(self) -> bool:
        """Whether some byte of another tensor occurs at more than one position."""
        by_tensor: dict[str, list[Span]] = {}
        for span in self.spans:
            by_tensor.setdefault(span.tensor, []).append(span.turned(""))
        return not all(map(_apart, by_tensor.values()))

    def through(self, maps: Mapping[str, Pieces]) -> Pieces:
        """Replace every tensor by its own pieces in `maps`; return the composition.

        Tensors without a map become uncovered bytes.
        """
        found = [
            part
            for span in self.spans
            if span.tensor in maps
            for inner in maps[span.tensor].spans
            for part in _through(span, inner)
        ]
        return Pieces.of(self.nbytes, found)

    def origin_of(self, byte: int) -> tuple[str, int]:
        """Return the tensor from which a byte comes, and the byte's position in that tensor.

        Raises IndexError if uncovered.
        """
        for span in self.spans:
            run, within = divmod(byte - span.at, span.every) if span.every else (0, byte - span.at)
            if 0 <= run < span.count and 0 <= within < span.length:
                return span.tensor, span.offset + run * span.step + within
        raise IndexError(byte)

    def is_all_of(self, info: TensorInfo) -> bool:
        """Return whether the pieces are exactly one whole tensor, byte for byte."""
        return self == Pieces.whole(info.name, info.nbytes)


def _joined(first: Span, second: Span) -> Span | None:
    """Join two spans into one where the second's runs directly follow the first's in both tensors; else return None."""
    if any(getattr(first, name) != getattr(second, name) for name in ("tensor", "count", "step", "every")):
        return None
    if (first.offset + first.length, first.at + first.length) != (second.offset, second.at):
        return None
    length = first.length + second.length
    # Where an order repeats slices, runs may become longer than their distance; such runs are not one valid span.
    if first.count > 1 and length > min(first.step, first.every):
        return None
    return replace(first, length=length).merged()


def _through(outer: Span, inner: Span) -> Iterator[Span]:
    """Rewrite the part of `outer` inside `inner` as spans of `inner`'s source tensor."""
    if not outer.nbytes:
        yield Span(inner.tensor, inner.offset, 0, outer.at)
    elif outer.count > 1 < inner.count and outer.step != inner.every:
        # The runs have different distances: intersect them one by one.
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
    """Intersect the runs that begin at `begin`, `begin + step`, … with a region; yield (first, stop, from, to).

    Bytes `from` to `to` of the runs `first` to before `stop` lie in the region at `region.at`: all bytes of the runs
    that lie in it completely, and a part of the runs at its two ends.
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
    """Do the work of `_through` where both spans have the same distance between runs.

    Run i of `outer` overlaps the runs i + shift and i + shift + 1 of `inner`.
    """
    shift, within = divmod(outer.offset - inner.at, inner.every)
    for moved, start in ((shift, within), (shift + 1, within - inner.every)):
        # Positions in a row of `inner`: inner's bytes are 0 to length, outer's bytes begin at `start`.
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
    """Invert maps: return where the source tensors lie in the tensors that the maps build.

    `sizes` gives the bytes of the tensors to look for. Where a byte occurs several times, the first place is used,
    except that a single holder with all bytes of the tensor is preferred. For a tensor that is not completely there,
    not all bytes are covered (`Pieces.covered`).
    """
    places: dict[str, dict[str, list[Span]]] = {name: {} for name in sizes}
    for holder, pieces in maps.items():
        for span in pieces.spans:
            if span.tensor in places:
                places[span.tensor].setdefault(holder, []).append(span.turned(holder))
    return {name: _assembled(sizes[name], list(by_holder.values())) for name, by_holder in places.items()}


def _assembled(nbytes: int, by_holder: Sequence[list[Span]]) -> Pieces:
    """Return a tensor's pieces, assembled from its parts in several holding tensors."""
    alone = (Pieces.of(nbytes, spans) for spans in by_holder)
    if (found := next((one for one in alone if one.covered and _apart(one.spans)), None)) is not None:
        return found
    every = [span for spans in by_holder for span in spans]
    return Pieces.of(nbytes, every if _apart(every) else _first_of_each(every))


def _apart(spans: Sequence[Span]) -> bool:
    """Return whether no two spans overlap in position."""
    runs = sorted(place for span in spans for place in span.places)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(runs))


def _first_of_each(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the spans, run by run, without the positions that an earlier span already covers."""
    # The byte ranges already taken, sorted and disjoint.
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
    """Return the spans of a concatenation of tensors in which tensor n is called `str(n)`.

    The tensor is `before` rows; each row contains one run of `sizes[n]` bytes of every tensor n.
    """
    begins = [0, *itertools.accumulate(sizes)]
    return [
        Span(str(n), 0, size, begin, before, *((size, begins[-1]) if before > 1 else (0, 0))).merged()
        for n, (size, begin) in enumerate(zip(sizes, begins, strict=False))
        if size and before
    ]


def stacked(parts: Sequence[Pieces], *, before: int) -> Pieces:
    """Return the pieces of several tensors concatenated: `before` rows, each with one run of every tensor."""
    places = side_by_side([part.nbytes // before if before else 0 for part in parts], before=before)
    inner = {str(nth): part for nth, part in enumerate(parts)}
    return Pieces.of(sum(part.nbytes for part in parts), places).through(inner)


def indices(tensor: str, shape: Sequence[int], bits: int, axis: int, order: Sequence[int]) -> Pieces:
    """Return the slices `order` of a tensor along `axis`, concatenated; `bits` is the size of one element."""
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
    """Yield the runs of consecutive numbers as (first, count)."""
    if isinstance(order, range) and order.step == 1:
        if order:
            yield order.start, len(order)
        return
    for _, group in itertools.groupby(enumerate(order), key=lambda item: item[1] - item[0]):
        members = [index for _, index in group]
        yield members[0], len(members)
