"""One expert out of many: its share of a tensor that holds all experts, and the expert that matches a router's row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.blueprint.recipes.alignment import MapRef
from surgeon.blueprint.recipes.copies import Copy
from surgeon.blueprint.recipes.drawn import Constant
from surgeon.blueprint.recipes.fused import Fused
from surgeon.blueprint.recipes.joined import ExpertLayout, Joined
from surgeon.blueprint.recipes.recipe import Bench, Recipe

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OneExpert(Recipe):
    """Expert `number`'s share of a tensor that stores all experts in `layout`; matrices come outputs × inputs."""

    of: Recipe
    number: int
    layout: ExpertLayout

    @property
    def dtype(self) -> str:
        """Return the dtype of the whole tensor."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the expert's share, as it is used."""
        return self.layout.used_shape(self.of.shape[1:])

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Return the tensor of all experts."""
        return (self.of,)

    @property
    def reads(self) -> tuple[str, ...]:
        """Return nothing for a tensor of the base, as only the expert's bytes are read; else what `of` reads."""
        return self.of.reads if self.of.inputs else ()

    def compute(self, bench: Bench) -> Tensor:
        """Take the share and convert it from the stored layout to the used one."""
        return self.layout.used(self.of.nth(self.number, bench))


@dataclass(frozen=True)
class Matched(Recipe):
    """One tensor out of `experts`: the tensor of the expert that the coupling `by` matches with expert `number`.

    Only the weights decide which expert that is. Where inputs are listed, the expert of the same number is given
    instead, so that the inputs of a whole layer are complete.
    """

    experts: tuple[Recipe, ...]
    number: int
    by: str

    @property
    def dtype(self) -> str:
        """Return the dtype that the tensors share."""
        return self.experts[self.number].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that the tensors share."""
        return self.experts[self.number].shape

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Return the tensor of the expert of the same number."""
        return (self.experts[self.number],)

    @property
    def own_maps(self) -> tuple[str, ...]:
        """Return the coupling that matches experts."""
        return (self.by,)

    def compute(self, bench: Bench) -> Tensor:
        """Return the matched expert's tensor."""
        from surgeon.transport.maps import AssignmentMap

        matching = bench.map_of(MapRef(self.by))
        assert isinstance(matching, AssignmentMap), self.by
        return bench.compute(self.experts[matching.source_of(self.number)])


@dataclass(frozen=True)
class Below(Recipe):
    """A tensor of `shape` whose elements lie below the minimum of `of`: by 2, or 1/64 of its size if that is more."""

    of: Copy
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """Return the dtype of `of`."""
        return self.of.dtype

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Return the tensor `of`."""
        return (self.of,)

    def compute(self, bench: Bench) -> Tensor:
        """Return the minimum less the distance, in every element."""
        least = bench.working(self.of).min()
        return least.new_full(self.shape, float(below(least)))


def below(least: Tensor) -> Tensor:
    """Return a number so far below `least` that scores between 0 and 1 cannot bridge the gap, in bfloat16 too."""
    return least - (least.abs() / 64).clamp_min(2.0)


def one_expert(of: Recipe, number: int, layout: ExpertLayout) -> Recipe:
    """Return expert `number`'s share of a tensor of all experts, as the simplest recipe that makes it."""
    match of:
        case Joined(experts, layout=stored) if stored == layout:
            return experts[number]
        case Fused(first, second, ()):
            return Fused(one_expert(first, number, layout), one_expert(second, number, layout))
        case Constant(value, dtype):
            return Constant(value, dtype, OneExpert(of, number, layout).shape)
        case _:
            return OneExpert(of, number, layout)
