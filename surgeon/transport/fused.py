"""Sinkhorn's passes as Triton kernels, for float32 matrices on a GPU; tests compare them with plain torch (passes.py).

A sweep, and the pass that makes T, read each element of K once: a program holds whole rows, computes their sums, and
adds the scaled rows to column sums in registers. Each program writes its column sums to its own row of a small buffer
that is summed in float64 afterwards. There are no atomics, and a program's rows depend only on the shape, so results
are the same in every run. The cost is read twice and written once when K is made from it.
"""

# A kernel's arguments have no annotations, because Triton would read them. Pointers to float32 come first, then
# numbers.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgeon.transport.passes import Passes, Sums

# The most columns that a program can hold: a row, its scaling and its sums take 32 registers each in each of 512
# threads.
WIDEST = 1 << 14
# The least number of elements that a program processes at a time, and how many programs share the rows of a matrix: two
# or four for each multiprocessor of the larger cards. Fixed, because the order of additions depends on them.
_TILE = 1 << 12
_PROGRAMS, _PROGRAMS_WIDE = 528, 264


def block_of(m: int) -> int:
    """Return the width that kernels for `m` columns are compiled for."""
    return max(16, int(triton.next_power_of_2(m)))


@triton.jit  # type: ignore[untyped-decorator]
def _sweep_kernel(kernel, v, partial, n, m, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Add up u · K by columns over a program's rows, for u = (1/n) / (K v); store the sums in `partial`."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < m
    scaling = tl.load(v + columns, mask=inside, other=0.0)
    summed = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(program * tiles, (program + 1) * tiles, num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        at = kernel + rows.to(tl.int64)[:, None] * m + columns[None, :]
        block = tl.load(at, mask=(rows < n)[:, None] & inside[None, :], other=0.0)
        row_sum = tl.sum(block * scaling[None, :], axis=1)
        u = 1.0 / (tl.where(rows < n, row_sum, 1.0) * n)
        summed += block * u[:, None]
    tl.store(partial + program.to(tl.int64) * m + columns, tl.sum(summed, axis=0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _minima_kernel(cost, g, f, partial, n, m, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Store f, the least C − g of each row, and the least C − g − f of each column over a program's rows."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < m
    reference = tl.load(g + columns, mask=inside, other=0.0)
    least = tl.full((ROWS, BLOCK), float("inf"), tl.float32)
    for tile in tl.range(program * tiles, (program + 1) * tiles, num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        at = cost + rows.to(tl.int64)[:, None] * m + columns[None, :]
        block = tl.load(at, mask=(rows < n)[:, None] & inside[None, :], other=float("inf")) - reference[None, :]
        row_least = tl.where(rows < n, tl.min(block, axis=1), 0.0)
        tl.store(f + rows, row_least, mask=rows < n)
        least = tl.minimum(least, block - row_least[:, None])
    tl.store(partial + program.to(tl.int64) * m + columns, tl.min(least, axis=0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _exp_kernel(cost, g, f, shift, scale, n, m, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Replace C by exp((C − g − f − shift) · scale)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < m
    mask = (rows < n)[:, None] & inside[None, :]
    at = cost + rows.to(tl.int64)[:, None] * m + columns[None, :]
    # Subtract in the same order as torch, so that the largest entries are exactly one.
    block = tl.load(at, mask=mask, other=float("inf")) - tl.load(g + columns, mask=inside, other=0.0)[None, :]
    block -= tl.load(f + rows, mask=rows < n, other=0.0)[:, None]
    block -= tl.load(shift + columns, mask=inside, other=0.0)[None, :]
    tl.store(at, tl.exp(block * scale), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _finish_kernel(kernel, v, of_rows, partial, factor, n, m, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Replace K by `factor` · T; store u, masses and Σ T log K of each row, and column masses in `partial`."""
    # `of_rows` is (3, n): u, the rows' masses and their Σ T log K.
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < m
    scaling = tl.load(v + columns, mask=inside, other=0.0)
    summed = tl.zeros((ROWS, BLOCK), tl.float32)
    # Not pipelined, because the data read is overwritten.
    for tile in range(program * tiles, (program + 1) * tiles):
        rows = tile * ROWS + tl.arange(0, ROWS)
        mask = (rows < n)[:, None] & inside[None, :]
        at = kernel + rows.to(tl.int64)[:, None] * m + columns[None, :]
        block = tl.load(at, mask=mask, other=0.0)
        row_sum = tl.sum(block * scaling[None, :], axis=1)
        u = 1.0 / (tl.where(rows < n, row_sum, 1.0) * n)
        # log 0, where there is no mass, must not become 0 · ∞.
        logs = tl.where(block > 0, tl.maximum(tl.log(tl.where(block > 0, block, 1.0)), -1e4), -1e4)
        block = block * u[:, None] * scaling[None, :]
        tl.store(of_rows + rows, u, mask=rows < n)
        tl.store(of_rows + n + rows, tl.sum(block, axis=1), mask=rows < n)
        tl.store(of_rows + 2 * n + rows, tl.sum(logs * block, axis=1), mask=rows < n)
        summed += block
        tl.store(at, block * factor, mask=mask)
    tl.store(partial + program.to(tl.int64) * m + columns, tl.sum(summed, axis=0), mask=inside)


class _Launch:
    """The split of an (n, m) matrix among programs: `programs` of `tiles` tiles of `rows` whole rows."""

    def __init__(self, matrix_NM: Tensor) -> None:
        n, m = matrix_NM.shape
        assert matrix_NM.dtype == torch.float32, matrix_NM.dtype
        assert matrix_NM.is_contiguous(), matrix_NM.stride()
        self.block = block_of(m)
        assert self.block <= WIDEST, m
        self.rows = max(1, _TILE // self.block)
        self.all_tiles = -(-n // self.rows)
        self.tiles = -(-self.all_tiles // (_PROGRAMS_WIDE if self.block > _TILE else _PROGRAMS))
        self.programs = -(-self.all_tiles // self.tiles)
        warps = 4 if self.block <= 1 << 10 else 8 if self.block <= 1 << 12 else 16
        self.options = {"num_warps": warps, "enable_fp_fusion": True}
        # Tiles in flight at a time, in shared memory; like the options, this does not change the order of additions.
        self.stages = 3 if self.block < WIDEST else 2
        self.partial_PM = matrix_NM.new_empty(self.programs, m)


def _on(matrix: Tensor) -> torch.cuda.device_of:
    """Return a context in which kernels are launched on the matrix's device."""
    return torch.cuda.device_of(matrix)  # type: ignore[no-untyped-call]


def _make_kernel(cost_NM: Tensor, g_M: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Replace the cost by K; return f (n) and shift (m), as `Passes` describes."""
    n, m = cost_NM.shape
    launch = _Launch(cost_NM)
    f_N = cost_NM.new_empty(n)
    shape = {"ROWS": launch.rows, "BLOCK": launch.block, **launch.options}
    with _on(cost_NM):
        _minima_kernel[(launch.programs,)](
            cost_NM, g_M, f_N, launch.partial_PM, n, m, launch.tiles, STAGES=launch.stages, **shape
        )
        shift_M = launch.partial_PM.amin(0)
        _exp_kernel[(launch.all_tiles,)](cost_NM, g_M, f_N, shift_M, -1 / epsilon, n, m, **shape)
    return f_N, shift_M


def _sweep(kernel_NM: Tensor, v_M: Tensor) -> Tensor:
    """Return Kᵀu for u = (1/n) / (K v), (m), in float64."""
    n, m = kernel_NM.shape
    launch = _Launch(kernel_NM)
    with _on(kernel_NM):
        _sweep_kernel[(launch.programs,)](
            kernel_NM,
            v_M,
            launch.partial_PM,
            n,
            m,
            launch.tiles,
            ROWS=launch.rows,
            BLOCK=launch.block,
            STAGES=launch.stages,
            **launch.options,
        )
    return launch.partial_PM.sum(0, dtype=torch.float64)


def _finish(kernel_NM: Tensor, v_M: Tensor, factor: float) -> Sums:
    """Replace K by `factor` · T; return the sums computed on the way."""
    n, m = kernel_NM.shape
    launch = _Launch(kernel_NM)
    of_rows_3N = kernel_NM.new_empty(3, n)
    with _on(kernel_NM):
        _finish_kernel[(launch.programs,)](
            kernel_NM,
            v_M,
            of_rows_3N,
            launch.partial_PM,
            factor,
            n,
            m,
            launch.tiles,
            ROWS=launch.rows,
            BLOCK=launch.block,
            **launch.options,
        )
    u_N, row_mass_N, row_logs_N = of_rows_3N
    column_mass_M = launch.partial_PM.sum(0, dtype=torch.float64)
    return Sums(u_N.double(), row_mass_N.double(), column_mass_M, row_logs_N.sum(dtype=torch.float64))


PASSES = Passes(_make_kernel, _sweep, _finish)
