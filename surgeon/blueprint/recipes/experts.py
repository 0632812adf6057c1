"""One expert out of many: its share of a tensor that holds all of them, and the one that a router's row matches."""

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
    """Expert `number`'s share of a tensor that holds all of them as `layout` says, a matrix as it is used."""

    of: Recipe
    number: int
    layout: ExpertLayout

    @property
    def dtype(self) -> str:
        """The dtype of the whole."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the expert's share, as it is used."""
        return self.layout.used_shape(self.of.shape[1:])

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """The tensor of all experts."""
        return (self.of,)

    @property
    def reads(self) -> tuple[str, ...]:
        """Nothing whole where that is a tensor of the base: of it the expert's bytes alone are read."""
        return self.of.reads if self.of.inputs else ()

    def compute(self, bench: Bench) -> Tensor:
        """Take the share, and turn it as it is used."""
        return self.layout.used(self.of.nth(self.number, bench))


@dataclass(frozen=True)
class Matched(Recipe):
    """Of `experts`, one tensor of each, that of the expert which the coupling `by` matches with expert `number`.

    Which one that is, only the weights say: the expert of the same number stands for it where inputs are listed, so
    that those of a whole layer are complete.
    """

    experts: tuple[Recipe, ...]
    number: int
    by: str

    @property
    def dtype(self) -> str:
        """The dtype that the tensors share."""
        return self.experts[self.number].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensors share."""
        return self.experts[self.number].shape

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """The expert of the same number."""
        return (self.experts[self.number],)

    @property
    def own_maps(self) -> tuple[str, ...]:
        """The coupling that matches experts."""
        return (self.by,)

    def compute(self, bench: Bench) -> Tensor:
        """The partner's tensor."""
        from surgeon.transport.maps import AssignmentMap

        matching = bench.map_of(MapRef(self.by))
        assert isinstance(matching, AssignmentMap), self.by
        return bench.compute(self.experts[matching.source_of(self.number)])


@dataclass(frozen=True)
class Below(Recipe):
    """Numbers of `shape` that are 2 less than the least of `of`, or by a 64th of its size where that is more."""

    of: Copy
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """The dtype of the numbers that these are below."""
        return self.of.dtype

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """The tensor that they are below."""
        return (self.of,)

    def compute(self, bench: Bench) -> Tensor:
        """The least, less the distance."""
        least = bench.working(self.of).min()
        return least.new_full(self.shape, float(below(least)))


def below(least: Tensor) -> Tensor:
    """A number that is below all whose scores are between 0 and 1 more than `least`, and stays so in bfloat16."""
    return least - (least.abs() / 64).clamp_min(2.0)


def one_expert(of: Recipe, number: int, layout: ExpertLayout) -> Recipe:
    """Expert `number`'s share of a tensor of all experts, the simplest recipe that makes it."""
    match of:
        case Joined(experts, layout=stored) if stored == layout:
            return experts[number]
        case Fused(first, second, ()):
            return Fused(one_expert(first, number, layout), one_expert(second, number, layout))
        case Constant(value, dtype):
            return Constant(value, dtype, OneExpert(of, number, layout).shape)
        case _:
            return OneExpert(of, number, layout)
