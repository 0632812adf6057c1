"""Exact optimal transport with uniform marginals: a linear assignment where both sides are equal, else POT's EMD."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from torch import Tensor

from surgeon.transport.maps import AssignmentMap, DenseMap
from surgeon.transport.problem import Solution

_MOST_PIVOTS = 10_000_000


def exact(cost_NM: Tensor, *, unit: float, factor: float, tolerance: float) -> AssignmentMap | DenseMap:
    """The cheapest map for the cost C / unit; solved on the CPU in float64.

    With as many rows as columns some optimum is a permutation (Birkhoff), and that is what is found.
    """
    n, m = cost_NM.shape
    host = cost_NM.detach().to("cpu", torch.float64).numpy()
    if n == m:
        from scipy.optimize import linear_sum_assignment

        rows, columns = linear_sum_assignment(host)
        target = torch.from_numpy(np.asarray(columns)).to(cost_NM.device)
        solution = Solution(n, m, 1, True, 0.0, 0.0, math.log(n), float(host[rows, columns].mean()) * unit)
        return AssignmentMap(target, factor=factor, dtype=cost_NM.dtype, solution=solution)
    import ot

    with warnings.catch_warnings():
        # What POT warns of (too few pivots) is told by `converged`.
        warnings.simplefilter("ignore")
        plan, log = ot.emd(np.full(n, 1 / n), np.full(m, 1 / m), host, numItermax=_MOST_PIVOTS, log=True)
    mass = plan[plan > 0]
    row_error = float(np.abs(plan.sum(1) - 1 / n).sum())
    column_error = float(np.abs(plan.sum(0) - 1 / m).sum())
    solution = Solution(
        rows=n,
        columns=m,
        iterations=1,
        converged=log["warning"] is None and max(row_error, column_error) <= max(tolerance, 1e-9),
        row_error=row_error,
        column_error=column_error,
        entropy=float(-(mass * np.log(mass)).sum()),
        cost=float((plan * host).sum()) * unit,
    )
    scaled = torch.from_numpy(plan * factor).to(cost_NM.device, cost_NM.dtype)
    return DenseMap(scaled, factor=factor, solution=solution)
