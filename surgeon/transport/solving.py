"""Solving transport between rows: the cost, then an entropic or exact solver; and matching routers' rows one to one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from surgeon.transport.cost import distances
from surgeon.transport.maps import AssignmentMap, Solution, TransportMap, TransportSettings
from surgeon.transport.sinkhorn import sinkhorn


def exact(cost_NN: Tensor, *, unit: float, factor: float) -> AssignmentMap:
    """Return the cheapest map of n rows onto as many for the cost C / unit, solved on the CPU in float64.

    Some optimum is a permutation (Birkhoff); the solver finds one.

    Args:
        cost_NN: C / unit.
        unit: the number that C was divided by; `Solution.cost` is in C's own unit.
        factor: the factor that the map is multiplied by when it is applied.

    Raises:
        ValueError: the numbers of rows differ.
    """
    n, m = cost_NN.shape
    if n != m:
        raise ValueError(f"{n} rows cannot be mapped one to one onto {m}; use the solver sinkhorn")
    host = cost_NN.detach().to("cpu", torch.float64).numpy()
    columns = _assign(host)
    target = torch.from_numpy(columns).to(cost_NN.device)
    solution = Solution(n, n, 1, True, 0.0, 0.0, math.log(n), float(host[np.arange(n), columns].mean()) * unit)
    return AssignmentMap(target, factor=factor, dtype=cost_NN.dtype, solution=solution)


def solve(source_ND: Tensor, target_MD: Tensor, settings: TransportSettings) -> TransportMap:
    """Return the map from the rows of `source_ND` onto those of `target_MD`, with uniform marginals and Euclidean cost.

    Computes in float32 (float64 where either input is) on the source's device; the largest buffer is (n, m), which
    becomes the map. Raises ValueError where inputs are empty, not finite or do not match, or memory is too small.
    """
    check_rows(source_ND, target_MD)
    wide = torch.float64 in (source_ND.dtype, target_MD.dtype)
    source, target = (
        rows.detach().to(source_ND.device, torch.float64 if wide else torch.float32) for rows in (source_ND, target_MD)
    )
    try:
        return solve_cost(lambda: distances(target, source), settings)
    except (RuntimeError, MemoryError) as error:
        # CUDA has an exception class of its own; on the CPU torch raises a plain RuntimeError.
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ValueError(
            f"a transport map of {len(source)} × {len(target)} rows needs more memory than is free on {source.device}"
        ) from None


def solve_cost(make_cost: Callable[[], Tensor], settings: TransportSettings) -> TransportMap:
    """Return the map for a finite cost that `make_cost` returns as Cᵀ, (m, n); each call must compute it again.

    For costs other than Euclidean distances between rows, for which there is `solve`.
    """
    cost = make_cost()
    match settings.cost_scale:
        case "none":
            unit = 1.0
        case "max":
            unit = float(cost.max())
        case "mean":
            unit = float(cost.mean())
    # All rows are equal: the scale would be 0, and every map costs the same.
    unit = unit or 1.0
    factor = settings.factor(len(cost))
    if settings.solver == "emd":
        return exact(cost.div_(unit).T, unit=unit, factor=factor)
    first = [cost]
    del cost

    def make_scaled_cost() -> Tensor:
        """Return the cost divided by its unit; the first call reuses the cost computed above."""
        # The first cost exists already; later ones are computed again, so that only one buffer of this size exists at a
        # time.
        made = first.pop() if first else make_cost()
        return made.div_(unit) if unit != 1.0 else made

    return sinkhorn(
        make_scaled_cost,
        reg=settings.reg,
        unit=unit,
        factor=factor,
        max_iterations=settings.max_iterations,
        tolerance=settings.tolerance,
    )


def check_rows(source: Tensor, target: Tensor) -> None:
    """Raise ValueError in one line unless both are finite floating-point matrices with rows of one length."""
    for name, rows in (("source", source), ("target", target)):
        if rows.ndim != 2 or 0 in rows.shape:
            raise ValueError(f"the {name} must be a matrix with rows and columns, not of shape {tuple(rows.shape)}")
        if not rows.is_floating_point():
            raise ValueError(f"the {name} must hold floating-point numbers, not {rows.dtype}")
        if not all(math.isfinite(end) for end in torch.stack(torch.aminmax(rows)).tolist()):
            raise ValueError(f"the {name} holds values that are not finite")
    if source.shape[1] != target.shape[1]:
        raise ValueError(f"rows of {source.shape[1]} and of {target.shape[1]} numbers cannot be compared")


def match_rows(source_ED: Tensor, target_ED: Tensor, *, groups: int = 1) -> AssignmentMap:
    """Return the permutation of source rows onto target rows with the least sum of squared distances.

    With squares it is the permutation with the largest sum of inner products: it stays the same if one side is scaled
    as a whole, or if one vector is added to all its rows (which does not change a softmax over experts). With `groups`,
    among which a router first chooses, whole groups of consecutive rows go onto whole groups. The map is applied as a
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
    """Return squared distances in float64, from the differences themselves: near-equal rows keep their order."""
    x, y = (rows.detach().to("cpu", torch.float64) for rows in (source_ED, target_ED))
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square().numpy()


def _assign(cost: np.ndarray) -> np.ndarray:
    """Return for each row the column of the assignment with the least total cost."""
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(cost)
    return np.asarray(columns)
