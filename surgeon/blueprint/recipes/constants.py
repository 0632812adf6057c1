"""Tensors whose values the recipe names."""

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
    """One `value` for every element (0, or what makes a norm's effective scale zero or one), or a short list."""

    computed: ClassVar[bool] = False

    value: float | tuple[float, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def how(self) -> str:
        """The value, or all of them."""
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        return f"constant {listed(map(str, values))}"

    def compute(self, bench: Bench) -> Tensor:
        """Fill a tensor."""
        import torch

        values = self.value if isinstance(self.value, tuple) else (self.value,)
        return torch.tensor(values, dtype=bench.dtype(self.dtype)).expand(self.numel).reshape(self.shape)

    @cached_property
    def is_hole(self) -> bool:
        """Whether the one value is zero."""
        return self.value == 0

    @property
    def named_values(self) -> tuple[tuple[str, Pieces]]:
        """All of it."""
        return ((self.sha256, Pieces.whole("", self.nbytes)),)

    @property
    def data(self) -> bytes:
        """The tensor as little-endian bytes, without numpy or torch."""
        if isinstance(self.value, tuple):
            return b"".join(_element(value, self.dtype) for value in self.value)
        if self.dtype not in FLOAT_DTYPES:
            assert self.value == 0, self
            return bytes(self.nbytes)
        return _element(self.value, self.dtype) * self.numel

    @property
    def sha256(self) -> str:
        """The digest of `data`."""
        return zeros_sha256(self.nbytes) if self.is_hole else hashlib.sha256(self.data).hexdigest()


def _element(value: float, dtype: str) -> bytes:
    code = FLOAT_DTYPES[dtype].packed
    if code is not None:
        return struct.pack(code, value)
    # Round to nearest, ties to even, as torch does: add half of what is cut off, less one where the rest is even.
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
