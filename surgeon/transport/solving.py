"""From two sets of rows to a transport map."""

from __future__ import annotations

import torch
from torch import Tensor

from surgeon.transport.cost import distances
from surgeon.transport.exact import exact
from surgeon.transport.problem import TransportMap, TransportSettings
from surgeon.transport.sinkhorn import sinkhorn


def solve(source_ND: Tensor, target_MD: Tensor, settings: TransportSettings) -> TransportMap:
    """The transport map from the rows of `source_ND` onto those of `target_MD`, uniform marginals, Euclidean cost.

    Works in float32 on the tensors' device (float64 stays float64). ValueError in one line for inputs that are
    empty, not finite, or do not match.
    """
    _check(source_ND, target_MD)
    dtype = torch.float64 if source_ND.dtype == torch.float64 else torch.float32
    source, target = source_ND.to(dtype), target_MD.to(dtype)
    cost = distances(source, target)
    unit = {"none": 1.0, "max": float(cost.max()), "mean": float(cost.mean())}[settings.cost_scale] or 1.0
    factor = float(len(target)) if settings.rescale == "marginal" else 1.0
    if settings.solver == "emd":
        return exact(cost.div_(unit), unit=unit, factor=factor)
    first = [cost]
    del cost

    def make_cost() -> Tensor:
        # The first is at hand; later ones are made anew, so that one buffer of this size is held at a time.
        made = first.pop() if first else distances(source, target)
        return made.div_(unit) if unit != 1.0 else made

    return sinkhorn(
        make_cost,
        reg=settings.reg,
        unit=unit,
        factor=factor,
        max_iterations=settings.max_iterations,
        tolerance=settings.tolerance,
    )


class HalfIdentity:
    """½ (T + I): the mean of a residual stream's two paths (OpT-DeUS, Table 1, normalisation before the MLP)."""

    def __init__(self, inner: TransportMap) -> None:
        self._inner = inner
        self.solution = inner.solution

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """½ (s · Tᵀ · W + W)."""
        return self._inner.align_rows(weight_ND).add_(weight_ND).mul_(0.5)

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """½ (s · W · T + W)."""
        return self._inner.align_columns(weight_RN).add_(weight_RN).mul_(0.5)


def half_identity(inner: TransportMap) -> HalfIdentity:
    """½ (T + I) for a square map."""
    return HalfIdentity(inner)


def _check(source: Tensor, target: Tensor) -> None:
    for name, rows in (("source", source), ("target", target)):
        if rows.ndim != 2 or 0 in rows.shape:
            raise ValueError(f"the {name} must be a matrix with rows and columns, not of shape {tuple(rows.shape)}")
        if not bool(torch.isfinite(rows).all()):
            raise ValueError(f"the {name} holds values that are not finite")
    if source.shape[1] != target.shape[1]:
        raise ValueError(f"rows of {source.shape[1]} and of {target.shape[1]} numbers cannot be compared")
