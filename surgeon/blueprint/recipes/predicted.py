"""Matrices that a small network predicts from their neighbours (LESA)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from surgeon.blueprint.recipes.recipe import Bench, Recipe

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Predicted(Recipe):
    """The matrix that a network predicts between matrices `below` and `below + 1` of `stack`, one per layer (LESA).

    `settings` are those of `surgeon.writing.prediction.PredictionSettings`, as sorted pairs; draws are seeded from (the
    plan's seed, `key`). Recipes with the same stack, key and settings share the network, whose fit is recorded as
    `fit`. A network that explains no variance is refused unless `keep_poor`.
    """

    stack: tuple[Recipe, ...]
    below: int
    key: str
    settings: tuple[tuple[str, Any], ...]
    fit: str
    keep_poor: bool

    @property
    def own_fit(self) -> str:
        """Return the name under which its network's fit is recorded."""
        return self.fit

    @property
    def dtype(self) -> str:
        """Return the dtype of the upper neighbour."""
        return self.stack[self.below + 1].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that the matrices share."""
        return self.stack[self.below + 1].shape

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Return the matrices of all layers, from which the network learns."""
        return self.stack

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the two neighbours; where the network must be learnt, it reads the stack itself, layer by layer."""
        return tuple(name for each in self.neighbours for name in each.reads)

    @property
    def neighbours(self) -> tuple[Recipe, ...]:
        """Return the matrices below and above."""
        return self.stack[self.below : self.below + 2]

    @cached_property
    def network(self) -> tuple[object, ...]:
        """Return the key that is equal for recipes which share a network."""
        return self.stack, self.key, self.settings

    @property
    def network_memory(self) -> int:
        """Return the bytes of U and the network, which are kept from one new layer to the next."""
        hidden = int(dict(self.settings)["hidden"])
        return 4 * self.shape[0] ** 2 + 12 * hidden * self.shape[1]

    @property
    def working_set(self) -> int:
        """Return the bytes of Σ W Wᵀ, its vectors and eigh's copy in float64, and of each layer's V (training data)."""
        return 3 * 8 * self.shape[0] ** 2 + 4 * (len(self.stack) + 4) * self.numel

    def compute(self, bench: Bench) -> Tensor:
        """Predict the matrix from its neighbours."""
        network = bench.predictor(self.stack, self.key, self.settings, fit=self.fit, keep_poor=self.keep_poor)
        lower, upper = (bench.working(side).float() for side in self.neighbours)
        return network.between(lower, upper)
