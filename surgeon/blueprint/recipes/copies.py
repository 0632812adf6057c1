"""Bytes of the base at another place: whole tensors, rows of them, and their parts for each layer in another order."""

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
    """Bytes of the base, read as a tensor of `shape`: `spans` says which, in their order.

    `source` is the tensor of the base that it is, all of it; None where it is another. `trains` says whether it trains
    with what is new; None: a tensor of its own does, a part of a larger one does not.
    """

    computed: ClassVar[bool] = False

    spans: tuple[Span, ...]
    dtype: str
    shape: tuple[int, ...]
    source: str | None = None
    trains: bool | None = None

    @classmethod
    def of(cls, info: TensorInfo) -> Copy:
        """A tensor of the base, whole."""
        return cls(Pieces.whole(info.name, info.nbytes).spans, info.dtype, info.shape, info.name)

    @property
    def how(self) -> str:
        """The tensor that it is, or those whose bytes it holds."""
        return f"a copy of {self.source}" if self.source is not None else f"bytes of {listed(self.pieces.tensors)}"

    def compute(self, bench: Bench) -> Tensor:
        """Read the bytes."""
        return bench.read(self)

    def compute_in_pieces(self, bench: Bench) -> Iterator[memoryview | Tensor]:
        """Read the bytes, of a whole tensor a few rows at a time: embeddings may take gigabytes."""
        if self.source is None or not self.shape:
            yield bench.read(self)
        else:
            yield from (bench.read_rows(self, *rows)[0] for rows in row_batches(self))

    def nth(self, number: int, bench: Bench) -> Tensor:
        """Slice `number` along the first axis: nothing else is read."""
        return bench.read(replace(self.part(0, range(number, number + 1)), shape=self.shape[1:]))

    @cached_property
    def pieces(self) -> Pieces:
        """Its spans."""
        return Pieces(self.nbytes, self.spans)

    @property
    def own(self) -> Pieces:
        """Its spans. Of a larger tensor they are none where they lie elsewhere too (`Joined.own`)."""
        return self.pieces

    @property
    def holds(self) -> Holds:
        """Where it trains on its own, it begins as what it was copied from."""
        return "copied" if self.trains is None else "moved" if self.trains else "kept"

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensor that it is."""
        return () if self.source is None else (self.source,)

    def columns(self, start: int, stop: int) -> Copy:
        """Columns of a matrix."""
        return self.part(1, range(start, stop))

    def part(self, axis: int, order: Sequence[int]) -> Copy:
        """The slices `order` along `axis`, one behind the other."""
        found = indices("", self.shape, DTYPE_BITS[self.dtype], axis, order).through({"": self.pieces})
        return Copy(found.spans, self.dtype, (*self.shape[:axis], len(order), *self.shape[axis + 1 :]))


@dataclass(frozen=True)
class KeptRows(Copy):
    """Rows of a tensor of the base, one below the other: those of the tokens that stay, by their `numbers` there."""

    numbers: tuple[int, ...] = ()


def kept_rows(of: Copy, numbers: Sequence[int]) -> KeptRows:
    """Those rows of a tensor; what trains leaves them as they are."""
    found = of.part(0, numbers)
    return KeptRows(found.spans, of.dtype, found.shape, trains=False, numbers=tuple(numbers))


def per_layer(of: Copy, axis: int, count: int, order: Sequence[int]) -> Copy:
    """The parts that `of` holds for each of `count` layers along `axis`: part `n` of the result is part `order[n]`."""
    size = of.shape[axis] // count
    slices = [part * size + nth for part in order for nth in range(size)]
    return replace(of.part(axis, slices), trains=False)


def rows(pieces: Sequence[tuple[Copy, int, int]], shape: tuple[int, ...], *, still: bool) -> Copy:
    """Rows `start:stop` of tensors of the base, one piece below the other, read as a tensor of `shape`.

    `still`: the base computes with them, under another name, so they do not train with what is new. Rows are counted
    along the first of its axes.
    """
    first, start, stop = pieces[0]
    entire = len(pieces) == 1 and (start, stop) == (0, first.shape[0]) and first.shape == shape
    found = stacked([sliced(*piece).pieces for piece in pieces], before=1)
    source = first.source if entire else None
    return Copy(found.spans, first.dtype, shape, source, trains=not still)


def whole(of: Copy) -> Copy:
    """A tensor of the base, all of it, under another name: the base computes with it, so it does not train anew."""
    return rows([(of, 0, of.shape[0])], of.shape, still=True)


def sliced(of: Copy, start: int, stop: int, *, again: bool = False) -> Copy:
    """Slices `start:stop` of a tensor along its first axis, a part of a larger one; `again`: they lie elsewhere too."""
    return sliced_along(of, 0, start, stop, again=again)


def sliced_along(of: Copy, axis: int, start: int, stop: int, *, again: bool = False) -> Copy:
    """Slices `start:stop` of a tensor along any axis, a part of a larger one; `again`: they lie elsewhere too."""
    return replace(of.part(axis, range(start, stop)), trains=True if again else None)


def renamed(of: Copy, source: str) -> Copy:
    """The same of another tensor of the same dtype and shape, whole."""
    return replace(of, spans=Pieces.whole(source, of.nbytes).spans, source=source)
