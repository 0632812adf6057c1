"""A recipe that surgeon does not know: a matrix whose numbers are clipped softly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.blueprint.recipes import Bench, Recipe

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Clipped(Recipe):
    """limit · tanh(of / limit), element by element."""

    of: Recipe
    limit: float

    @property
    def dtype(self) -> str:
        """The dtype of what is clipped."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is clipped."""
        return self.of.shape

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """What is clipped."""
        return (self.of,)

    def compute(self, bench: Bench) -> Tensor:
        """Clip in float32."""
        return bench.working(self.of).div_(self.limit).tanh_().mul_(self.limit)
