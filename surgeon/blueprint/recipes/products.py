"""A matrix with low-rank products that the base itself adds to it: W + Σ B A."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from surgeon.blueprint.recipes.copies import Copy, rows
from surgeon.blueprint.recipes.recipe import Bench, Recipe, Words

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PlusProducts(Recipe):
    """`of` + Σ B A over the `pairs` (A, B), in float32, rounded once; rows by columns, r by columns, rows by r."""

    of: Copy
    pairs: tuple[tuple[Copy, Copy], ...]

    @property
    def dtype(self) -> str:
        """That of the matrix."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return self.of.shape

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """The matrix, and both of each pair."""
        return (self.of, *(each for pair in self.pairs for each in pair))

    def own_words(self) -> Words:
        """The matrix, and the pairs."""
        return (("sum", self.of), ("products", self.pairs))

    def compute(self, bench: Bench) -> Tensor:
        """Add one product after the other."""
        made = bench.working(self.of)
        for down, up in self.pairs:
            made.addmm_(bench.working(up).to(made.dtype), bench.working(down).to(made.dtype))
        return made

    def part(self, start: int, stop: int) -> PlusProducts:
        """Some of its rows."""
        pairs = tuple((down, _rows(up, start, stop)) for down, up in self.pairs)
        return replace(self, of=_rows(self.of, start, stop), pairs=pairs)


def _rows(of: Copy, start: int, stop: int) -> Copy:
    return rows([(of, start, stop)], (stop - start, *of.shape[1:]), still=False)
