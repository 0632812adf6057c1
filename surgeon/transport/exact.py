"""Exact optimal transport with uniform marginals: a linear assignment where both sides are equal, else POT's EMD."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from surgeon.transport.problem import Solution


class AssignmentMap:
    """T = P/n for a permutation P: row i goes whole to row `target[i]`."""

    def __init__(self, target_N: Tensor, factor: float, solution: Solution) -> None:
        self.solution = solution
        self._target = target_N
        self._source = torch.argsort(target_N)
        self._scale = factor / len(target_N)

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """s · Tᵀ · W, (n, d)."""
        return weight_ND[self._source] * self._scale

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """s · W · T, (r, n)."""
        return weight_RN[:, self._source] * self._scale

    def matrix(self) -> Tensor:
        """T itself, (n, n)."""
        n = len(self._target)
        full = torch.zeros(n, n, device=self._target.device)
        full[torch.arange(n, device=full.device), self._target] = 1 / n
        return full


class DenseMap:
    """T held as it is."""

    def __init__(self, matrix_NM: Tensor, factor: float, solution: Solution) -> None:
        self.solution = solution
        self._matrix = matrix_NM
        self._factor = factor

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """s · Tᵀ · W, (m, d)."""
        return (self._matrix.T @ weight_ND) * self._factor

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """s · W · T, (r, m)."""
        return (weight_RN @ self._matrix) * self._factor

    def matrix(self) -> Tensor:
        """T itself, (n, m)."""
        return self._matrix


def exact(cost_NM: Tensor, *, unit: float, factor: float) -> AssignmentMap | DenseMap:
    """The cheapest map for the cost C / unit; solved on the CPU in float64."""
    n, m = cost_NM.shape
    host = cost_NM.detach().to("cpu", torch.float64).numpy()
    if n == m:
        from scipy.optimize import linear_sum_assignment

        rows, columns = linear_sum_assignment(host)
        target = torch.from_numpy(np.asarray(columns)).to(cost_NM.device)
        solution = Solution(n, m, 1, True, 0.0, 0.0, math.log(n), float(host[rows, columns].mean()) * unit)
        return AssignmentMap(target, factor, solution)
    import ot

    plan, log = ot.emd(np.full(n, 1 / n), np.full(m, 1 / m), host, numItermax=10_000_000, log=True)
    mass = plan[plan > 0]
    solution = Solution(
        rows=n,
        columns=m,
        iterations=1,
        converged=log["warning"] is None,
        row_error=float(np.abs(plan.sum(1) - 1 / n).sum()),
        column_error=float(np.abs(plan.sum(0) - 1 / m).sum()),
        entropy=float(-(mass * np.log(mass)).sum()),
        cost=float((plan * host).sum()) * unit,
    )
    return DenseMap(torch.from_numpy(plan).to(cost_NM.device, cost_NM.dtype), factor, solution)
