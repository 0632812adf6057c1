"""Pieces: which bytes of which tensors a tensor holds, and where in it they lie.

A surgery is a map from the tensors of its output to pieces of the base's. Maps compose (`Pieces.through`) and are
turned round (`turned`), so where a base lies in an output of many surgeries is the composition of their maps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.ranges import fill, pieces_of

_BUFFER = 8 * 1024 * 1024
# Runs of at most so many numbers are copied number by number, all runs at once, which is then faster.
_SHORT = 32


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

    def runs(self, first: int, stop: int) -> Span:
        """The runs from `first` to before `stop`."""
        count = stop - first
        offset, at = self.offset + first * self.step, self.at + first * self.every
        step, every = (self.step, self.every) if count > 1 else (0, 0)
        return replace(self, offset=offset, at=at, count=count, step=step, every=every)

    def merged(self) -> Span:
        """The same bytes as one run, where runs follow each other on both sides."""
        if self.count > 1 and self.step == self.every == self.length:
            return Span(self.tensor, self.offset, self.nbytes, self.at)
        return self if self.count > 1 else replace(self, step=0, every=0)

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

    def is_all_of(self, info: TensorInfo) -> bool:
        """Whether it is a tensor whole, byte for byte."""
        return self == Pieces.whole(info.name, info.nbytes)


def _joined(first: Span, second: Span) -> Span | None:
    """Two spans as one, where the runs of the second follow those of the first on both sides."""
    if first.tensor != second.tensor or (first.count, first.step, first.every) != (
        second.count,
        second.step,
        second.every,
    ):
        return None
    if (first.offset + first.length, first.at + first.length) != (second.offset, second.at):
        return None
    length = first.length + second.length
    # Longer than from one run to the next they may be read, where an order repeats slices, but are not one span.
    apart = first.count == 1 or length <= min(first.step, first.every)
    return replace(first, length=length).merged() if apart else None


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
            yield replace(part, tensor=inner.tensor, offset=offset, at=part.at + begin, length=end - begin)
    else:
        region = Span("", 0, outer.length, outer.offset)
        for first, stop, begin, end in _within(inner.at, inner.length, inner.every, inner.count, region):
            part = inner.runs(first, stop)
            at = outer.at + part.at - outer.offset + begin
            every, step = (part.every, part.step) if part.count > 1 else (0, 0)
            yield Span(inner.tensor, part.offset + begin, end - begin, at, part.count, step, every)


def _within(begin: int, length: int, step: int, count: int, region: Span) -> Iterator[tuple[int, int, int, int]]:
    """Of runs that begin at `begin`, `begin + step`, … those in a region, as (first, stop, from, to).

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
    """Where the tensors that maps read lie in the tensors that they make: the maps seen from the other side.

    `sizes` are the bytes of those that are asked for. A byte that stands at several places is taken from the first,
    but where one tensor holds all of another it is taken from there. Tensors that are not there whole have less than
    all of their bytes covered (`Pieces.covered`).
    """
    places: dict[str, dict[str, list[Span]]] = {name: {} for name in sizes}
    for holder, pieces in maps.items():
        for span in pieces.spans:
            if span.tensor in places:
                places[span.tensor].setdefault(holder, []).append(span.turned(holder))
    return {name: _assembled(sizes[name], list(by_holder.values())) for name, by_holder in places.items()}


def _assembled(nbytes: int, held: Sequence[list[Span]]) -> Pieces:
    """A tensor of what several others hold of it."""
    alone = (Pieces.of(nbytes, spans) for spans in held)
    if (found := next((one for one in alone if one.covered and _apart(one.spans)), None)) is not None:
        return found
    every = [span for spans in held for span in spans]
    return Pieces.of(nbytes, every if _apart(every) else _first_of_each(every))


def _apart(spans: Sequence[Span]) -> bool:
    """Whether no two spans of one tensor lie over each other."""
    runs = sorted(_places(spans))
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(runs))


def _places(spans: Iterable[Span]) -> Iterator[tuple[int, int]]:
    for span in spans:
        for run in range(span.count):
            begin = span.at + run * span.every
            yield begin, begin + span.length


def _first_of_each(spans: Iterable[Span]) -> list[Span]:
    """Spans without the bytes that one before them has."""
    taken: list[Span] = []
    for span in spans:
        for run in (span.runs(number, number + 1) for number in range(span.count)):
            left = [run]
            for other in taken:
                left = [part for each in left for part in _without(each, other)]
            taken.extend(left)
    return taken


def _without(run: Span, other: Span) -> Iterator[Span]:
    """What is left of one run where another has its bytes."""
    begin, end = max(run.at, other.at), min(run.at + run.length, other.at + other.length)
    if begin >= end:
        yield run
        return
    for start, stop in ((run.at, begin), (end, run.at + run.length)):
        if start < stop:
            yield replace(run, offset=run.offset + start - run.at, at=start, length=stop - start)


def side_by_side(sizes: Sequence[int], *, before: int) -> list[Span]:
    """How tensors lie in one that has them side by side, tensor n as `str(n)`: of each `before` runs of its size."""
    begins = [0, *itertools.accumulate(sizes)]
    return [
        Span(str(n), 0, size, begin, before, *((size, begins[-1]) if before > 1 else (0, 0))).merged()
        for n, (size, begin) in enumerate(zip(sizes, begins, strict=False))
        if size and before
    ]


def indices(tensor: str, shape: Sequence[int], bits: int, axis: int, order: Sequence[int]) -> Pieces:
    """The slices `order` of a tensor along `axis`, one behind the other; `bits` are those of one element."""
    width = math.prod(shape[axis + 1 :]) * bits // 8
    before, size = math.prod(shape[:axis]), shape[axis]
    spans: list[Span] = []
    at = 0
    for _, group in itertools.groupby(enumerate(order), key=lambda item: item[1] - item[0]):
        members = [index for _, index in group]
        length = len(members) * width
        if not length * before:
            continue
        pitch = (size * width, len(order) * width) if before > 1 else (0, 0)
        spans.append(Span(tensor, members[0] * width, length, at, before, *pitch).merged())
        at += length
    return Pieces.of(before * len(order) * width, spans)


@dataclass(frozen=True, slots=True)
class Gap:
    """So many bytes that are of no other tensor."""

    length: int


Opened = Callable[[str], int]


def read_in_order(pieces: Pieces, infos: Mapping[str, TensorInfo], opened: Opened) -> Iterator[memoryview | Gap]:
    """The bytes of a tensor, from the first to the last; `opened` gives the descriptor of a file.

    `infos` says where the tensors lie that it is made of. Raises BadInput where a file ends early.
    """
    at = 0
    for band in _bands(pieces.spans):
        if band[0].at > at:
            yield Gap(band[0].at - at)
        yield from _read_band(band, infos, opened)
        at = band[0].at + sum(span.nbytes for span in band)
    if at < pieces.nbytes:
        yield Gap(pieces.nbytes - at)


def _bands(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Spans in the order of their bytes: one of a single run, or several whose runs make up rows without holes."""
    left = list(spans)
    while left:
        first = left[0]
        band = [span for span in left if span.at < first.at + first.every] if first.count > 1 else [first]
        alike = all((span.count, span.every) == (first.count, first.every) for span in band)
        ends = [first.at, *(span.at + span.length for span in band)]
        tiled = all(span.at == end for span, end in zip(band, ends, strict=False))
        if first.count > 1 and not (alike and tiled and ends[-1] == first.at + first.every):
            # No rows: run after run of all that lie between each other.
            end = max(span.at + (span.count - 1) * span.every + span.length for span in band)
            band = [span for span in left if span.at < end]
            for run in sorted((s.runs(n, n + 1) for s in band for n in range(s.count)), key=lambda run: run.at):
                yield [run]
        else:
            yield band
        left = left[len(band) :]


def _read_band(band: Sequence[Span], infos: Mapping[str, TensorInfo], opened: Opened) -> Iterator[memoryview]:
    first = band[0]
    if first.count == 1 or first.every > _BUFFER:
        for run in range(first.count):
            for span in band:
                info = infos[span.tensor]
                begin = info.begin + span.offset + run * span.step
                yield from pieces_of(opened(info.file), begin, begin + span.length, _BUFFER)
        return
    at_once = max(1, _BUFFER // first.every)
    for begin in range(0, first.count, at_once):
        yield _gathered(band, begin, min(begin + at_once, first.count), infos, opened)


def _gathered(
    band: Sequence[Span], begin: int, end: int, infos: Mapping[str, TensorInfo], opened: Opened
) -> memoryview:
    """Runs `begin` to before `end` of spans, in memory; what several read of the same rows is read once."""
    count, first = end - begin, band[0]
    rows = memoryview(bytearray(count * first.every))
    for (tensor, step), group in itertools.groupby(band, key=lambda span: (span.tensor, span.step)):
        spans = list(group)
        low = min(span.offset for span in spans)
        width = max(span.offset + span.length for span in spans) - low
        groups = [spans] if width <= step else [[span] for span in spans]
        for each in groups:
            low = min(span.offset for span in each)
            width = max(span.offset + span.length for span in each) - low
            table = memoryview(bytearray(count * step))
            info = infos[tensor]
            fill(opened(info.file), table[: (count - 1) * step + width], info.begin + low + begin * step)
            for span in each:
                moved = replace(span, offset=span.offset - low, at=span.at - first.at, count=count)
                _lay(moved, table, rows)
    return rows


def _lay(span: Span, source: memoryview, into: memoryview) -> None:
    """Copy the runs of a span from one buffer into another: run by run, or short ones number by number, all at once."""
    every_number = (span.at, span.every, span.offset, span.step, span.length)
    size = next(size for size in (8, 4, 2, 1) if not any(number % size for number in every_number))
    at, every, offset, step, length = (number // size for number in every_number)
    source, into = _numbers(source, size), _numbers(into, size)
    if length > _SHORT:
        for run in range(span.count):
            begin, read = at + run * every, offset + run * step
            into[begin : begin + length] = source[read : read + length]
    else:
        to, end = (span.count - 1) * every + 1, (span.count - 1) * step + 1
        for nth in range(length):
            into[at + nth : at + nth + to : every] = source[offset + nth : offset + nth + end : step]


def _numbers(data: memoryview, size: int) -> memoryview:
    """Bytes as numbers of `size` bytes each."""
    match size:
        case 8:
            return data.cast("Q")
        case 4:
            return data.cast("I")
        case 2:
            return data.cast("H")
        case _:
            return data
