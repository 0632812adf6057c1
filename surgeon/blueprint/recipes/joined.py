"""Tensors that are made of others, part after part: wider matrices, and experts in one tensor, as it stores each."""

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
    """Between a matrix as it is used, outputs by inputs with gate above up, and as it is stored.

    `transposed`: stored are inputs by outputs; `interleaved`: rows of gate and up alternate there.
    """

    transposed: bool
    interleaved: bool

    @property
    def plain(self) -> bool:
        """Whether a matrix is stored as it is used."""
        return not (self.transposed or self.interleaved)

    def used(self, stored: Tensor) -> Tensor:
        """The matrix as it is used."""
        import torch

        own = stored.T.contiguous() if self.transposed else stored
        return torch.cat([own[::2], own[1::2]]) if self.interleaved else own

    def stored(self, used: Tensor) -> Tensor:
        """The matrix as it is stored."""
        import torch

        own = torch.stack(used.chunk(2), dim=1).flatten(0, 1) if self.interleaved else used
        return own.T if self.transposed else own

    def used_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is used."""
        return stored[::-1] if self.transposed else stored

    def stored_shape(self, used: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is stored."""
        return used[::-1] if self.transposed else used


@dataclass(frozen=True)
class Joined(Recipe):
    """Parts side by side along `axis`, read as a tensor of `shape`; each is laid as `layout` says, if it is given."""

    parts: tuple[Recipe, ...]
    axis: int
    shape: tuple[int, ...]
    layout: ExpertLayout | None = None

    @cached_property
    def dtype(self) -> str:
        """The dtype of the first part."""
        return self.parts[0].dtype

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """The parts."""
        return self.parts

    @property
    def how(self) -> str:
        """The parts, alike ones once."""
        return f"{listed(dict.fromkeys(part.how for part in self.parts))}, side by side"

    def compute(self, bench: Bench) -> Tensor:
        """Lay the parts into the whole, one after the other; maps that one alone needs are freed after it."""
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
        """The parts one after the other, where they lie so, and no more of one in memory than it makes at once."""
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
        """The parts; maps that one alone needs are freed after it."""
        users = Counter(name for part in self.parts for name in part.maps)
        for part in self.parts:
            yield part
            bench.forget([name for name in part.maps if len(self.parts) > 1 and users[name] == 1])

    @cached_property
    def _streams(self) -> bool:
        """Whether its bytes are those of the parts, one part after the other."""
        return self._before == 1 and self.layout is None and all(part.dtype == self.dtype for part in self.parts)

    @property
    def reads(self) -> tuple[str, ...]:
        """Those of the parts, but for whole tensors of which rows are read a few at a time."""
        return tuple(name for part in self.parts if part.inputs or not self._streams for name in part.reads)

    @property
    def pieces(self) -> Pieces:
        """Those of the parts, unless these are turned as they are laid."""
        return self._stacked([part.pieces for part in self.parts])

    @property
    def own(self) -> Pieces:
        """Those of the parts, but for what lies elsewhere too."""
        again = (isinstance(part, Copy) and part.trains for part in self.parts)
        return self._stacked(
            [Pieces(part.nbytes, ()) if twice else part.own for part, twice in zip(self.parts, again, strict=True)]
        )

    def _stacked(self, parts: Sequence[Pieces]) -> Pieces:
        return stacked(parts, before=self._before) if self._as_they_are else Pieces(self.nbytes, ())

    @property
    def _as_they_are(self) -> bool:
        """Whether the parts are laid as they are used."""
        return self.layout is None or self.layout.plain

    @property
    def named_values(self) -> Iterator[tuple[str, Pieces]]:
        """Those of the parts, where they lie in the whole."""
        if not self._as_they_are:
            return
        sizes = [part.nbytes // self._before for part in self.parts]
        for place in lying_side_by_side(sizes, before=self._before):
            part = self.parts[int(place.tensor)]
            for sha256, inner in part.named_values:
                yield sha256, inner.through({"": Pieces(part.nbytes, (place.turned(""),))})

    @property
    def working_set(self) -> int:
        """As of others; of experts only one is at work, beside the whole result."""
        return super().working_set if self.layout is None else self.parts[0].working_set + 4 * self.numel

    @property
    def _before(self) -> int:
        """How many runs of each part there are."""
        return math.prod(self.parts[0].shape[: self.axis])


def side_by_side(parts: Sequence[Recipe], axis: int) -> Joined:
    """Tensors side by side along `axis`: a matrix with more rows, or more columns."""
    first = parts[0].shape
    width = sum(part.shape[axis] for part in parts)
    return Joined(tuple(parts), axis, (*first[:axis], width, *first[axis + 1 :]))


def piled(parts: Sequence[Recipe], shape: tuple[int, ...]) -> Joined:
    """Matrices one below the other, read as a tensor of `shape`."""
    return Joined(tuple(parts), 0, shape)


def repeated(of: Recipe, times: int) -> Joined:
    """Each row of a matrix so many `times`, one below the other: side by side, and read as rows again."""
    rows, columns = of.shape
    return Joined((of,) * times, 1, (rows * times, columns))


def stacked_experts(experts: Sequence[Recipe], layout: ExpertLayout) -> Joined:
    """The matrices or biases of all experts, as used, in one tensor, as stored."""
    shape = (len(experts), *layout.stored_shape(experts[0].shape))
    return Joined(tuple(experts), 0, shape, layout)
