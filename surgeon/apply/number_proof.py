"""The proof of a dequantised model: of every number that its formats hold, transformers makes what a plan makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.recipes import Copy, Dequantised, Recipe
from surgeon.errors import BadInput, printable
from surgeon.families.quantised import quantizer_of

if TYPE_CHECKING:
    from torch import Tensor

    from surgeon.blueprint.recipes import Bench

_EXPERTS, _GROUPS, _BLOCK_BYTES = 2, 3, 16
# Exponents of 32 bits, from the smallest that is not rounded away to the largest whose products are finite.
_EXPONENTS = (2, 251)


@dataclass(frozen=True)
class _Stored:
    """Of a bench as much as recipes of quantised tensors use: made-up bytes in the place of stored ones."""

    weight: Tensor
    scales: Tensor
    made: Dequantised

    def read(self, recipe: Recipe, *, finite: bool = True) -> Tensor:
        """The bytes for one of the recipe's inputs."""
        return self.weight if recipe is self.made.weight else self.scales


def prove_numbers(blueprint: Blueprint, config: Mapping[str, Any]) -> None:
    """Dequantise all codes of the plan's formats as transformers does, and as the plan does, and compare the bits.

    Raises BadInput where they differ.
    """
    formats: dict[tuple[Any, ...], tuple[str, Dequantised]] = {}
    for output in blueprint.outputs:
        if isinstance(recipe := output.recipe, Dequantised):
            single = recipe.scales.numel == 1
            formats.setdefault((recipe.block, recipe.scales.dtype, single), (output.name, recipe))
    for (block, dtype, single), (name, recipe) in formats.items():
        prove = _four_bits if block is None else _eight_bits
        if not prove(recipe, dtype, single, config):
            raise BadInput(
                f"{printable(name)}: the installed transformers makes other numbers of this format ({dtype} scales)"
                " than surgeon; use the version of transformers that constraints.txt names"
            )


def _four_bits(recipe: Dequantised, _dtype: str, _single: bool, _config: Mapping[str, Any]) -> bool:
    """MXFP4: every pair of codes, with every exponent that matters."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rows = 256
    weight = torch.arange(_EXPERTS * rows * _GROUPS * _BLOCK_BYTES).remainder(251).to(torch.uint8)
    weight = weight.view(_EXPERTS, rows, _GROUPS, _BLOCK_BYTES)
    first, behind = _EXPONENTS
    scales = torch.arange(weight[..., 0].numel()).remainder(behind - first).add(first).to(torch.uint8)
    scales = scales.view(weight.shape[:-1])
    theirs = convert_moe_packed_tensors(weight, scales, dtype=torch.bfloat16)
    return _same(recipe, (_EXPERTS, _GROUPS * _BLOCK_BYTES * 2, rows), weight, scales, theirs)


def _eight_bits(recipe: Dequantised, dtype: str, single: bool, config: Mapping[str, Any]) -> bool:
    """FP8: all 256 codes in each block, whose scales are powers of two or drawn."""
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    from surgeon.apply.compute import PACKED
    from surgeon.models.load import stored_dtype

    height, width = recipe.block or (1, 1)
    height, width = (16, 32) if single else (height, width)
    blocks = (1, 1) if single else (2, 2)
    count = height * width * blocks[0] * blocks[1]
    codes = torch.arange(count).remainder(256).to(torch.uint8).view(blocks[0] * height, blocks[1] * width)
    drawn = torch.rand(blocks, generator=torch.Generator().manual_seed(0)) / 64
    scales = (
        torch.full(blocks, 117, dtype=torch.uint8)
        if dtype == "U8"
        else drawn.to(PACKED.get(dtype) or stored_dtype(dtype))
    )
    weight = codes.view(torch.float8_e4m3fn)
    theirs = Fp8Dequantize(quantizer_of(config))._dequantize_one(weight, scales, output_dtype=torch.bfloat16)
    return _same(recipe, tuple(weight.shape), weight, scales, theirs)


def _same(recipe: Dequantised, shape: tuple[int, ...], weight: Tensor, scales: Tensor, theirs: Tensor) -> bool:
    """Whether the recipe, on these bytes, gives transformers' bits; of what is no number, that it is none."""
    import torch

    assert isinstance(recipe.weight, Copy)
    made = Dequantised(recipe.weight, recipe.scales, recipe.block, recipe.dtype, shape)
    ours = made.compute(cast("Bench", _Stored(weight, scales, made))).to(torch.bfloat16)
    return torch.equal(ours.nan_to_num(0.0).view(torch.int16), theirs.nan_to_num(0.0).view(torch.int16)) and (
        torch.equal(ours.isnan(), theirs.isnan())
    )
