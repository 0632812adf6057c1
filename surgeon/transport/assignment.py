"""Experts of two layers, matched one to one by the rows of their routers."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from surgeon.transport.maps import AssignmentMap, Solution
from surgeon.transport.solving import check_rows


def match_rows(source_ED: Tensor, target_ED: Tensor, *, groups: int = 1) -> AssignmentMap:
    """The permutation of rows of the source onto those of the target with the least sum of squared distances.

    Squared, it is the permutation with the largest sum of inner products: it stays the same where one side is scaled
    as a whole, or has one vector added to all its rows (which no softmax over experts notices). With `groups`, of which
    a router first chooses some, whole groups of consecutive rows go onto whole groups. The map is applied as a
    permutation, unscaled; its cost is the mean squared distance. Solved in float64 on the CPU. Raises ValueError in one
    line for rows that do not match, are not finite, or do not make `groups` of one size.
    """
    check_rows(source_ED, target_ED)
    count = len(source_ED)
    if len(target_ED) != count or groups < 1 or count % groups:
        raise ValueError(f"{count} and {len(target_ED)} experts in {groups} groups cannot be matched one to one")
    squared = _squared_distances(source_ED, target_ED)
    size = count // groups
    between, target = np.empty((groups, groups)), np.empty((groups, groups, size), dtype=np.int64)
    for g in range(groups):
        for h in range(groups):
            cost = squared[g * size : (g + 1) * size, h * size : (h + 1) * size]
            chosen = _assign(cost)
            between[g, h] = cost[np.arange(size), chosen].sum()
            target[g, h] = h * size + chosen
    found = target[np.arange(groups), _assign(between)].reshape(-1)
    mean = float(squared[np.arange(count), found].mean())
    solution = Solution(count, count, 1, True, 0.0, 0.0, math.log(count), mean)
    dtype = torch.promote_types(source_ED.dtype, torch.float32)
    return AssignmentMap(
        torch.from_numpy(found).to(source_ED.device), factor=float(count), dtype=dtype, solution=solution
    )


def _squared_distances(source_ED: Tensor, target_ED: Tensor) -> np.ndarray:
    """Compute them in float64, from the differences themselves, so that near-equal rows keep their order."""
    x, y = (rows.detach().to("cpu", torch.float64) for rows in (source_ED, target_ED))
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square().numpy()


def _assign(cost: np.ndarray) -> np.ndarray:
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(cost)
    return np.asarray(columns)
