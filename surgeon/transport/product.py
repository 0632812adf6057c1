"""The matrix product of this room: float32 on x86 through oneDNN, which there can be three times as fast.

torch's own float32 `mm` goes to MKL, which on other vendors' processors leaves half of the vector width unused
(measured on Zen 5, 4096 × 2048 × 4096, two cores: 140 GFLOP/s against 430).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

# Enough for the full rate, few enough that their copies are small beside the matrix.
_COLUMNS = 1024


def product(left_NK: Tensor, right_KM: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """left · right (+ bias on every row), (n, m), all of one dtype and device; `right` may be a transposed view."""
    linear = _one_dnn() if _suits(left_NK) else None
    if linear is not None:
        return linear(left_NK, right_KM.T, bias_M, "none", [], "")
    return left_NK @ right_KM if bias_M is None else torch.addmm(bias_M, left_NK, right_KM)


def transposed_product(left_KN: Tensor, right_KM: Tensor) -> Tensor:
    """leftᵀ · right, (n, m), without a copy of `left`, which is the large one here.

    oneDNN would copy a transposed first factor whole; (rightᵀ · left)ᵀ is the same, by columns a copy of a few.
    """
    if not _suits(left_KN) or _one_dnn() is None:
        return left_KN.T @ right_KM
    made = left_KN.new_empty(left_KN.shape[1], right_KM.shape[1])
    for start in range(0, right_KM.shape[1], _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        made[:, columns] = product(right_KM[:, columns].T.contiguous(), left_KN).T
    return made


def _suits(factor: Tensor) -> bool:
    return factor.dtype == torch.float32 and factor.device.type == "cpu"


@functools.cache
def _one_dnn() -> Callable[..., Tensor] | None:
    """torch's linear through oneDNN, tried once; None where this build or processor is better served by `mm`.

    The operator is torch's own but not public: a version that drops or changes it falls back to `mm`.
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
