"""Tensors of constants and of random numbers: new tensors, and tensors of which a part is drawn again.

Every draw is seeded from the plan's seed and a key, so it depends neither on the order of tensors nor on the device.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from surgeon.blueprint.recipes.recipe import Bench, Recipe
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.checkpoint.pieces import Pieces
from surgeon.checkpoint.ranges import zeros_sha256
from surgeon.common.formatting import listed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Constant(Recipe):
    """A tensor filled with one `value` (0, or what makes a norm's effective scale zero or one), or with a short tuple.

    A tuple has a value for each element, or one value for all.
    """

    computed: ClassVar[bool] = False

    value: float | tuple[float, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def how(self) -> str:
        """Describe the recipe: the value, or all the values."""
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        return f"constant {listed(map(str, values))}"

    def compute(self, bench: Bench) -> Tensor:
        """Return a tensor filled with the value or values."""
        import torch

        values = self.value if isinstance(self.value, tuple) else (self.value,)
        return torch.tensor(values, dtype=bench.dtype(self.dtype)).expand(self.numel).reshape(self.shape)

    @cached_property
    def is_hole(self) -> bool:
        """Return whether every element is zero, given as a single value: such a tensor needs no bytes on disk."""
        return self.value == 0

    @property
    def named_values(self) -> tuple[tuple[str, Pieces]]:
        """Return one (digest, pieces) pair, for the whole tensor."""
        return ((self.sha256, Pieces.whole("", self.nbytes)),)

    @property
    def data(self) -> bytes:
        """Return the tensor as little-endian bytes, computed without numpy or torch."""
        if isinstance(self.value, tuple):
            return b"".join(_element(value, self.dtype) for value in self.value)
        if self.dtype not in FLOAT_DTYPES:
            assert self.value == 0, self
            return bytes(self.nbytes)
        return _element(self.value, self.dtype) * self.numel

    @property
    def sha256(self) -> str:
        """Return the digest of `data`."""
        return zeros_sha256(self.nbytes) if self.is_hole else hashlib.sha256(self.data).hexdigest()


def _element(value: float, dtype: str) -> bytes:
    """Return one number as little-endian bytes of a float dtype."""
    code = FLOAT_DTYPES[dtype].packed
    if code is not None:
        return struct.pack(code, value)
    # Round to nearest, ties to even, as torch does: before cutting, add half of the last kept place where the kept part
    # is odd, and just under half where it is even.
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


@dataclass(frozen=True)
class Random(Recipe):
    """Normal numbers with mean zero and standard deviation `std`; `key` seeds the draw."""

    key: str
    std: float
    dtype: str
    shape: tuple[int, ...]

    @property
    def how(self) -> str:
        """Describe the recipe: the standard deviation and the key."""
        return f"normal of deviation {self.std}, drawn by {self.key}"

    def compute(self, bench: Bench) -> Tensor:
        """Draw the numbers and scale them."""
        return _normal(bench, self.key, self.shape).mul_(self.std)


@dataclass(frozen=True)
class _OfOne(Recipe):
    """A recipe made of one tensor, with the same dtype and shape."""

    of: Recipe

    @property
    def dtype(self) -> str:
        """Return the dtype of the tensor `of`."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor `of`."""
        return self.of.shape

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Return the tensor `of`."""
        return (self.of,)


@dataclass(frozen=True)
class Noised(_OfOne):
    """`of` with normal noise of deviation `std` on a `share` of its neurons.

    Without `std` these neurons are drawn again, with the mean and deviation of their old values (Drop-Upcycling,
    Nakamura et al., 2025, section 3.1). Neurons are rows (`axis` 0) or columns (1). `neurons` seeds the choice of
    neurons, which is the same in all matrices of an expert; `key` seeds the values.
    """

    neurons: str
    key: str
    share: float
    axis: int
    std: float | None = None

    def compute(self, bench: Bench) -> Tensor:
        """Choose the neurons, draw numbers for them, and add these to their values or replace the values."""
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
        drawn.mul_(self.std)
        return values.index_add_(self.axis, chosen, drawn.to(values))


@dataclass(frozen=True)
class Shuffled(_OfOne):
    """The elements of `of` in a random order; `key` seeds the order (OpT-DeUS, Table 7)."""

    key: str

    def compute(self, bench: Bench) -> Tensor:
        """Return a shuffled copy; elements are shuffled as unsigned integers, so every dtype works."""
        import numpy as np
        import torch

        flat = bench.compute(self.of).to("cpu").contiguous().flatten().clone()
        width = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[flat.element_size()]
        bench.draws(self.key).shuffle(flat.view(torch.uint8).numpy().view(width))
        return flat.view(self.shape)


def _normal(bench: Bench, key: str, shape: tuple[int, ...]) -> Tensor:
    """Draw standard normal numbers in float32, seeded by `key`."""
    import numpy as np
    import torch

    return torch.from_numpy(bench.draws(key).standard_normal(shape, dtype=np.float32))
