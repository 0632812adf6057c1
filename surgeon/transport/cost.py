"""Distances between rows, and the matrix products behind them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor


def product(left_NK: Tensor, right_KM: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Return left · right (+ bias on every row), (n, m), all of one dtype and device; `right` may be a
    transposed view.
    """
    linear = _one_dnn() if left_NK.dtype == torch.float32 and left_NK.device.type == "cpu" else None
    if linear is not None:
        return linear(left_NK, right_KM.T, bias_M, "none", [], "")
    return left_NK @ right_KM if bias_M is None else torch.addmm(bias_M, left_NK, right_KM)


@functools.cache
def _one_dnn() -> Callable[..., Tensor] | None:
    """Return torch's linear through oneDNN; None where it is absent, fails a small trial, or the CPU lacks AVX.

    The operator belongs to torch but is not public: in a version that drops or changes it, `mm` is used.
    """
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return None
    factor = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    try:
        linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
        if torch.equal(linear(factor, factor, None, "none", [], ""), factor @ factor.T):
            return linear
    except (AttributeError, RuntimeError, TypeError):
        return None
    return None


# ‖x‖² + ‖y‖² − 2⟨x, y⟩ loses digits by cancellation; an entry below this share of ‖x‖² + ‖y‖² is recomputed from the
# difference x − y itself.
_CANCELLED = 1e-2

# If more pairs of a block than this number, and than this share, must be recomputed, a product in float64 is cheaper.
_MANY, _MANY_SHARE = 1000, 1 / 64

# The most numbers in a block of rows.
_BLOCK_ELEMENTS = 1 << 22

# Squares of numbers outside these limits may overflow or underflow.
_LARGE, _SMALL = 2.0**30, 2.0**-30


def distances(x_ND: Tensor, y_MD: Tensor) -> Tensor:
    """Return ‖x_i − y_j‖₂ as an (n, m) tensor in the dtype of both (float32 or float64).

    In float32 every entry agrees with a float64 computation to about 1e-5 relative, near-equal rows included (those
    whose distance float32 can distinguish from zero), for rows of any magnitude. Memory beyond the inputs: the result,
    a centred copy of the inputs, and a few blocks of `_BLOCK_ELEMENTS` numbers. Raises ValueError where a distance is
    beyond the dtype's range.
    """
    largest = max(abs(float(end)) for rows in (x_ND, y_MD) for end in torch.aminmax(rows))
    # A power of two: scaling by it rounds nothing.
    unit = 1.0 if largest == 0 or _SMALL < largest < _LARGE else 2.0 ** math.floor(math.log2(largest))
    if unit != 1.0:
        x_ND, y_MD = x_ND / unit, y_MD / unit
    # Distances do not change when both sets are shifted together; smaller numbers lose less by cancellation.
    centre_D = (x_ND.mean(0) + y_MD.mean(0)) / 2
    x_centred_ND, y_centred_MD = x_ND - centre_D, y_MD - centre_D
    x_norm_N, y_norm_M = (torch.linalg.vector_norm(rows, dim=1).square_() for rows in (x_centred_ND, y_centred_MD))
    squared_NM = product(x_centred_ND, y_centred_MD.mul_(-2).T, y_norm_M)
    del x_centred_ND, y_centred_MD
    step = max(1, _BLOCK_ELEMENTS // len(y_MD))
    for start in range(0, len(x_ND), step):
        rows = slice(start, start + step)
        block = squared_NM[rows].add_(x_norm_N[rows, None])
        _repair(block, x_norm_N[rows], y_norm_M, x_ND[rows], y_MD, centre_D)
        block.clamp_(min=0).sqrt_()
        if unit != 1.0 and not math.isfinite(float(block.mul_(unit).amax())):
            raise ValueError(f"rows are farther apart than {str(block.dtype).removeprefix('torch.')} can hold")
    return squared_NM


def _repair(squared: Tensor, x_norm: Tensor, y_norm: Tensor, x: Tensor, y: Tensor, centre: Tensor) -> None:
    """Recompute in place the entries of a block of squared distances that lost digits by cancellation.

    One reduction finds the rows where that is possible; mostly there are none.
    """
    suspects = (squared.amin(1) < _CANCELLED * (x_norm + y_norm.amax())).nonzero()[:, 0]
    if len(suspects) == 0:
        return
    close = squared[suspects] < _CANCELLED * (x_norm[suspects, None] + y_norm)
    count = int(close.sum())
    if count > max(_MANY, _MANY_SHARE * squared.numel()) and squared.dtype != torch.float64:
        _recompute_block(squared, x, y, centre)
    elif count:
        row, column = close.nonzero().unbind(1)
        _recompute_pairs(squared, suspects[row], column, x, y)


def _recompute_pairs(squared: Tensor, row: Tensor, column: Tensor, x: Tensor, y: Tensor) -> None:
    """Replace entries (row, column) by squared distances from differences of rows, exact where both rows are near."""
    step = max(1, _BLOCK_ELEMENTS // x.shape[1])
    for start in range(0, len(row), step):
        i, j = row[start : start + step], column[start : start + step]
        squared[i, j] = (x[i] - y[j]).square_().sum(1)


def _recompute_block(squared: Tensor, x: Tensor, y: Tensor, centre: Tensor) -> None:
    """Replace the whole block, computed in float64, where the same cancellation leaves nine digits more."""
    wide_x, wide_y = x.double() - centre.double(), y.double() - centre.double()
    wide = torch.addmm(wide_y.square().sum(1), wide_x, wide_y.T, alpha=-2)
    wide += wide_x.square().sum(1, keepdim=True)
    squared.copy_(wide.clamp_(min=0))
