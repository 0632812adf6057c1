"""Entropic transport: a stabilised Sinkhorn with Anderson acceleration, in one buffer."""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surgeon.transport.maps import DenseMap, Solution
from surgeon.transport.passes import TORCH, Passes

_MEMORY = 8

# Keeps the small linear system solvable when past residuals are multiples of each other.
_RIDGE = 1e-10


class Anderson:
    """The last few iterates and their residuals, in float64."""

    def __init__(self, size: int, *, device: torch.device) -> None:
        self._iterates = torch.zeros(_MEMORY, size, dtype=torch.float64, device=device)
        self._residuals = torch.zeros_like(self._iterates)
        self._count = 0

    def forget(self) -> None:
        """Drop the history: the next step is a plain one."""
        self._count = 0

    def step(self, x_M: Tensor, residual_M: Tensor) -> Tensor:
        """The next iterate, from x, F(x) − x and the last few steps."""
        known = min(self._count, _MEMORY)
        if known:
            residual_change = self._residuals[:known] - residual_M
            change = self._iterates[:known] - x_M
            scale = residual_change.norm(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float64).tiny)
            basis = residual_change / scale
            gram = basis @ basis.T
            gram.diagonal().add_(_RIDGE)
            # `solve_ex` without checks does not wait for the device; the caller checks the error of its result.
            weights, _ = torch.linalg.solve_ex(gram, -(basis @ residual_M))
            following: Tensor = x_M + residual_M + (weights / scale[:, 0]) @ (change + residual_change)
        else:
            following = x_M + residual_M
        slot = self._count % _MEMORY
        self._iterates[slot] = x_M
        self._residuals[slot] = residual_M
        self._count += 1
        return following


# |log v| beyond the first is absorbed, beyond the second is cut: float32 ends at e^±87, and with rows and columns
# of K at most one the sums of a cut scaling stay inside.
_ABSORB_AT = 30.0
_CUT_AT = 40.0

# The first ε, as a share of the cost's spread, and what each stage divides it by: with acceleration a stage more
# saves fewer passes over K than recomputing the cost takes.
_FIRST_EPSILON = 0.01
_EPSILON_STEP = 8.0
_COARSE_TOLERANCE = 1e-2
_COARSE_ITERATIONS = 100

# An accelerated step that makes the error this much worse than the best is undone.
_WORSE = 2.0

# Near the rounding error: after this many passes without a smaller error, more would not help.
_NEAR_ROUNDING = 3e-6
_STAGNANT = 100

# On a GPU the error is read back once in this many passes: reading waits for all earlier work.
_CHECK_EVERY_ON_DEVICE = 10


@dataclass
class _State:
    """K in place of the cost; references f, g in the unit of the scaled cost; x = log v in float64.

    In float32 the rounding of x alone, whose size is that of a logarithm, would move the sums by more than 1e-6.
    """

    kernel_NM: Tensor
    f_N: Tensor
    g_M: Tensor
    x_M: Tensor
    passes: Passes


def sinkhorn(
    make_cost: Callable[[], Tensor],
    *,
    reg: float,
    unit: float,
    factor: float,
    max_iterations: int,
    tolerance: float,
) -> DenseMap:
    """Solve for the cost that `make_cost` returns (each call must compute it again: its buffer is overwritten).

    `make_cost` gives C / unit, (n, m); `reg` is in that scaled unit, `Solution.cost` in C's own; the map is
    applied times `factor`. Where `tolerance` is not reached within `max_iterations`, the solution says so; no error.
    """
    cost_NM = make_cost()
    n, m = cost_NM.shape
    lowest, highest = (float(end) for end in torch.aminmax(cost_NM))
    stages = schedule(highest - lowest, reg)
    if max_iterations < len(stages):
        stages = [reg]
    g_M = torch.zeros_like(cost_NM[0])
    state = _State(cost_NM, cost_NM[:, 0], g_M, g_M.double(), passes_for(cost_NM))
    _make_kernel(state, cost_NM, stages[0])
    state.x_M.zero_()
    iterations = 0
    for stage, epsilon in enumerate(stages):
        final = stage == len(stages) - 1
        if stage:
            _absorb(state, stages[stage - 1])
            _make_kernel(state, _fresh(state, make_cost), epsilon)
        left = max_iterations - iterations - (len(stages) - 1 - stage)
        iterations += _iterate(
            state,
            make_cost,
            epsilon=epsilon,
            most=left if final else min(_COARSE_ITERATIONS, left),
            target=tolerance if final else _COARSE_TOLERANCE,
        )
    entropy, cost, row_error, column_error = _finish(state, reg, factor)
    solution = Solution(
        rows=n,
        columns=m,
        iterations=iterations,
        converged=max(row_error, column_error) <= tolerance,
        row_error=row_error,
        column_error=column_error,
        entropy=entropy,
        cost=cost * unit,
    )
    return DenseMap(state.kernel_NM, factor=factor, solution=solution)


def schedule(spread: float, reg: float) -> list[float]:
    """Values of ε from a share of the cost's spread down to `reg`; just `reg` where that is about as large."""
    steps: list[float] = []
    epsilon = spread * _FIRST_EPSILON
    while epsilon > reg * 1.5:
        steps.append(epsilon)
        epsilon /= _EPSILON_STEP
    return [*steps, reg]


def _fresh(state: _State, make_cost: Callable[[], Tensor]) -> Tensor:
    """The cost, computed again; the old kernel is freed first, so that there is one buffer of this size at a time."""
    state.kernel_NM = state.kernel_NM.new_empty(0)
    return make_cost()


def _make_kernel(state: _State, cost_NM: Tensor, epsilon: float) -> None:
    """K = exp(−(C − f − g)/ε) in place of the cost, f and g moved until each row and column reaches one.

    x is shifted by the opposite of g's shift, so that the scaling of the columns does not change.
    """
    state.f_N, shift_M = state.passes.make_kernel(cost_NM, state.g_M, epsilon)
    state.kernel_NM = cost_NM
    state.g_M = state.g_M + shift_M
    state.x_M = (shift_M.double() / -epsilon).clamp_(min=-_ABSORB_AT / 2)


def _iterate(state: _State, make_cost: Callable[[], Tensor], *, epsilon: float, most: int, target: float) -> int:
    """Move x until the column sums are within `target` in L1, and once more plainly; returns the passes."""
    m = len(state.x_M)
    every = _CHECK_EVERY_ON_DEVICE if state.kernel_NM.is_cuda else 1
    history = Anderson(m, device=state.x_M.device)
    best, since_best = math.inf, 0
    best_x = state.x_M
    for iteration in range(1, most + 1):
        plain_M = state.passes.sweep(state.kernel_NM, _scaling(state)).log_().add_(math.log(m)).neg_()
        if iteration % every and iteration < most:
            state.x_M = history.step(state.x_M, plain_M - state.x_M).clamp_(-_CUT_AT, _CUT_AT)
            continue
        # |1/m − v_j (Kᵀu)_j|, summed: the mass that the plain update changes.
        error = float(torch.expm1(state.x_M - plain_M).abs_().mean())
        if error <= target:
            state.x_M = plain_M
            return iteration
        since_best = 0 if error < 0.9 * best else since_best + every
        if iteration == most or (best < _NEAR_ROUNDING and since_best >= _STAGNANT):
            state.x_M = plain_M if error <= best else best_x
            return iteration
        if not error <= _WORSE * best:
            history.forget()
            state.x_M = best_x
            best = math.inf
            continue
        if error < best:
            best, best_x = error, plain_M
        if float(state.x_M.abs().max()) > _ABSORB_AT:
            state.x_M = plain_M
            _absorb(state, epsilon)
            _make_kernel(state, _fresh(state, make_cost), epsilon)
            history.forget()
            best, best_x = math.inf, state.x_M
            continue
        state.x_M = history.step(state.x_M, plain_M - state.x_M).clamp_(-_CUT_AT, _CUT_AT)
    return most


def _absorb(state: _State, epsilon: float) -> None:
    state.g_M = (state.g_M + epsilon * state.x_M).to(state.g_M.dtype)
    state.x_M = torch.zeros_like(state.x_M)


def _scaling(state: _State) -> Tensor:
    """The scaling v = e^x of the columns, in K's dtype."""
    return state.x_M.exp().to(state.g_M.dtype)


def _finish(state: _State, epsilon: float, factor: float) -> tuple[float, float, float, float]:
    """`factor` · T in place of K; returns T's entropy, cost and marginal errors.

    With log T = log u + log K + log v and C = f + g − ε log K wherever there is mass, both follow from the row
    sums, the column sums and Σ T log K.
    """
    n, m = state.kernel_NM.shape
    sums = state.passes.finish(state.kernel_NM, _scaling(state), factor)
    shared = float(sums.log_kernel)
    entropy = -float(sums.row_mass_N @ sums.u_N.log() + sums.column_mass_M @ state.x_M) - shared
    cost = float(sums.row_mass_N @ state.f_N.double() + sums.column_mass_M @ state.g_M.double()) - epsilon * shared
    row_error = float((sums.row_mass_N - 1 / n).abs().sum())
    return entropy, cost, row_error, float((sums.column_mass_M - 1 / m).abs().sum())


def passes_for(matrix_NM: Tensor) -> Passes:
    """The fused passes where the matrix lies on a GPU that can run them, else torch's."""
    fits = matrix_NM.is_cuda and matrix_NM.dtype == torch.float32 and matrix_NM.is_contiguous()
    if not fits or importlib.util.find_spec("triton") is None:
        return TORCH
    from surgeon.transport.fused import PASSES, WIDEST, block_of

    block = block_of(matrix_NM.shape[1])
    return PASSES if block <= WIDEST and _works(matrix_NM.device, block) else TORCH


@functools.cache
def _works(device: torch.device, block: int) -> bool:
    """Whether the fused passes, compiled for this width, compute on three rows what torch's compute.

    They need a C compiler and enough shared memory; where one is missing, solving must go on without them.
    """
    from surgeon.transport.fused import PASSES

    try:
        agree = _agree(PASSES, TORCH, device, block - block // 4)
        reason = "their sums are not torch's"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler or driver raises
        agree, reason = False, f"{type(error).__name__}: {error}"
    if not agree:
        warnings.warn(f"fused kernels are not used on {device}: {reason.splitlines()[0]}", RuntimeWarning, stacklevel=2)
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
