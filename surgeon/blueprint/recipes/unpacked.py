"""Matrices in the formats of compressed-tensors as plain numbers, as that library unpacks them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.blueprint.recipes.copies import Copy
from surgeon.blueprint.recipes.recipe import Bench, Recipe
from surgeon.common.library import LOAD_FAILURES, first_line
from surgeon.families.compressed import Code

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Unpacked(Recipe):
    """(q − z) · s: `weight` holds q as `code` says, `zeros` z (none: 0) and `scales` s; `sizes` must say the shape.

    Products are rounded to the dtype of the scales, and then to `dtype`.
    """

    weight: Copy
    scales: Copy
    zeros: Copy | None
    sizes: Copy | None
    code: Code
    dtype: str
    shape: tuple[int, int]

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """All of it, as it is stored."""
        return tuple(each for each in (self.weight, self.scales, self.zeros, self.sizes) if each is not None)

    def compute(self, bench: Bench) -> Tensor:
        """Have the library unpack it. Raises ValueError for sizes that are not the matrix's, and where it fails."""
        if self.sizes is not None and (told := bench.read(self.sizes).tolist()) != [*self.shape]:
            rows, columns = self.shape
            raise ValueError(
                f"stored as {rows} rows of {columns}, yet its weight_shape says {told}; get the model again"
            )
        code = self.code
        grid = code.grid(self.shape)
        stored = {"weight_packed" if code.packed else "weight": bench.read(self.weight)}
        stored["weight_scale"] = bench.read(self.scales).reshape(grid)
        if self.zeros is not None:
            zeros = bench.read(self.zeros)
            stored["weight_zero_point"] = zeros if code.zeros_packed else zeros.reshape(grid)
        if self.sizes is not None:
            stored["weight_shape"] = bench.read(self.sizes)
        try:
            compressors = importlib.import_module("compressed_tensors.compressors")
            quantization = importlib.import_module("compressed_tensors.quantization")
            weights = quantization.QuantizationArgs(
                num_bits=code.bits,
                type="float" if code.floating else "int",
                symmetric=code.symmetric,
                strategy=code.strategy,
                group_size=code.block[1] if code.strategy == "group" else None,
                block_structure=[*code.block] if code.strategy == "block" else None,
            )
            scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
            kind = compressors.BaseCompressor.get_value_from_registry(
                "pack-quantized" if code.packed else "naive-quantized"
            )
            made: Tensor = kind.decompress(stored, scheme)["weight"]
        except LOAD_FAILURES as error:
            raise ValueError(f"compressed-tensors does not unpack it ({first_line(error)}); update it") from error
        return made.to(bench.dtype(self.dtype))
