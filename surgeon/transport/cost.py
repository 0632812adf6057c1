"""Euclidean distances between rows by one matrix product, safe where rows are nearly equal."""

from __future__ import annotations

import torch
from torch import Tensor

# ‖x‖² + ‖y‖² − 2⟨x, y⟩ loses what the three terms share; below this share of them the entry is made anew from
# the difference itself.
_CANCELLED = 1e-3
_BLOCK_ELEMENTS = 1 << 22


def distances(x_ND: Tensor, y_MD: Tensor) -> Tensor:
    """‖x_i − y_j‖₂ as an (n, m) tensor in the dtype of `x_ND` (float32 or float64).

    Agrees with a float64 computation to about 1e-4 relative for every entry, near-equal rows included.
    Memory beyond the inputs: the result, a centred copy of the inputs, and one block of rows.
    """
    # Distances do not change when both sets move together; small numbers cancel less.
    centre_D = (x_ND.mean(0) + y_MD.mean(0)) / 2
    x_ND, y_MD = x_ND - centre_D, y_MD - centre_D
    x_norm_N, y_norm_M = x_ND.square().sum(1), y_MD.square().sum(1)
    squared_NM = torch.addmm(y_norm_M, x_ND, y_MD.T, alpha=-2)
    step = max(1, _BLOCK_ELEMENTS // max(1, len(y_MD)))
    for start in range(0, len(x_ND), step):
        rows = slice(start, start + step)
        block = squared_NM[rows]
        scale = x_norm_N[rows, None]
        block += scale
        close = block < _CANCELLED * (scale + y_norm_M)
        if bool(close.any()):
            _recompute(block, close, x_ND[rows], y_MD)
        block.clamp_(min=0).sqrt_()
    return squared_NM


def _recompute(squared: Tensor, close: Tensor, x: Tensor, y: Tensor) -> None:
    """Exact squared distances where `close`, a bounded number of pairs at a time."""
    pairs = close.nonzero()
    step = max(1, _BLOCK_ELEMENTS // max(1, x.shape[1]))
    for start in range(0, len(pairs), step):
        i, j = pairs[start : start + step].unbind(1)
        squared[i, j] = (x[i] - y[j]).square().sum(1)
