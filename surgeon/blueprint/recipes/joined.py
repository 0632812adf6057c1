"""Tensors joined from other tensors: wider matrices, and all experts in one tensor, in the layout it is stored in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from surgeon.blueprint.recipes.copies import Copy
from surgeon.blueprint.recipes.recipe import Bench, Recipe
from surgeon.checkpoint.pieces import Pieces, stacked
from surgeon.checkpoint.pieces import side_by_side as lying_side_by_side
from surgeon.common.formatting import listed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ExpertLayout:
    """How a matrix is stored; it is used as outputs × inputs, with the gate's rows above the up projection's.

    `transposed`: it is stored inputs × outputs; `interleaved`: rows of gate and up alternate in storage.
    """

    transposed: bool
    interleaved: bool

    @property
    def plain(self) -> bool:
        """Return whether a matrix is stored as it is used."""
        return not (self.transposed or self.interleaved)

    def used(self, stored: Tensor) -> Tensor:
        """Return a stored matrix as it is used: outputs × inputs, the gate's rows first."""
        import torch

        own = stored.T.contiguous() if self.transposed else stored
        return torch.cat([own[::2], own[1::2]]) if self.interleaved else own

    def stored(self, used: Tensor) -> Tensor:
        """Return a used matrix (outputs × inputs, the gate's rows first) as it is stored."""
        import torch

        own = torch.stack(used.chunk(2), dim=1).flatten(0, 1) if self.interleaved else used
        return own.T if self.transposed else own

    def used_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the used shape of a stored matrix."""
        return stored[::-1] if self.transposed else stored

    def stored_shape(self, used: tuple[int, ...]) -> tuple[int, ...]:
        """Return the stored shape of a used matrix."""
        return used[::-1] if self.transposed else used


@dataclass(frozen=True)
class Joined(Recipe):
    """Parts side by side along `axis`, read as a tensor of `shape`; each part is stored in `layout`, if it is given."""

    parts: tuple[Recipe, ...]
    axis: int
    shape: tuple[int, ...]
    layout: ExpertLayout | None = None

    @cached_property
    def dtype(self) -> str:
        """Return the dtype of the first part."""
        return self.parts[0].dtype

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Return the parts."""
        return self.parts

    @property
    def how(self) -> str:
        """Describe the parts; equal descriptions are given once."""
        return f"{listed(dict.fromkeys(part.how for part in self.parts))}, side by side"

    def compute(self, bench: Bench) -> Tensor:
        """Compute the parts into the whole, one after another; free each map after the only part that needs it."""
        import torch

        whole = torch.empty(self.shape, dtype=bench.dtype(self.dtype))
        runs = whole.view(self._before, -1)
        at = 0
        for part in self._in_turn(bench):
            made = bench.compute(part).to("cpu")
            made = (made if self.layout is None else self.layout.stored(made)).reshape(self._before, -1)
            runs[:, at : at + made.shape[1]] = made
            at += made.shape[1]
        return whole

    def compute_in_pieces(self, bench: Bench) -> Iterator[memoryview | Tensor]:
        """Yield the whole tensor's bytes in order, part by part where the parts lie one after another.

        Then only as much of a part is in memory as its recipe makes at once. Otherwise the whole tensor is yielded at
        once.
        """
        if self.layout is not None and self._before == 1:
            for part in self._in_turn(bench):
                yield self.layout.stored(bench.compute(part))
            return
        if not self._streams:
            yield bench.compute(self)
            return
        for part in self._in_turn(bench):
            yield from part.compute_in_pieces(bench)

    def _in_turn(self, bench: Bench) -> Iterator[Recipe]:
        """Yield the parts; after each part, free the maps that no other part needs."""
        users = Counter(name for part in self.parts for name in part.maps)
        for part in self.parts:
            yield part
            bench.forget([name for name in part.maps if len(self.parts) > 1 and users[name] == 1])

    @cached_property
    def _streams(self) -> bool:
        """Return whether its bytes are the bytes of the parts, one part after another."""
        return self._before == 1 and self.layout is None and all(part.dtype == self.dtype for part in self.parts)

    @property
    def reads(self) -> tuple[str, ...]:
        """Return what the parts read, without the whole tensors whose rows are read a few at a time."""
        return tuple(name for part in self.parts if part.inputs or not self._streams for name in part.reads)

    @property
    def pieces(self) -> Pieces:
        """Return the parts' pieces; none where the layout rearranges the parts."""
        return self._stacked([part.pieces for part in self.parts])

    @property
    def own(self) -> Pieces:
        """Return the parts' own pieces, without parts that are stored elsewhere too."""
        again = (isinstance(part, Copy) and part.trains for part in self.parts)
        return self._stacked(
            [Pieces(part.nbytes, ()) if twice else part.own for part, twice in zip(self.parts, again, strict=True)]
        )

    def _stacked(self, parts: Sequence[Pieces]) -> Pieces:
        """Return the parts' pieces, each at its place in the whole; none where the layout rearranges the parts."""
        return stacked(parts, before=self._before) if self._as_they_are else Pieces(self.nbytes, ())

    @property
    def _as_they_are(self) -> bool:
        """Return whether the parts are stored as they are used."""
        return self.layout is None or self.layout.plain

    @property
    def named_values(self) -> Iterator[tuple[str, Pieces]]:
        """Yield (digest, pieces) of the parts' named values, at their places in the whole.

        Yields nothing where a layout rearranges the parts.
        """
        if not self._as_they_are:
            return
        sizes = [part.nbytes // self._before for part in self.parts]
        for place in lying_side_by_side(sizes, before=self._before):
            part = self.parts[int(place.tensor)]
            for sha256, inner in part.named_values:
                yield sha256, inner.through({"": Pieces(part.nbytes, (place.turned(""),))})

    @property
    def working_set(self) -> int:
        """Return the bytes needed; with a layout, one expert's working set and the whole result."""
        return super().working_set if self.layout is None else self.parts[0].working_set + 4 * self.numel

    @property
    def _before(self) -> int:
        """Return the number of runs into which each part's bytes are divided: the product of the axes before `axis`."""
        return math.prod(self.parts[0].shape[: self.axis])


def side_by_side(parts: Sequence[Recipe], axis: int) -> Joined:
    """Return tensors side by side along `axis`: a matrix with more rows, or more columns."""
    first = parts[0].shape
    width = sum(part.shape[axis] for part in parts)
    return Joined(tuple(parts), axis, (*first[:axis], width, *first[axis + 1 :]))


def piled(parts: Sequence[Recipe], shape: tuple[int, ...]) -> Joined:
    """Return matrices one below another, read as a tensor of `shape`."""
    return Joined(tuple(parts), 0, shape)


def repeated(of: Recipe, times: int) -> Joined:
    """Return a matrix with each row repeated `times` in place: copies side by side, read as rows again."""
    rows, columns = of.shape
    return Joined((of,) * times, 1, (rows * times, columns))


def stacked_experts(experts: Sequence[Recipe], layout: ExpertLayout) -> Joined:
    """Return one tensor, in stored layout, of the matrices or biases of all experts, which are given in used layout."""
    shape = (len(experts), *layout.stored_shape(experts[0].shape))
    return Joined(tuple(experts), 0, shape, layout)
