"""What others than the base's full-precision weights give: adapters, models, prompts, quantised tensors.

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


# Quantised tensors: the sixteen values of four bits, and what an exponent of zero is stored as.
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXPONENT_BIAS = 127


@dataclass(frozen=True)
class Imported(Recipe):
    """The tensor `tensor` of an adapter or another model, which the plan calls `name`, rounded to nearest in `dtype`.

    `rows` are all, or those from the first number to before the second; `kept_columns` likewise.
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
        """The tensor, and whose it is."""
        return f"{self.tensor} of the {self.place} {self.name}"

    def compute(self, bench: Bench) -> Tensor:
        """Read the tensor, and cut it."""
        found = bench.imported(self.place, self.name, self.tensor)
        found = found if self.rows is None else found[slice(*self.rows)]
        return found if self.kept_columns is None else found[:, slice(*self.kept_columns)]

    def columns(self, start: int, stop: int) -> Imported:
        """Columns of a matrix."""
        return replace(self, shape=(self.shape[0], stop - start), kept_columns=(start, stop))


@dataclass(frozen=True)
class Prompted(Recipe):
    """A row for each list of `prompts`: what layer `layer`'s MLP reads of them on average, scaled to length `norm`.

    Before that, what it reads on average of the list in `against` of the same number, if there are any, is taken away.
    """

    prompts: tuple[tuple[str, ...], ...]
    layer: int
    norm: float
    dtype: str
    shape: tuple[int, ...]
    against: tuple[tuple[str, ...], ...] = ()

    def compute(self, bench: Bench) -> Tensor:
        """Scale the rows of the layer."""
        return bench.prompted(self.prompts, self.against)[self.layer].mul(self.norm)


@dataclass(frozen=True)
class Dequantised(Recipe):
    """The numbers that a quantised tensor stands for: `weight` times its `scales`, rounded once to `dtype`.

    `block` is rows by columns of FP8 numbers that share a scale. None: MXFP4, 32 numbers to an exponent, whose matrices
    are stored the other way round than they are used.
    """

    weight: Copy
    scales: Copy
    block: tuple[int, int] | None
    dtype: str
    shape: tuple[int, ...]

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Weight and scales, as they are stored."""
        return self.weight, self.scales

    def compute(self, bench: Bench) -> Tensor:
        """Multiply in float32, where the product of a quantised number and its scale is exact, or rounded as little."""
        import torch

        weight, scales = (bench.read(each) for each in (self.weight, self.scales))
        if self.block is None:
            made = torch.empty(self.shape)
            # An expert at a time: codes take several times the memory of the numbers.
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
