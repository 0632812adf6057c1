"""The bytes of tensors whose values a recipe names, without numpy or torch."""

from __future__ import annotations

import struct

from surgeon.blueprint.recipes import Constant, Listed, numel
from surgeon.checkpoint.header import DTYPE_BITS, FLOAT_DTYPES


def constant_bytes(recipe: Constant | Listed) -> bytes:
    """A tensor whose values the recipe names, as little-endian bytes."""
    if isinstance(recipe, Listed):
        return b"".join(_element(value, recipe.dtype) for value in recipe.values)
    if recipe.dtype not in FLOAT_DTYPES:
        assert recipe.value == 0, recipe
        return bytes(numel(recipe) * DTYPE_BITS[recipe.dtype] // 8)
    return _element(recipe.value, recipe.dtype) * numel(recipe)


def _element(value: float, dtype: str) -> bytes:
    code = FLOAT_DTYPES[dtype].packed
    if code is not None:
        return struct.pack(code, value)
    # Round to nearest, ties to even, as torch does: add half of what is cut off, less one where the rest is even.
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
