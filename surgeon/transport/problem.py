"""What is asked of a transport problem, and what comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class TransportSettings:
    """How transport maps are solved and applied.

    `reg`: entropic regularisation in the unit of the (scaled) cost; OpT-DeUS §5.5 takes 0.06. `cost_scale`:
    divide the cost by nothing, its maximum or its mean. `rescale`: apply T as it is, whose entries sum to 1
    (`paper`, as the public code does), or times the number of its columns, so that each aligned row is a
    convex combination of rows (`marginal`). `tolerance`: L1 distance of the row sums of T from 1/n at which
    Sinkhorn stops; column sums are exact to rounding. ValueError for settings that make no sense.
    """

    reg: float = 0.06
    solver: Literal["sinkhorn", "emd"] = "sinkhorn"
    cost_scale: Literal["none", "max", "mean"] = "none"
    rescale: Literal["paper", "marginal"] = "marginal"
    max_iterations: int = 10_000
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        if not (math.isfinite(self.reg) and 0 < self.reg <= 1e12):
            raise ValueError(f"reg must be a finite number above 0, not {self.reg}")
        if self.solver not in ("sinkhorn", "emd"):
            raise ValueError(f"solver must be sinkhorn or emd, not {self.solver!r}")
        if self.cost_scale not in ("none", "max", "mean"):
            raise ValueError(f"cost_scale must be none, max or mean, not {self.cost_scale!r}")
        if self.rescale not in ("paper", "marginal"):
            raise ValueError(f"rescale must be paper or marginal, not {self.rescale!r}")
        if self.max_iterations < 1 or not self.tolerance > 0:
            raise ValueError("max_iterations must be at least 1 and tolerance above 0")


@dataclass(frozen=True)
class Solution:
    """The numbers of a solved problem.

    `row_error`, `column_error`: L1 distances of T's marginals from uniform. `entropy`: of T, in nats, at most
    log(n·m) (OpT-DeUS, Table 8). `cost`: ⟨T, C⟩ with C in its own unit, before `cost_scale`.
    """

    rows: int
    columns: int
    iterations: int
    converged: bool
    row_error: float
    column_error: float
    entropy: float
    cost: float

    def to_report(self) -> dict[str, Any]:
        """As JSON data, for the manifest."""
        return {
            "rows": self.rows,
            "columns": self.columns,
            "iterations": self.iterations,
            "converged": self.converged,
            "row_error": self.row_error,
            "column_error": self.column_error,
            "entropy": self.entropy,
            "cost": self.cost,
        }


class TransportMap(Protocol):
    """A map T from n rows onto m rows, solved and ready to be applied; s is 1 or m by `rescale`."""

    solution: Solution

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """s · Tᵀ · W, (m, d): each row an average of rows of W (Algorithm 1, line 8)."""

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """s · W · T, (r, m): the input side follows an earlier module's map (Algorithm 1, line 6)."""
