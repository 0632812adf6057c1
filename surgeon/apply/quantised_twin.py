"""A twin that is stored as its base is: random codes and scales for the matrices that the base holds quantised.

Codes are drawn, not quantised: whatever they stand for are the twin's weights, once transformers dequantises it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surgeon.apply.compute import PACKED
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.weights import QUANTISATION, quantisation
from surgeon.families.compressed import OF_ACTIVATIONS, Pack, packs_of
from surgeon.families.quantised import grid_of, plain_names, scales_of
from surgeon.models.load import stored_dtype

# Rows and columns of a twin's blocks: smaller than its matrices, and not the same.
_BLOCK = (4, 8)
# The standard deviation of random codes: FP8, and four bits.
_FP8, _FOUR_BITS = 103.0, 3.0


def small_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a twin's config.json says of how it is quantised, its blocks small; nothing where the base is not."""
    settings = quantisation(config)
    if settings is None:
        return {}

    def smaller(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: smaller(name, each) for name, each in value.items()}
        if key == "group_size" and isinstance(value, int) and value > 0:
            return _BLOCK[1]
        return [*_BLOCK] if key in ("weight_block_size", "block_structure") and value is not None else value

    default = {"weight_block_size": [*_BLOCK]} if settings["quant_method"] == "fp8" else {}
    return {QUANTISATION: default | smaller("", settings)}


def quantised(
    plain: Mapping[str, Tensor], config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], small: Mapping[str, Any]
) -> dict[str, Tensor]:
    """A twin's tensors, those that its base stores quantised as codes with scales.

    Args:
        plain: the twin's tensors in full precision by the base's names, or what stands there for its codes
        config, tensors: the base's config.json and headers
        small: the twin's config.json

    What is zero in `plain`, since it must be silent, is zero codes.
    """
    draws = torch.Generator().manual_seed(0)
    made, packs = dict(plain), packs_of(config, tensors)
    for name in plain_names(config, tensors).keys() & plain.keys():
        value, info = plain[name], tensors[name]
        if (pack := packs.get(name)) is not None:
            made |= _packed(pack, value, tensors, draws)
            continue
        *outer, rows, columns = value.shape
        shape = {"F8_E4M3": (rows, columns), "I8": (rows, columns // 2), "U8": (columns, rows // 32, 16)}[info.dtype]
        codes = _codes((*outer, *shape), info.dtype, draws)
        scales = tensors[scales_of(name, small)]
        grid = grid_of(replace(info, shape=tuple(codes.shape)), small[QUANTISATION])
        assert grid is not None, name
        size = (float(value.std()) or 1.0) / (_FP8 if info.dtype == "F8_E4M3" else _FOUR_BITS)
        made[name] = codes if value.any() else torch.zeros_like(codes)
        made[scales.name] = _scales(scales.shape if math.prod(grid) == scales.numel else grid, scales, size, draws)
    return made


def _packed(pack: Pack, value: Tensor, tensors: Mapping[str, TensorInfo], draws: torch.Generator) -> dict[str, Tensor]:
    """What compressed-tensors stores of a matrix."""
    rows, columns = value.shape
    blocks = {"tensor": (rows, columns), "channel": (1, columns), "group": (1, _BLOCK[1]), "block": _BLOCK}
    code = replace(pack.code, block=blocks[pack.code.strategy])
    scales, grid = tensors[pack.scales], code.grid((rows, columns))
    flat = len(scales.shape) < len(grid)
    size = float(value.std()) / (_FP8 if code.floating else 2**code.bits / 3.5)
    words = code.words(columns) if code.packed else columns
    made = {
        pack.weight: _codes((rows, words), tensors[pack.weight].dtype, draws),
        pack.scales: _scales((math.prod(grid),) if flat else grid, scales, size, draws),
    }
    if pack.zeros is not None:
        wide = (code.words(rows), grid[1]) if code.zeros_packed else made[pack.scales].shape
        made[pack.zeros] = _codes(tuple(wide), tensors[pack.zeros].dtype, draws)
    if pack.sizes is not None:
        made[pack.sizes] = torch.tensor([rows, columns], dtype=PACKED[tensors[pack.sizes].dtype])
    module = pack.name.removesuffix("weight")
    beside = (tensors[name] for name in (f"{module.removesuffix('.')}{end}" for end in OF_ACTIVATIONS) if name in tensors)
    return made | {info.name: torch.ones(info.shape) for info in beside}


def _codes(shape: tuple[int, ...], dtype: str, draws: torch.Generator) -> Tensor:
    """Random bytes as numbers of a dtype, none of them NaN."""
    kind = PACKED.get(dtype) or stored_dtype(dtype)
    codes = torch.randint(256, (*shape[:-1], shape[-1] * kind.itemsize), dtype=torch.uint8, generator=draws)
    if kind == torch.float8_e4m3fn:
        codes[codes & 127 == 127] = 0
    return codes.view(kind)


def _scales(shape: tuple[int, ...], stored: TensorInfo, size: float, draws: torch.Generator) -> Tensor:
    """Scales from half to twice a size."""
    scales = size * torch.exp2(2 * torch.rand(shape, generator=draws) - 1)
    if stored.dtype == "U8":
        # Exponents.
        return scales.log2().add(127).round().to(torch.uint8)
    return scales.to(PACKED.get(stored.dtype) or stored_dtype(stored.dtype))
