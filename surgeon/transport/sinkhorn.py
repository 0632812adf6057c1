"""Entropic transport: a stabilised Sinkhorn with Anderson acceleration, in one buffer.

The buffer is stored as (m, n), the target's rows first: then Tᵀ · W and W · T read it row by row, the fastest order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surgeon.transport import passes
from surgeon.transport.maps import DenseMap, Solution

_MEMORY = 8

# Keeps the small linear system solvable when past residuals are multiples of each other.
_RIDGE = 1e-10


class Anderson:
    """Anderson acceleration: the last few iterates and their residuals, in float64."""

    def __init__(self, size: int, *, device: torch.device) -> None:
        self._iterates = torch.zeros(_MEMORY, size, dtype=torch.float64, device=device)
        self._residuals = torch.zeros_like(self._iterates)
        self._count = 0

    def forget(self) -> None:
        """Drop the history, so that the next step is a plain one."""
        self._count = 0

    def step(self, x_N: Tensor, residual_N: Tensor) -> Tensor:
        """Return the next iterate, from x, F(x) − x and the last few steps."""
        known = min(self._count, _MEMORY)
        if known:
            residual_change = self._residuals[:known] - residual_N
            change = self._iterates[:known] - x_N
            scale = residual_change.norm(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float64).tiny)
            basis = residual_change / scale
            gram = basis @ basis.T
            gram.diagonal().add_(_RIDGE)
            # `solve_ex` without checks does not wait for the device; the caller checks the error of its result.
            weights, _ = torch.linalg.solve_ex(gram, -(basis @ residual_N))
            following: Tensor = x_N + residual_N + (weights / scale[:, 0]) @ (change + residual_change)
        else:
            following = x_N + residual_N
        slot = self._count % _MEMORY
        self._iterates[slot] = x_N
        self._residuals[slot] = residual_N
        self._count += 1
        return following


# |log v| above the first limit is absorbed into g, above the second it is clamped. float32 ends at e^±87; with entries
# of K at most one, sums with a clamped scaling stay in that range.
_ABSORB_AT = 30.0
_CUT_AT = 40.0

# The first ε, as a share of the cost's spread, and the divisor of each stage: with acceleration, one more stage saves
# fewer passes over K than recomputing the cost takes. At the first ε no entry of K is below e^-64, so that the second
# stage can recover the cost from K.
_FIRST_EPSILON = 1 / 64
_EPSILON_STEP = 8.0

# If K ≥ this everywhere, no entry has lost digits or become 0, and C = f + g − ε log K.
_WHOLE_KERNEL = 1e-30
_COARSE_TOLERANCE = 1e-2
_COARSE_ITERATIONS = 100

# An accelerated step that makes the error this much worse than the best is undone.
_WORSE = 2.0

# Below this error, after this many passes without a smaller error, further passes would not help.
_NEAR_ROUNDING = 3e-6
_STAGNANT = 100

# On a GPU the error is read back once in this many passes: reading waits for all earlier work.
_CHECK_EVERY_ON_DEVICE = 10


@dataclass
class _State:
    """The solver's state: K in the cost's buffer, references f and g, and x = log v of K's columns.

    f and g are in the scaled cost's unit. x is in float64: in float32 its rounding alone, relative to the size of a
    logarithm, would move the sums by more than 1e-6.
    """

    kernel_MN: Tensor
    f_M: Tensor
    g_N: Tensor
    x_N: Tensor


def sinkhorn(
    make_cost: Callable[[], Tensor],
    *,
    reg: float,
    unit: float,
    factor: float,
    max_iterations: int,
    tolerance: float,
) -> DenseMap:
    """Solve for the cost that `make_cost` returns.

    Args:
        make_cost: returns Cᵀ / unit, (m, n); each call must compute it again: its buffer is overwritten.
        reg: ε, in the unit of the scaled cost.
        unit: the number that C was divided by; `Solution.cost` is in C's own unit.
        factor: the factor that the map is multiplied by when it is applied.
        max_iterations: the most passes; where they do not reach `tolerance`, the solution reports it.
        tolerance: L1 distance of both marginals from uniform.

    Raises:
        ValueError: `reg` is below the rounding of the costs.
    """
    cost_MN = make_cost()
    m, n = cost_MN.shape
    stages = schedule(_spread(cost_MN, reg), reg)
    if max_iterations < len(stages):
        stages = [reg]
    g_N = torch.zeros_like(cost_MN[0])
    state = _State(cost_MN, cost_MN[:, 0], g_N, g_N.double())
    _make_kernel(state, cost_MN, stages[0])
    state.x_N.zero_()
    iterations = 0
    for stage, epsilon in enumerate(stages):
        final = stage == len(stages) - 1
        if stage:
            _remake_kernel(state, make_cost, stages[stage - 1], epsilon)
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
    return DenseMap(state.kernel_MN, factor=factor, solution=solution)


def _spread(cost_MN: Tensor, reg: float) -> float:
    """Return the largest difference between costs. Raises ValueError where `reg` is below their rounding."""
    lowest, highest = (float(end) for end in torch.aminmax(cost_MN))
    number = torch.finfo(cost_MN.dtype)
    least = max((highest - lowest) * number.eps, number.tiny)
    if reg < least:
        raise ValueError(
            f"reg {reg:g} is below the rounding of the costs, which differ by up to {highest - lowest:.3g}; use at"
            f" least {least:.1e}, or the solver emd"
        )
    return highest - lowest


def schedule(spread: float, reg: float) -> list[float]:
    """Return values of ε from a share of the cost's spread down to `reg`; only `reg` where both are about equal."""
    steps: list[float] = []
    epsilon = spread * _FIRST_EPSILON
    while epsilon > reg * 1.5:
        steps.append(epsilon)
        epsilon /= _EPSILON_STEP
    return [*steps, reg]


def _remake_kernel(state: _State, make_cost: Callable[[], Tensor], epsilon: float, following: float) -> None:
    """Add x to the reference g, and compute K again for the next ε."""
    cost_MN = _recovered(state, make_cost, epsilon)
    state.g_N = (state.g_N + epsilon * state.x_N).to(state.g_N.dtype)
    state.x_N = torch.zeros_like(state.x_N)
    _make_kernel(state, cost_MN, following)


def _recovered(state: _State, make_cost: Callable[[], Tensor], epsilon: float) -> Tensor:
    """Return the cost from the kernel, or compute it again where entries are lost.

    The cost from the kernel has an error of ε · 1e-7 · (1 + |log K|).
    """
    if float(state.kernel_MN.amin()) < _WHOLE_KERNEL:
        # The old kernel is freed first, so that there is one buffer of this size at a time.
        state.kernel_MN = state.kernel_MN.new_empty(0)
        return make_cost()
    kernel_MN = state.kernel_MN
    for rows in passes.blocks(kernel_MN):
        kernel_MN[rows].log_().mul_(-epsilon).add_(state.f_M[rows, None]).add_(state.g_N)
    return kernel_MN


def _make_kernel(state: _State, cost_MN: Tensor, epsilon: float) -> None:
    """Replace the cost by K = exp(−(C − f − g)/ε); f and g are shifted until each row's and column's maximum is one.

    x is shifted by the opposite of g's shift, so that the scaling of the columns does not change.
    """
    state.f_M, shift_N = passes.make_kernel(cost_MN, state.g_N, epsilon)
    state.kernel_MN = cost_MN
    state.g_N = state.g_N + shift_N
    state.x_N = (shift_N.double() / -epsilon).clamp_(min=-_ABSORB_AT / 2)


def _iterate(state: _State, make_cost: Callable[[], Tensor], *, epsilon: float, most: int, target: float) -> int:
    """Update x until the column sums are within `target` in L1, with a plain update last; return the passes made."""
    n = len(state.x_N)
    every = _CHECK_EVERY_ON_DEVICE if state.kernel_MN.is_cuda else 1
    history = Anderson(n, device=state.x_N.device)
    best, since_best = math.inf, 0
    best_x = state.x_N
    for iteration in range(1, most + 1):
        plain_N = passes.sweep(state.kernel_MN, _scaling(state)).log_().add_(math.log(n)).neg_()
        if iteration % every and iteration < most:
            state.x_N = history.step(state.x_N, plain_N - state.x_N).clamp_(-_CUT_AT, _CUT_AT)
            continue
        # The sum of |1/n − v_j (Kᵀu)_j|: the mass that the plain update changes.
        error = float(torch.expm1(state.x_N - plain_N).abs_().mean())
        if error <= target:
            state.x_N = plain_N
            return iteration
        since_best = 0 if error < 0.9 * best else since_best + every
        if iteration == most or (best < _NEAR_ROUNDING and since_best >= _STAGNANT):
            state.x_N = plain_N if error <= best else best_x
            return iteration
        if not error <= _WORSE * best:
            history.forget()
            state.x_N = best_x
            best = math.inf
            continue
        if error < best:
            best, best_x = error, plain_N
        if float(state.x_N.abs().max()) > _ABSORB_AT:
            state.x_N = plain_N
            _remake_kernel(state, make_cost, epsilon, epsilon)
            history.forget()
            best, best_x = math.inf, state.x_N
            continue
        state.x_N = history.step(state.x_N, plain_N - state.x_N).clamp_(-_CUT_AT, _CUT_AT)
    return most


def _scaling(state: _State) -> Tensor:
    """Return the scaling v = e^x of the columns, in K's dtype."""
    return state.x_N.exp().to(state.g_N.dtype)


def _finish(state: _State, epsilon: float, factor: float) -> tuple[float, float, float, float]:
    """Replace K by `factor` · Tᵀ; return T's entropy, its cost, and the errors of its row and column marginals.

    With log T = log u + log K + log v and C = f + g − ε log K wherever there is mass, entropy and cost follow from the
    row sums, the column sums and Σ T log K. A row of the buffer is a column of T.
    """
    m, n = state.kernel_MN.shape
    sums = passes.finish(state.kernel_MN, _scaling(state), factor)
    mass_M, mass_N = sums.row_mass_N, sums.column_mass_M
    shared = float(sums.log_kernel)
    entropy = -float(mass_M @ sums.u_N.log() + mass_N @ state.x_N) - shared
    cost = float(mass_M @ state.f_M.double() + mass_N @ state.g_N.double()) - epsilon * shared
    row_error = float((mass_N - 1 / n).abs().sum())
    return entropy, cost, row_error, float((mass_M - 1 / m).abs().sum())
