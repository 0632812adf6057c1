"""Entropic optimal transport with uniform marginals: stabilised Sinkhorn with ε-scaling and absorption.

T_ij = u_i · K_ij · v_j with K = exp(−(C − f − g)/ε). The potentials f, g keep the scalings u, v near one, so
that nothing over- or underflows whatever the cost and ε: when a scaling leaves a safe range it is absorbed into
the potentials and K is made anew. K overwrites the cost; T is never formed.
(Cuturi 2013; absorption and ε-scaling as in Schmitzer 2019, Algorithm 2.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surgeon.transport.problem import Solution

# Scalings beyond e^±this are absorbed: float32 ends at e^±87, and a product of two must stay inside.
_ABSORB_AT = 30.0
_EPSILON_STEP = 4.0
_COARSE_TOLERANCE = 1e-2
_COARSE_ITERATIONS = 100
# Elements of K taken at a time: a block is used for both products while it is in cache.
_BLOCK_ELEMENTS = 1 << 20
# Row sums of a few thousand terms cannot be told apart below this many units of rounding.
_SUM_ROUNDING = 16.0
# Rounds without a smaller error, near what rounding leaves, after which more would not help.
_STAGNANT = 20


@dataclass
class _State:
    """K in place of the cost, potentials in the unit of the scaled cost, scalings; all on one device."""

    kernel_NM: Tensor
    f_N: Tensor
    g_M: Tensor
    u_N: Tensor
    v_M: Tensor


class SinkhornMap:
    """T = diag(u) K diag(v), applied without being formed."""

    def __init__(self, state: _State, factor: float, solution: Solution) -> None:
        self._state = state
        self._factor = factor
        self.solution = solution

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """s · Tᵀ · W, (m, d)."""
        state = self._state
        scaled = weight_ND * (state.u_N * self._factor)[:, None]
        return (state.kernel_NM.T @ scaled).mul_(state.v_M[:, None])

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """s · W · T, (r, m)."""
        state = self._state
        return ((weight_RN * (state.u_N * self._factor)) @ state.kernel_NM).mul_(state.v_M)

    def matrix(self) -> Tensor:
        """T itself, (n, m), its entries summing to one."""
        state = self._state
        return state.kernel_NM * state.u_N[:, None] * state.v_M


def sinkhorn(
    make_cost: Callable[[], Tensor],
    *,
    reg: float,
    unit: float,
    factor: float,
    max_iterations: int,
    tolerance: float,
) -> SinkhornMap:
    """Solve for the cost that `make_cost` makes (anew at each call: its buffer is overwritten).

    `make_cost` gives C / unit, (n, m); `reg` is in that scaled unit, `Solution.cost` in C's own.
    """
    cost_NM = make_cost()
    n, m = cost_NM.shape
    state = _begin(cost_NM)
    spread = float(cost_NM.max() - cost_NM.min())
    iterations = 0
    error = math.inf
    for epsilon in _schedule(spread, reg):
        final = epsilon == reg
        cost_NM = cost_NM if iterations == 0 else make_cost()
        _remake_kernel(state, cost_NM, epsilon)
        allowed = max_iterations - iterations if final else min(_COARSE_ITERATIONS, max_iterations - iterations)
        target = tolerance if final else _COARSE_TOLERANCE
        used, error = _iterate(state, make_cost, epsilon=epsilon, most=max(1, allowed), target=target)
        iterations += used
    del cost_NM
    entropy, cost, row_error, column_error = _measure(state, reg)
    floor = _floor(state, reg)
    solution = Solution(
        rows=n,
        columns=m,
        iterations=iterations,
        converged=min(error, row_error) <= max(tolerance, 10 * floor),
        row_error=row_error,
        column_error=column_error,
        entropy=entropy,
        cost=cost * unit,
    )
    return SinkhornMap(state, factor, solution)


def _begin(cost_NM: Tensor) -> _State:
    """Potentials by one c-transform each: every row and column of the first kernel has an entry of one."""
    f_N = cost_NM.amin(1)
    g_M = torch.full_like(cost_NM[0], math.inf)
    for rows in _blocks(cost_NM):
        torch.minimum(g_M, (cost_NM[rows] - f_N[rows, None]).amin(0), out=g_M)
    n = len(f_N)
    return _State(cost_NM, f_N, g_M, torch.full_like(f_N, 1 / n), torch.full_like(g_M, 1.0))


def _schedule(spread: float, reg: float) -> list[float]:
    """ε from a tenth of the cost's spread down to `reg`; just `reg` where that is already as large."""
    steps: list[float] = []
    epsilon = spread / 10
    while epsilon > reg * 1.5:
        steps.append(epsilon)
        epsilon /= _EPSILON_STEP
    return [*steps, reg]


def _remake_kernel(state: _State, cost_NM: Tensor, epsilon: float) -> None:
    """K = exp(−(C − f − g)/ε) in place of the cost."""
    for rows in _blocks(cost_NM):
        block = cost_NM[rows]
        block -= state.f_N[rows, None]
        block -= state.g_M
        block.mul_(-1 / epsilon).exp_()
    state.kernel_NM = cost_NM


def _iterate(
    state: _State, make_cost: Callable[[], Tensor], *, epsilon: float, most: int, target: float
) -> tuple[int, float]:
    """Sinkhorn's updates until the row marginals are within `target` in L1; returns iterations and that error.

    Stops too when float rounding, not convergence, is what is left of the error.
    """
    n, m = state.kernel_NM.shape
    state.u_N.fill_(1 / n)
    state.v_M.fill_(1.0)
    best, since_best, error = math.inf, 0, math.inf
    floor = _floor(state, epsilon)
    for iteration in range(1, most + 1):
        gap, column_sum_M = _sweep(state)
        torch.div(1 / m, column_sum_M, out=state.v_M)
        # Reading a number waits for the device: every few rounds is often enough there.
        if state.kernel_NM.is_cuda and iteration % 8 and iteration < most:
            continue
        largest = float(torch.maximum(_log_range(state.u_N, 1 / n), _log_range(state.v_M, 1.0)))
        if not largest < _ABSORB_AT:
            _absorb(state, make_cost, epsilon)
            continue
        error = float(gap)
        if iteration > 1 and error <= target:
            return iteration, error
        if error < best:
            best, since_best = error, 0
        else:
            since_best += 1
        if error <= 10 * floor and since_best >= _STAGNANT:
            return iteration, error
    return most, error


def _floor(state: _State, epsilon: float) -> float:
    """The marginal error that rounding leaves: of the sums, and of (C − f − g)/ε, whose terms are rounded first."""
    unit = torch.finfo(state.kernel_NM.dtype).eps
    largest = float(torch.maximum(state.f_N.abs().max(), state.g_M.abs().max()))
    return unit * max(_SUM_ROUNDING, largest / epsilon)


def _sweep(state: _State) -> tuple[Tensor, Tensor]:
    """One pass over K: new u from the row sums, and Kᵀu while each block is at hand.

    Returns the L1 error of the row marginals as they were before, and Kᵀu.
    """
    n = len(state.u_N)
    column_sum_M = torch.zeros_like(state.v_M)
    gap = torch.zeros((), dtype=state.u_N.dtype, device=state.u_N.device)
    for rows in _blocks(state.kernel_NM):
        block = state.kernel_NM[rows]
        row_sum = block @ state.v_M
        gap += (state.u_N[rows] * row_sum - 1 / n).abs().sum()
        u = torch.div(1 / n, row_sum)
        state.u_N[rows] = u
        column_sum_M.addmv_(block.T, u)
    return gap, column_sum_M


def _log_range(scaling: Tensor, neutral: float) -> Tensor:
    return (scaling / neutral).log().abs().amax().nan_to_num(math.inf, math.inf, math.inf)


def _absorb(state: _State, make_cost: Callable[[], Tensor], epsilon: float) -> None:
    """Move the scalings into the potentials and make K anew; scalings that left the floats are cut first."""
    n = len(state.u_N)
    for potential, scaling, neutral in ((state.f_N, state.u_N, 1 / n), (state.g_M, state.v_M, 1.0)):
        logs = (scaling / neutral).log().nan_to_num(0.0, 80.0, -80.0).clamp_(-80.0, 80.0)
        potential += epsilon * logs
        scaling.fill_(neutral)
    _remake_kernel(state, make_cost(), epsilon)


def _measure(state: _State, epsilon: float) -> tuple[float, float, float, float]:
    """Entropy, cost and both marginal errors of T, block by block, summed in float64."""
    n, m = state.kernel_NM.shape
    entropy = cost = row_error = 0.0
    columns = torch.zeros_like(state.v_M, dtype=torch.float64)
    for rows in _blocks(state.kernel_NM):
        mass = state.kernel_NM[rows] * state.u_N[rows, None] * state.v_M
        entropy -= float(torch.xlogy(mass, mass).sum(dtype=torch.float64))
        # C = f + g − ε log K wherever there is mass.
        logs = torch.xlogy(mass, state.kernel_NM[rows])
        cost += float((mass * (state.f_N[rows, None] + state.g_M) - epsilon * logs).sum(dtype=torch.float64))
        row_error += float((mass.sum(1, dtype=torch.float64) - 1 / n).abs().sum())
        columns += mass.sum(0, dtype=torch.float64)
    return entropy, cost, row_error, float((columns - 1 / m).abs().sum())


def _blocks(matrix: Tensor) -> list[slice]:
    """Row blocks that fit a core's cache on the CPU; everything at once on a device."""
    n, m = matrix.shape
    step = n if matrix.is_cuda else max(1, _BLOCK_ELEMENTS // max(1, m))
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]
