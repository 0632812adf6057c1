"""Recipes made of one tensor of two layers (fused by optimal transport, averaged, interpolated), and sums of several.

Transport maps are data that several recipes share by name: a map is solved once and freed after its last user.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgeon.blueprint.recipes.alignment import Block, MapRef
from surgeon.blueprint.recipes.copies import Copy
from surgeon.blueprint.recipes.elsewhere import Imported
from surgeon.blueprint.recipes.recipe import Bench, Recipe
from surgeon.common.formatting import listed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _OfTwo(Recipe):
    """A recipe made of one tensor of two layers: `first` of the lower layer, `second` of the upper one."""

    first: Recipe
    second: Recipe

    @property
    def dtype(self) -> str:
        """Return the dtype of the second tensor."""
        return self.second.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of both tensors."""
        return self.second.shape

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Return both tensors."""
        return self.first, self.second


@dataclass(frozen=True)
class Fused(_OfTwo):
    """½ (T_outᵀ · first · T_in + second), for each block of rows (OpT-DeUS, Algorithm 1, lines 6, 8, 9).

    A vector (bias, norm scale) has no input side: ½ (T_outᵀ · first + second). Without blocks it is the plain average.
    """

    blocks: tuple[Block, ...] = ()

    @property
    def how(self) -> str:
        """Describe the recipe: both tensors, and the maps that align their rows and columns."""
        aligned = f", aligned by {listed(self.own_maps)}" if self.own_maps else ""
        return f"the average of {listed(self.sources)}{aligned}"

    @property
    def own_maps(self) -> tuple[str, ...]:
        """Return the names of the maps of its blocks."""
        refs = (ref.coupling for block in self.blocks for ref in (block.t_in, block.t_out))
        return tuple(dict.fromkeys(name for name in refs if name is not None))

    def compute(self, bench: Bench) -> Tensor:
        """Align the lower tensor, add it to the upper one, and halve the sum."""
        upper, lower = bench.working(self.second), bench.working(self.first)
        if not self.blocks:
            return upper.add_(lower).mul_(0.5)
        for block in self.blocks:
            rows = slice(block.start, block.stop)
            if lower.ndim == 2:
                upper[rows] += self._aligned(lower[rows], block, bench)
            else:
                flat = lower[rows].reshape(block.stop - block.start, -1)
                upper[rows] += bench.align_rows(flat, block.t_out).reshape(lower[rows].shape)
        return upper.mul_(0.5)

    @staticmethod
    def _aligned(lower: Tensor, block: Block, bench: Bench) -> Tensor:
        """Return a matrix's rows aligned along both maps.

        For an `own` map the bench already has the rows with aligned columns, so only the rows are aligned here.
        """
        if block.t_out.coupling is None:
            return bench.align_columns(lower, block.t_in)
        if not block.own:
            return bench.align_rows(bench.align_columns(lower, block.t_in), block.t_out)
        solved = bench.map_of(block.t_out)
        with bench.stage("align rows"):
            return solved.align_rows(bench.aligned(block.t_out.coupling))


@dataclass(frozen=True)
class Units(Recipe):
    """One row for each of `units`, with everything that the tensors hold for the unit.

    Rows are divided by √rows, so that their distances are a mean. `parts` are tuples of a tensor, the map of its
    columns, the axis along which units lie, where they begin, and how many numbers of the axis each unit has.
    """

    parts: tuple[tuple[Recipe, MapRef, int, int, int], ...]
    units: int

    @property
    def dtype(self) -> str:
        """Return full precision: the rows are only compared, and are stored in no file."""
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (number of units, how many numbers the tensors hold for each unit)."""
        held = [each * part.numel // part.shape[axis] for part, _, axis, _, each in self.parts]
        return self.units, sum(held)

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Return the tensors of all parts."""
        return tuple(part for part, *_ in self.parts)

    @property
    def own_maps(self) -> tuple[str, ...]:
        """Return the names of the maps of their columns."""
        return tuple(dict.fromkeys(t_in.coupling for _, t_in, *_ in self.parts if t_in.coupling is not None))

    def compute(self, bench: Bench) -> Tensor:
        """Align the tensors, cut them into units and join the results."""
        import torch

        held = []
        for part, t_in, axis, start, each in self.parts:
            value = bench.working(part)
            value = bench.align_columns(value, t_in) if value.ndim == 2 else value
            held.append(value.movedim(axis, 0)[start : start + self.units * each].reshape(self.units, -1))
        rows = sum(each for *_, each in self.parts)
        return torch.cat(held, dim=1).div_(rows**0.5)


def average(first: Recipe, second: Recipe) -> Fused:
    """Return the recipe of ½ (first + second), element by element."""
    return Fused(first, second)


@dataclass(frozen=True)
class Interpolated(_OfTwo):
    """first + α (second - first), element by element, rounded once (Control LLM, Lerp8MSE0*M).

    `first` is of the pretrained branch and `second` of the expanded one. `alpha` is the share of `second`; where it is
    a recipe of one number, that number is the logit of the share.
    """

    alpha: float | Recipe

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Return both tensors, and α where it is a recipe."""
        both = (self.first, self.second)
        return both if isinstance(self.alpha, float) else (*both, self.alpha)

    def compute(self, bench: Bench) -> Tensor:
        """Interpolate as `torch.lerp` does, which is exact where both tensors are equal."""
        import torch

        share = self.alpha if isinstance(self.alpha, float) else float(torch.sigmoid(bench.working(self.alpha)))
        return bench.working(self.first).lerp_(bench.working(self.second), share)


@dataclass(frozen=True)
class Summed(Recipe):
    """Σ factor · term by element, in float32, rounded once: LaCo's θ_l + Σ (θ_{l+k} − θ_l)."""

    terms: tuple[Recipe, ...]
    factors: tuple[float, ...]
    divisor: int = 1

    @property
    def dtype(self) -> str:
        """Return the dtype of the first term."""
        return self.terms[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that the terms share."""
        return self.terms[0].shape

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Return the terms."""
        return self.terms

    def compute(self, bench: Bench) -> Tensor:
        """Add up the terms in order."""
        total = bench.working(self.terms[0]).mul_(self.factors[0])
        for term, factor in zip(self.terms[1:], self.factors[1:], strict=True):
            total.add_(bench.working(term), alpha=factor)
        return total.div_(self.divisor)


def columns(of: Copy | Imported, start: int, stop: int, factor: float) -> Summed:
    """Return the recipe of columns `start:stop` of a matrix, times `factor`."""
    return Summed((of.columns(start, stop),), (factor,))


@dataclass(frozen=True, slots=True)
class Coupling:
    """A transport map that several recipes share, from rows of `first` (after `t_in`) onto rows of `second`.

    The rows are `start:stop`. `settings` are the keyword arguments of `surgeon.transport.TransportSettings`, kept as
    sorted pairs so that this stays plain data. With `groups` the rows are router rows, and the map is a permutation of
    experts, which form so many groups. `cost_first` compares the rows of `first` before `t_in`, which then only moves
    them.
    """

    name: str
    first: Recipe
    second: Recipe
    start: int
    stop: int
    t_in: MapRef
    settings: tuple[tuple[str, Any], ...]
    groups: int | None = None
    cost_first: bool = False

    @property
    def needs(self) -> Iterator[str]:
        """Yield the names of the couplings that are solved before this one."""
        for source in (self.first, self.second):
            yield from source.maps
        if self.t_in.coupling is not None:
            yield self.t_in.coupling
