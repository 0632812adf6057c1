"""Recipes from other sources than the base's full-precision weights: adapters, models, prompts, quantised tensors.

Matrices in the formats of compressed-tensors become plain numbers as that library unpacks them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from surgeon.anatomy.compressed import Code
from surgeon.blueprint.recipes.copies import Copy
from surgeon.blueprint.recipes.recipe import Bench, Place, Recipe
from surgeon.common.library import LOAD_FAILURES, first_line

if TYPE_CHECKING:
    from torch import Tensor


# For MXFP4 tensors: the sixteen values of a four-bit code, and the stored number that means an exponent of zero.
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXPONENT_BIAS = 127


@dataclass(frozen=True)
class Imported(Recipe):
    """The tensor `tensor` of an adapter or another model, called `name` in the plan, rounded to nearest in `dtype`.

    `rows` is None for all rows, or (first, stop); `kept_columns` likewise for columns.
    """

    place: Place
    name: str
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    kept_columns: tuple[int, int] | None = None

    @property
    def how(self) -> str:
        """Describe the recipe: the tensor, and the adapter or model it comes from."""
        return f"{self.tensor} of the {self.place} {self.name}"

    def compute(self, bench: Bench) -> Tensor:
        """Read the tensor and cut out the rows and columns."""
        found = bench.imported(self.place, self.name, self.tensor)
        found = found if self.rows is None else found[slice(*self.rows)]
        return found if self.kept_columns is None else found[:, slice(*self.kept_columns)]

    def columns(self, start: int, stop: int) -> Imported:
        """Return the recipe of some columns of a matrix."""
        return replace(self, shape=(self.shape[0], stop - start), kept_columns=(start, stop))


@dataclass(frozen=True)
class Prompted(Recipe):
    """One row for each list in `prompts`: the mean input of layer `layer`'s MLP over them, scaled to length `norm`.

    Where `against` is given, the mean input over its list of the same number is subtracted before the scaling.
    """

    prompts: tuple[tuple[str, ...], ...]
    layer: int
    norm: float
    dtype: str
    shape: tuple[int, ...]
    against: tuple[tuple[str, ...], ...] = ()

    def compute(self, bench: Bench) -> Tensor:
        """Return the mean inputs of this layer's MLP, a row for each list of prompts, times `norm`."""
        return bench.prompted(self.prompts, self.against)[self.layer].mul(self.norm)


@dataclass(frozen=True)
class Dequantised(Recipe):
    """The numbers that a quantised tensor stands for: `weight` times its `scales`, rounded once to `dtype`.

    `block` is (rows, columns) of FP8 numbers that share a scale. None: MXFP4, 32 numbers to an exponent, whose matrices
    are stored transposed.
    """

    weight: Copy
    scales: Copy
    block: tuple[int, int] | None
    dtype: str
    shape: tuple[int, ...]

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Return weight and scales, as they are stored."""
        return self.weight, self.scales

    def compute(self, bench: Bench) -> Tensor:
        """Multiply in float32, which holds the product of a quantised number and its scale exactly or nearly so."""
        import torch

        weight, scales = (bench.read(each) for each in (self.weight, self.scales))
        if self.block is None:
            made = torch.empty(self.shape)
            # One expert at a time: the codes take several times the memory of the numbers.
            experts = [t.reshape(-1, *t.shape[t.ndim - of :]) for t, of in ((weight, 3), (scales, 2), (made, 2))]
            for one, exponents, into in zip(*experts, strict=True):
                codes = torch.stack([one & 15, one >> 4], dim=-1).flatten(-2).int()
                numbers = torch.tensor(_FOUR_BITS)[codes]
                numbers = torch.ldexp(numbers, (exponents.int() - _EXPONENT_BIAS)[..., None])
                into.copy_(numbers.flatten(-2).transpose(-1, -2))
            return made
        spread = torch.exp2(scales.float() - _EXPONENT_BIAS) if scales.dtype == torch.uint8 else scales.float()
        if spread.numel() > 1:
            height, width = weight.shape[-2:]
            spread = spread.repeat_interleave(self.block[0], -2).repeat_interleave(self.block[1], -1)
            spread = spread[..., :height, :width]
        return weight.float() * spread


@dataclass(frozen=True)
class Unpacked(Recipe):
    """A matrix unpacked as (q − z) · s: q from `weight` in the format `code`, z from `zeros`, s from `scales`.

    Without `zeros`, z is 0; `sizes`, if any, must equal the shape. Products are rounded to the dtype of the scales, and
    then to `dtype`.
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
        """Return all stored tensors that the matrix is unpacked from."""
        return tuple(each for each in (self.weight, self.scales, self.zeros, self.sizes) if each is not None)

    def compute(self, bench: Bench) -> Tensor:
        """Unpack the matrix with compressed-tensors.

        Raises ValueError where `sizes` differs from the shape, and where the library fails.
        """
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
