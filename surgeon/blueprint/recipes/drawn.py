"""What random numbers make: new tensors, and tensors of which a part changes.

Every draw is seeded from the plan's seed and a key, so it depends neither on the order of tensors nor on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.blueprint.recipes.recipe import Bench, Recipe

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Random(Recipe):
    """Normal with mean zero and standard deviation `std`, drawn by `key`."""

    key: str
    std: float
    dtype: str
    shape: tuple[int, ...]

    @property
    def how(self) -> str:
        """Deviation and key."""
        return f"normal of deviation {self.std}, drawn by {self.key}"

    def compute(self, bench: Bench) -> Tensor:
        """Draw, and scale."""
        return _normal(bench, self.key, self.shape).mul_(self.std)


@dataclass(frozen=True)
class _OfOne(Recipe):
    """What is made of one tensor, of its dtype and shape."""

    of: Recipe

    @property
    def dtype(self) -> str:
        """The dtype of what it is made of."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what it is made of."""
        return self.of.shape

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """What it is made of."""
        return (self.of,)


@dataclass(frozen=True)
class Noised(_OfOne):
    """`of` with normal noise on a `share` of its neurons, of the deviation `std`, or `std` times that of `of`.

    Without `std` these neurons are drawn anew, with the mean and the deviation of what they were (Drop-Upcycling,
    Nakamura et al., 2025, section 3.1). Neurons are rows (`axis` 0) or columns (1); which, `neurons` draws, the same in
    all matrices of an expert, and the values `key`.
    """

    neurons: str
    key: str
    share: float
    axis: int
    std: float | None = None
    relative: bool = False

    def compute(self, bench: Bench) -> Tensor:
        """Draw for the chosen neurons, and put that on them or in their place."""
        import numpy as np
        import torch

        values = bench.working(self.of)
        width = values.shape[self.axis]
        order = bench.draws(self.neurons).permutation(width)[: max(1, int(self.share * width))]
        chosen = torch.from_numpy(np.sort(order)).to(values.device)
        before = values.index_select(self.axis, chosen)
        drawn = _normal(bench, self.key, tuple(before.shape))
        if self.std is None:
            numbers = before.double()
            drawn.mul_(float(numbers.std())).add_(float(numbers.mean()))
            return values.index_copy_(self.axis, chosen, drawn.to(values))
        drawn.mul_(self.std * (float(values.double().std()) if self.relative else 1.0))
        return values.index_add_(self.axis, chosen, drawn.to(values))


@dataclass(frozen=True)
class Shuffled(_OfOne):
    """The elements of `of` in a random order, drawn by `key` (OpT-DeUS, Table 7)."""

    key: str

    def compute(self, bench: Bench) -> Tensor:
        """Shuffle a copy in the element's own width: the order of bits, not of values, is what is shuffled."""
        import numpy as np
        import torch

        flat = bench.compute(self.of).to("cpu").contiguous().flatten().clone()
        width = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[flat.element_size()]
        bench.draws(self.key).shuffle(flat.view(torch.uint8).numpy().view(width))
        return flat.view(self.shape)


def _normal(bench: Bench, key: str, shape: tuple[int, ...]) -> Tensor:
    import numpy as np
    import torch

    return torch.from_numpy(bench.draws(key).standard_normal(shape, dtype=np.float32))
