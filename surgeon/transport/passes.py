"""Passes over the cost or the kernel, which take nearly all of Sinkhorn's time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of K processed at a time: in a sweep, which uses a block twice while it is in cache; and in the steps that
# make K and T. Temporaries stay below the size (32 MiB) from which the allocator requests cleared memory from the
# system each time. On a GPU, where starting work on a block takes longer than the block itself, they are larger.
_SWEEP_BLOCK = 1 << 20
_BLOCK = 1 << 22
_LARGER_ON_GPU = 16


@dataclass(frozen=True)
class Sums:
    """The sums computed while T is made: u, T's row and column sums and Σ T log K, all in float64."""

    u_N: Tensor
    row_mass_N: Tensor
    column_mass_M: Tensor
    log_kernel: Tensor


def make_kernel(cost_NM: Tensor, g_M: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Replace the cost by K = exp(−(C − f − g − shift)/ε); return f (n) and shift (m).

    The largest entry of each row and column of K is one.
    """
    f_N = torch.empty_like(cost_NM[:, 0])
    shift_M = torch.full_like(g_M, math.inf)
    for rows in blocks(cost_NM):
        block = cost_NM[rows]
        block -= g_M
        f_N[rows] = block.amin(1)
        block -= f_N[rows, None]
        torch.minimum(shift_M, block.amin(0), out=shift_M)
    for rows in blocks(cost_NM):
        cost_NM[rows].sub_(shift_M).mul_(-1 / epsilon).exp_()
    return f_N, shift_M


def sweep(kernel_NM: Tensor, v_M: Tensor) -> Tensor:
    """Return Kᵀu for u = (1/n) / (K v), (m), in float64."""
    n = len(kernel_NM)
    # float64, because it sums many blocks.
    column_sum_M = torch.zeros_like(v_M, dtype=torch.float64)
    for rows in blocks(kernel_NM, _SWEEP_BLOCK):
        block = kernel_NM[rows]
        column_sum_M += block.T @ (block @ v_M).mul_(n).reciprocal_()
    return column_sum_M


def finish(kernel_NM: Tensor, v_M: Tensor, factor: float) -> Sums:
    """Make `factor` · T; rows are summed in the working dtype, sums of rows in float64."""
    n = len(kernel_NM)
    column_mass_M = torch.zeros_like(v_M, dtype=torch.float64)
    row_mass_N = torch.zeros_like(kernel_NM[:, 0], dtype=torch.float64)
    u_N = torch.zeros_like(row_mass_N)
    log_kernel = torch.zeros((), dtype=torch.float64, device=v_M.device)
    for rows in blocks(kernel_NM):
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


def blocks(matrix: Tensor, elements: int = _BLOCK) -> list[slice]:
    """Return row blocks of at most `elements` elements (more on a GPU), or of one row."""
    elements *= _LARGER_ON_GPU if matrix.is_cuda else 1
    step = max(1, elements // matrix.shape[1])
    return [slice(start, start + step) for start in range(0, len(matrix), step)]
