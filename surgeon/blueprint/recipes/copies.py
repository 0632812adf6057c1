"""Bytes of the base at another place: whole tensors, some of their rows, and per-layer parts in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from surgeon.blueprint.recipes.recipe import Bench, Holds, Recipe, row_batches
from surgeon.checkpoint.header import DTYPE_BITS, TensorInfo
from surgeon.checkpoint.pieces import Pieces, Span, indices, stacked
from surgeon.common.formatting import listed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Copy(Recipe):
    """Bytes of the base, read as a tensor of `shape`; `spans` lists the bytes in order.

    `source` is the tensor of the base where this is the whole of it; otherwise None. `trains` says whether the bytes
    train together with new tensors; None: a whole tensor does, a part of a larger one does not.
    """

    computed: ClassVar[bool] = False

    spans: tuple[Span, ...]
    dtype: str
    shape: tuple[int, ...]
    source: str | None = None
    trains: bool | None = None

    @classmethod
    def of(cls, info: TensorInfo) -> Copy:
        """Return the recipe of a whole tensor of the base."""
        return cls(Pieces.whole(info.name, info.nbytes).spans, info.dtype, info.shape, info.name)

    @property
    def how(self) -> str:
        """Describe the copy: the tensor of the base, or the tensors whose bytes it holds."""
        return f"a copy of {self.source}" if self.source is not None else f"bytes of {listed(self.pieces.tensors)}"

    def compute(self, bench: Bench) -> Tensor:
        """Read the bytes."""
        return bench.read(self)

    def compute_in_pieces(self, bench: Bench) -> Iterator[memoryview | Tensor]:
        """Yield the bytes; for a whole tensor a few rows at a time, because embeddings may take gigabytes."""
        if self.source is None or not self.shape:
            yield bench.read(self)
        else:
            yield from (bench.read_rows(self, *rows)[0] for rows in row_batches(self))

    def nth(self, number: int, bench: Bench) -> Tensor:
        """Read slice `number` along the first axis and nothing else."""
        return bench.read(replace(self.part(0, range(number, number + 1)), shape=self.shape[1:]))

    @cached_property
    def pieces(self) -> Pieces:
        """Return the spans as pieces of the whole tensor."""
        return Pieces(self.nbytes, self.spans)

    @property
    def own(self) -> Pieces:
        """Return the spans of bytes that count as this tensor's own.

        Inside a larger tensor these count as none where they are stored elsewhere too (`Joined.own`).
        """
        return self.pieces

    @property
    def holds(self) -> Holds:
        """Return "copied" by default (it trains as a copy), "moved" where it trains, "kept" where it does not."""
        return "copied" if self.trains is None else "moved" if self.trains else "kept"

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the base tensor's name where this is the whole of it; nothing for a part."""
        return () if self.source is None else (self.source,)

    def columns(self, start: int, stop: int) -> Copy:
        """Return the recipe of some columns of a matrix."""
        return self.part(1, range(start, stop))

    def part(self, axis: int, order: Sequence[int]) -> Copy:
        """Return the recipe of the slices `order` along `axis`, one after another."""
        found = indices("", self.shape, DTYPE_BITS[self.dtype], axis, order).through({"": self.pieces})
        return Copy(found.spans, self.dtype, (*self.shape[:axis], len(order), *self.shape[axis + 1 :]))


@dataclass(frozen=True)
class KeptRows(Copy):
    """Rows of a tensor of the base, in the order of `numbers`: the rows of the tokens that stay."""

    numbers: tuple[int, ...] = ()


def kept_rows(of: Copy, numbers: Sequence[int]) -> KeptRows:
    """Return the rows `numbers` of a tensor; training leaves them unchanged."""
    found = of.part(0, numbers)
    return KeptRows(found.spans, of.dtype, found.shape, trains=False, numbers=tuple(numbers))


def per_layer(of: Copy, axis: int, count: int, order: Sequence[int]) -> Copy:
    """Return `of`, which holds a part for each of `count` layers along `axis`, with part `order[n]` as its part n."""
    size = of.shape[axis] // count
    slices = [part * size + nth for part in order for nth in range(size)]
    return replace(of.part(axis, slices), trains=False)


def rows(pieces: Sequence[tuple[Copy, int, int]], shape: tuple[int, ...], *, still: bool) -> Copy:
    """Return rows `start:stop` of tensors of the base, one piece below another, read as a tensor of `shape`.

    `still`: the base already computes with these rows under another name, so they do not train with new tensors. Rows
    are counted along the first axis.
    """
    first, start, stop = pieces[0]
    entire = len(pieces) == 1 and (start, stop) == (0, first.shape[0]) and first.shape == shape
    found = stacked([sliced(*piece).pieces for piece in pieces], before=1)
    source = first.source if entire else None
    return Copy(found.spans, first.dtype, shape, source, trains=not still)


def whole(of: Copy) -> Copy:
    """Return a whole tensor of the base under a new name; the base computes with it, so it does not train as new."""
    return rows([(of, 0, of.shape[0])], of.shape, still=True)


def sliced(of: Copy, start: int, stop: int, *, again: bool = False) -> Copy:
    """Return slices `start:stop` along axis 0, as part of a larger tensor; `again`: they are stored elsewhere too."""
    return sliced_along(of, 0, start, stop, again=again)


def sliced_along(of: Copy, axis: int, start: int, stop: int, *, again: bool = False) -> Copy:
    """Return slices `start:stop` along any axis, as part of a larger tensor; `again`: they are stored elsewhere too."""
    return replace(of.part(axis, range(start, stop)), trains=True if again else None)


def renamed(of: Copy, source: str) -> Copy:
    """Return the same recipe for the whole tensor `source`, which has the same dtype and shape."""
    return replace(of, spans=Pieces.whole(source, of.nbytes).spans, source=source)
