"""The bytes that pieces of files describe: read in order, copied into a file, or compared with a file's bytes.

A header is a map too: it turns pieces of tensors into pieces of the files that hold the tensors (`in_files`).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.pieces import Pieces, Span
from surgeon.checkpoint.ranges import copy_range, fill, pieces_of, write_all

# Bytes read at a time from a run. Two such blocks fit a core's cache, so that a block is still cached when compared.
_CHUNK = 512 * 1024
# Bytes of a block of rows that are gathered from several places.
_BUFFER = 8 * 1024 * 1024
# Runs of at most this many numbers are copied number by number for all runs at once, which is faster for short runs.
_SHORT = 32

# A function that returns the descriptor of a file, given its place (`OpenShards`).
Opened = Callable[[str], int]


class OtherBytes(Exception):
    """A file does not contain the bytes that its pieces describe."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A range of `length` bytes that come from no other tensor."""

    length: int


def places_of(infos: Mapping[str, TensorInfo], source: str = "") -> dict[str, Pieces]:
    """Return each tensor as a piece of its file; the file's place begins with the source's name (`OpenShards`)."""
    return {
        name: Pieces(info.nbytes, (Span(f"{source}/{info.file}", info.begin, info.nbytes),))
        for name, info in infos.items()
    }


def in_files(maps: Mapping[str, Pieces], infos: Mapping[str, TensorInfo]) -> dict[str, Pieces]:
    """Convert pieces of tensors to pieces of the files that hold the tensors."""
    read = {name: infos[name] for pieces in maps.values() for name in pieces.tensors}
    places = places_of(read)
    return {name: pieces.through(places) for name, pieces in maps.items()}


def read_in_order(pieces: Pieces, opened: Opened) -> Iterator[memoryview | Gap]:
    """Yield the bytes that the pieces describe, from first to last, in blocks.

    A range without a source is yielded as a Gap. A block may be overwritten when the next is read. Raises BadInput
    where a file ends early.
    """
    at = 0
    for band in _bands(pieces.spans):
        if band[0].at > at:
            yield Gap(band[0].at - at)
        yield from _read_band(band, opened)
        at = band[0].at + sum(span.nbytes for span in band)
    if at < pieces.nbytes:
        yield Gap(pieces.nbytes - at)


def compared(pieces: Pieces, opened: Opened, file: int, begin: int) -> Iterator[tuple[bytearray | memoryview, bool]]:
    """Compare the bytes at `begin` of the open `file` with the bytes that `pieces` describe.

    Yield (block, known) for each block of the file's own bytes in order; `known` is False where `pieces` gives no
    source, so nothing was compared. Raises OtherBytes where bytes differ, BadInput where a file ends early.
    """
    for piece in read_in_order(pieces, opened):
        if isinstance(piece, Gap):
            end = begin + piece.length
            for own in pieces_of(file, begin, end, _CHUNK):
                yield own, False
            begin = end
            continue
        found = bytearray(len(piece))
        fill(file, found, begin)
        if found != piece:
            raise OtherBytes
        yield found, True
        begin += len(found)


def copy_pieces(pieces: Pieces, opened: Opened, *, target: int, begin: int, progress: Callable[[int], None]) -> None:
    """Copy the bytes that `pieces` describe to position `begin` of the open file `target`.

    The kernel copies single runs. Bytes that no span covers are left unchanged. `progress` receives the size of every
    part. Raises BadInput where a file ends early.
    """
    for band in _bands(pieces.spans):
        span, at = band[0], begin + band[0].at
        if span.count == 1:
            copy_range(
                opened(span.tensor),
                target,
                source_offset=span.offset,
                target_offset=at,
                count=span.length,
                progress=progress,
            )
            continue
        for rows in _read_band(band, opened):
            write_all(target, rows, at)
            at += len(rows)
            progress(len(rows))


def _bands(spans: Sequence[Span]) -> Iterator[Sequence[Span]]:
    """Group spans in the order of their bytes: a single run, or several spans whose runs form rows without holes."""
    nth = 0
    while nth < len(spans):
        first = spans[nth]
        band = _before(spans, nth, first.at + first.every) if first.count > 1 else [first]
        alike = all((span.count, span.every) == (first.count, first.every) for span in band)
        ends = [first.at, *(span.at + span.length for span in band)]
        tiled = all(span.at == end for span, end in zip(band, ends, strict=False))
        if first.count > 1 and not (alike and tiled and ends[-1] == first.at + first.every):
            # The spans form no rows: yield the interleaved runs one by one.
            end = max(span.at + (span.count - 1) * span.every + span.length for span in band)
            band = _before(spans, nth, end)
            for run in sorted((s.runs(n, n + 1) for s in band for n in range(s.count)), key=lambda run: run.at):
                yield [run]
        else:
            yield band
        nth += len(band)


def _before(spans: Sequence[Span], nth: int, end: int) -> Sequence[Span]:
    """Return the spans from number `nth` on that begin before byte `end`."""
    return spans[nth : bisect.bisect_left(spans, end, lo=nth, key=lambda span: span.at)]


def _read_band(band: Sequence[Span], opened: Opened) -> Iterator[memoryview]:
    """Yield the bytes of a band of spans, as grouped by `_bands`, in order.

    A single run, or rows longer than `_BUFFER`, are read in chunks from place to place; shorter rows are gathered in
    memory first.
    """
    first = band[0]
    if first.count == 1 or first.every > _BUFFER:
        for run in range(first.count):
            for span in band:
                begin = span.offset + run * span.step
                yield from pieces_of(opened(span.tensor), begin, begin + span.length, _CHUNK)
        return
    at_once = max(1, _BUFFER // first.every)
    for begin in range(0, first.count, at_once):
        yield _gathered(band, begin, min(begin + at_once, first.count), opened)


def _gathered(band: Sequence[Span], begin: int, end: int, opened: Opened) -> memoryview:
    """Read runs `begin` to before `end` of the spans into memory; rows shared by several spans are read only once."""
    count, first = end - begin, band[0]
    rows = memoryview(bytearray(count * first.every))
    for (file, step), group in itertools.groupby(band, key=lambda span: (span.tensor, span.step)):
        spans = list(group)
        low = min(span.offset for span in spans)
        width = max(span.offset + span.length for span in spans) - low
        groups = [spans] if width <= step else [[span] for span in spans]
        for each in groups:
            low = min(span.offset for span in each)
            width = max(span.offset + span.length for span in each) - low
            table = memoryview(bytearray(count * step))
            fill(opened(file), table[: (count - 1) * step + width], low + begin * step)
            for span in each:
                moved = replace(span, offset=span.offset - low, at=span.at - first.at, count=count)
                _lay(moved, table, rows)
    return rows


def _lay(span: Span, source: memoryview, into: memoryview) -> None:
    """Copy a span's runs between buffers: run by run, or short runs number by number for all runs together."""
    every_number = (span.at, span.every, span.offset, span.step, span.length)
    # The largest size of numbers that divides all positions and lengths; 1 always does.
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
    """Return bytes as a view of numbers with `size` bytes each."""
    match size:
        case 8:
            return data.cast("Q")
        case 4:
            return data.cast("I")
        case 2:
            return data.cast("H")
        case _:
            return data
