"""Passes over the cost or the kernel, which are nearly all of Sinkhorn's time: in plain torch, or fused (fused.py)."""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of K taken at a time: by a sweep, which uses a block twice while it is in cache; by what makes K and T,
# whose many small steps should each be long. Large matrices are cut into no more pieces than so many.
_SWEEP_BLOCK, _SWEEP_PIECES = 1 << 20, 64
_BLOCK, _PIECES = 1 << 22, 16


@dataclass(frozen=True)
class Sums:
    """What is summed while T is made: u, T's row and column sums and Σ T log K, all in float64."""

    u_N: Tensor
    row_mass_N: Tensor
    column_mass_M: Tensor
    log_kernel: Tensor


@dataclass(frozen=True)
class Passes:
    """One way to pass over an (n, m) matrix.

    `make_kernel(cost, g, ε)`: exp(−(C − f − g − shift)/ε) in place of the cost, its rows and columns reaching one;
    returns f (n) and shift (m). `sweep(K, v)`: Kᵀu for u = (1/n) / (K v), (m) in float64. `finish(K, v, factor)`:
    `factor` · T in place of K.
    """

    make_kernel: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    sweep: Callable[[Tensor, Tensor], Tensor]
    finish: Callable[[Tensor, Tensor, float], Sums]


def passes_for(matrix_NM: Tensor) -> Passes:
    """The fused passes where the matrix lies on a GPU that they work on, torch's for any other."""
    fits = matrix_NM.is_cuda and matrix_NM.dtype == torch.float32 and matrix_NM.is_contiguous()
    if not fits or importlib.util.find_spec("triton") is None:
        return TORCH
    from surgeon.transport import fused

    block = fused.block_of(matrix_NM.shape[1])
    return fused.PASSES if block <= fused.WIDEST and _works(matrix_NM.device, block) else TORCH


@functools.cache
def _works(device: torch.device, block: int) -> bool:
    """Whether the fused passes, compiled for this width, do on three rows what torch's do.

    Compilers and cards differ (a C compiler is needed, and shared memory): a fusion is not to fail for that.
    """
    from surgeon.transport import fused

    try:
        agree = _agree(fused.PASSES, TORCH, device, block - block // 4)
        told = "their sums are not torch's"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler or driver raises
        agree, told = False, f"{type(error).__name__}: {error}"
    if not agree:
        warnings.warn(f"fused kernels are not used on {device}: {told.splitlines()[0]}", RuntimeWarning, stacklevel=2)
    return agree


def _agree(tried: Passes, known: Passes, device: torch.device, m: int) -> bool:
    cost = torch.linspace(0, 1, 3 * m, device=device).mul_(40).sin_().view(3, m)
    found = []
    for passes in (tried, known):
        kernel, v = cost.clone(), torch.linspace(0.5, 2, m, device=device)
        f, shift = passes.make_kernel(kernel, v, 0.5)
        swept = passes.sweep(kernel, v)
        sums = passes.finish(kernel, v, 2.0)
        found.append([f, shift, swept, kernel, sums.u_N, sums.row_mass_N, sums.column_mass_M, sums.log_kernel])
    return all(torch.allclose(one.double(), other.double(), rtol=1e-4) for one, other in zip(*found, strict=True))


def _make_kernel(cost_NM: Tensor, g_M: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    f_N = torch.empty_like(cost_NM[:, 0])
    shift_M = torch.full_like(g_M, math.inf)
    for rows in _blocks(cost_NM):
        block = cost_NM[rows]
        block -= g_M
        f_N[rows] = block.amin(1)
        block -= f_N[rows, None]
        torch.minimum(shift_M, block.amin(0), out=shift_M)
    for rows in _blocks(cost_NM):
        cost_NM[rows].sub_(shift_M).mul_(-1 / epsilon).exp_()
    return f_N, shift_M


def _sweep(kernel_NM: Tensor, v_M: Tensor) -> Tensor:
    n = len(kernel_NM)
    # float64, as it sums many blocks.
    column_sum_M = torch.zeros_like(v_M, dtype=torch.float64)
    for rows in _blocks(kernel_NM, _SWEEP_BLOCK, _SWEEP_PIECES):
        block = kernel_NM[rows]
        column_sum_M += block.T @ (block @ v_M).mul_(n).reciprocal_()
    return column_sum_M


def _finish(kernel_NM: Tensor, v_M: Tensor, factor: float) -> Sums:
    """Rows are summed in the working dtype, sums of rows in float64."""
    n = len(kernel_NM)
    column_mass_M = torch.zeros_like(v_M, dtype=torch.float64)
    row_mass_N = torch.zeros_like(kernel_NM[:, 0], dtype=torch.float64)
    u_N = torch.zeros_like(row_mass_N)
    log_kernel = torch.zeros((), dtype=torch.float64, device=v_M.device)
    for rows in _blocks(kernel_NM):
        block = kernel_NM[rows]
        u = (block @ v_M).mul_(n).reciprocal_()
        # log 0, where there is no mass, must not become 0 · ∞.
        logs = block.log().clamp_(min=-1e4)
        block *= u[:, None]
        block *= v_M
        u_N[rows] = u.double()
        row_mass_N[rows] = block.sum(1).double()
        column_mass_M += block.sum(0)
        log_kernel += logs.mul_(block).sum(1).double().sum()
        if factor != 1.0:
            block *= factor
    return Sums(u_N, row_mass_N, column_mass_M, log_kernel)


def _blocks(matrix: Tensor, elements: int = _BLOCK, pieces: int = _PIECES) -> list[slice]:
    """Row blocks of at least so many elements, and no more than about so many blocks."""
    n, m = matrix.shape
    step = max(1, elements // m, -(-n // pieces))
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]


TORCH = Passes(_make_kernel, _sweep, _finish)
