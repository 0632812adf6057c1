"""A twin that is stored like a quantised base: random codes and scales for the matrices that the base has quantised.

Codes are drawn, not quantised from weights: the numbers they stand for are the twin's weights once transformers
dequantises them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surgeon.anatomy.compressed import packs_of
from surgeon.anatomy.family import Packed
from surgeon.anatomy.quantised import grid_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.models.load import stored_dtype
from surgeon.writing.compute import PACKED

# Rows and columns of a twin's blocks: smaller than its matrices, and different from each other.
_BLOCK = (4, 8)
# The same in the fields of config.json.
_BLOCKS = {"weight_block_size": [*_BLOCK], "block_structure": [*_BLOCK], "group_size": _BLOCK[1]}
# The standard deviation of random codes of FP8.
_FP8 = 103.0


def small_blocks(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's quantisation settings with a twin's small blocks in all parts that have blocks."""
    made = {key: small_blocks(value) if isinstance(value, Mapping) else value for key, value in settings.items()}
    # None, and -1 for a row, are no blocks.
    return made | {key: block for key, block in _BLOCKS.items() if made.get(key) not in (None, -1)}


def quantised(
    plain: Mapping[str, Tensor], packed: Mapping[str, Packed], base: CheckpointFolder, settings: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return a twin's tensors, with codes and scales for the tensors that its base stores quantised (`packed`).

    `plain` has the twin's values in full precision, by the names of codes; `settings` are the twin's quantisation
    settings. A tensor that is zero because it must be silent gets zero codes.
    """
    made, packs = dict(plain), packs_of(base.config, base.tensors)
    draws = torch.Generator().manual_seed(0)
    for name, each in packed.items():
        value, info, scales = plain[name], base.tensors[name], base.tensors[each.scales]
        *outer, rows, columns = value.shape
        shape: tuple[int, ...]
        bits = 4
        if (pack := packs.get(name)) is not None:
            blocks = {"tensor": (rows, columns), "channel": (1, columns), "group": (1, _BLOCK[1]), "block": _BLOCK}
            code, bits = replace(pack.code, block=blocks[pack.code.strategy]), pack.code.bits
            shape = (rows, code.words(columns) if code.packed else columns)
            grid = code.grid((rows, columns))
            if pack.zeros is not None:
                wide = (code.words(rows), grid[1]) if code.zeros_packed else grid
                made[pack.zeros] = _codes(wide, base.tensors[pack.zeros].dtype, draws)
            if pack.sizes is not None:
                made[pack.sizes] = torch.tensor([rows, columns], dtype=PACKED[base.tensors[pack.sizes].dtype])
        else:
            shape = (*outer, columns, rows // 32, 16) if info.dtype == "U8" else (*outer, rows, columns)
            grid = grid_of(replace(info, shape=shape), settings) or ()
        codes = _codes(shape, info.dtype, draws)
        made[name] = codes if value.any() else torch.zeros_like(codes)
        size = (float(value.std()) or 1.0) / (_FP8 if info.dtype == "F8_E4M3" else 2.0**bits / 4)
        exponents = torch.rand(scales.shape if math.prod(grid) == scales.numel == 1 else grid, generator=draws)
        exponents = math.log2(size) + 2 * exponents - 1
        numbers = (exponents + 127).round() if scales.dtype == "U8" else exponents.exp2()
        made[each.scales] = numbers.to(PACKED.get(scales.dtype) or stored_dtype(scales.dtype))
    return made


def _codes(shape: tuple[int, ...], dtype: str, draws: torch.Generator) -> Tensor:
    """Return random bytes as numbers of a quantised dtype, without NaN; zeros of any other dtype."""
    if (kind := PACKED.get(dtype)) is None:
        return torch.zeros(shape, dtype=stored_dtype(dtype))
    codes = torch.randint(256, (*shape[:-1], shape[-1] * kind.itemsize), dtype=torch.uint8, generator=draws)
    if kind == torch.float8_e4m3fn:
        codes[codes & 127 == 127] = 0
    return codes.view(kind)
