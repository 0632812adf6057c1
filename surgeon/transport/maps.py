"""Settings of a transport problem, its solution, and the map in several forms: dense, a permutation, ½ (T + I)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from surgeon.transport.cost import product


@dataclass(frozen=True)
class TransportSettings:
    """The settings by which transport maps are solved and applied.

    `reg`: entropic regularisation in the unit of the (scaled) cost; OpT-DeUS §5.5 uses 0.06. `cost_scale`: divide the
    cost by nothing, its maximum or its mean. `rescale`: apply T unscaled, with entries that sum to 1 (`paper`, as the
    public code does), or times the number of its columns, so that each aligned row is a convex combination of rows
    (`marginal`). `tolerance`: L1 distance of T's row sums from 1/n (column sums from 1/m) at which Sinkhorn stops; 0
    means as near as rounding allows.
    """

    reg: float = 0.06
    solver: Literal["sinkhorn", "emd"] = "sinkhorn"
    cost_scale: Literal["none", "max", "mean"] = "none"
    rescale: Literal["paper", "marginal"] = "marginal"
    max_iterations: int = 10_000
    # What float32 can give: about one map in thirty of a real model stops between 1e-6 and 1.6e-6.
    tolerance: float = 2e-6

    def factor(self, columns: int) -> float:
        """Return the factor by which T is scaled when it is applied: 1, or the number of its columns."""
        return float(columns) if self.rescale == "marginal" else 1.0


@dataclass(frozen=True)
class Solution:
    """The numbers of a solved problem, all measured on T as it is applied.

    `iterations`: passes over the kernel, every stage of ε counted. `row_error`, `column_error`: L1 distances of
    T's marginals from uniform; `converged`: both are within the settings' tolerance. `entropy`: of T, in nats, at
    most log(n·m) (OpT-DeUS, Table 8). `cost`: ⟨T, C⟩ with C in its own unit, before `cost_scale`.
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
        """Return the solution as JSON data, for the manifest."""
        return asdict(self)


class TransportMap(ABC):
    """A map T from n rows onto m rows, solved and ready to be applied; s is 1 or m, depending on `rescale`.

    Products are computed in T's dtype (float32, or float64 where the problem was float64) on T's device.
    """

    solution: Solution

    @abstractmethod
    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """Return s · Tᵀ · W, (m, d): each row is an average of rows of W (Algorithm 1, line 8)."""

    @abstractmethod
    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """Return s · W · T, (r, m): the input side follows an earlier module's map (Algorithm 1, line 6)."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """Return T itself, (n, m), its entries summing to 1, in a new buffer."""

    @property
    def n(self) -> int:
        """The number of rows of T, which is the number of source rows."""
        return self.solution.rows

    @property
    def m(self) -> int:
        """The number of columns of T, which is the number of target rows."""
        return self.solution.columns


class DenseMap(TransportMap):
    """A map stored as s · Tᵀ, (m, n), in one buffer that it owns; both products read it row by row."""

    def __init__(self, scaled_MN: Tensor, *, factor: float, solution: Solution) -> None:
        self.solution = solution
        self._scaled = scaled_MN
        self._factor = factor

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """Return s · Tᵀ · W, (m, d)."""
        return product(self._scaled, weight_ND.to(self._scaled.dtype))

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """Return s · W · T, (r, m)."""
        return product(weight_RN.to(self._scaled.dtype), self._scaled.T)

    def matrix(self) -> Tensor:
        """Return T itself, (n, m)."""
        return (self._scaled / self._factor).T.contiguous()


class AssignmentMap(TransportMap):
    """A map T = P/n for a permutation P: row i goes whole to row `target[i]`."""

    def __init__(self, target_N: Tensor, *, factor: float, dtype: torch.dtype, solution: Solution) -> None:
        self.solution = solution
        self._target = target_N
        self._source = torch.argsort(target_N)
        self._scale = factor / len(target_N)
        self._dtype = dtype

    def source_of(self, row: int) -> int:
        """Return which row of the source goes to this row of the target."""
        return int(self._source[row])

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """Return s · Tᵀ · W, (n, d)."""
        return weight_ND[self._source].to(self._dtype).mul_(self._scale)

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """Return s · W · T, (r, n)."""
        return weight_RN[:, self._source].to(self._dtype).mul_(self._scale)

    def matrix(self) -> Tensor:
        """Return T itself, (n, n)."""
        n = len(self._target)
        full = torch.zeros(n, n, device=self._target.device, dtype=self._dtype)
        full[torch.arange(n, device=full.device), self._target] = 1 / n
        return full


class HalfIdentity(TransportMap):
    """A map ½ (s·T + I): the mean of a residual stream's two paths (OpT-DeUS, Table 1, normalisation before the MLP).

    Its solution is that of the inner map T. Raises ValueError for a map that is not square.
    """

    def __init__(self, inner: TransportMap) -> None:
        if inner.n != inner.m:
            raise ValueError(f"½ (T + I) needs a square map, not one of {inner.n} × {inner.m}")
        self._inner = inner
        self.solution = inner.solution

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """Return ½ (s · Tᵀ · W + W)."""
        return (self._inner.align_rows(weight_ND) + weight_ND).mul_(0.5)

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """Return ½ (s · W · T + W)."""
        return (self._inner.align_columns(weight_RN) + weight_RN).mul_(0.5)

    def matrix(self) -> Tensor:
        """Return ½ (T + I/n), its entries summing to 1."""
        half = self._inner.matrix().mul_(0.5)
        half.diagonal().add_(0.5 / self.n)
        return half


class Spread(TransportMap):
    """A map T ⊗ I/size: whole units of `size` rows onto whole units, for a map T between units.

    Its solution is derived from T's. `factor` multiplies the inner map's own scale: 1, or 1/size where entries sum to
    1.
    """

    def __init__(self, inner: TransportMap, size: int, factor: float) -> None:
        self._inner, self._size, self._factor = inner, size, factor
        of = inner.solution
        self.solution = replace(of, rows=of.rows * size, columns=of.columns * size, entropy=of.entropy + math.log(size))

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """Return s · Tᵀ · W, (m · size, d)."""
        units = weight_ND.reshape(self._inner.n, -1)
        return self._inner.align_rows(units).mul_(self._factor).reshape(-1, *weight_ND.shape[1:])

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """Return s · W · T, (r, m · size)."""
        units = weight_RN.reshape(len(weight_RN), self._inner.n, self._size).transpose(1, 2)
        made = self._inner.align_columns(units.reshape(-1, self._inner.n)).mul_(self._factor)
        return made.reshape(len(weight_RN), self._size, -1).transpose(1, 2).reshape(len(weight_RN), -1)

    def matrix(self) -> Tensor:
        """Return T ⊗ I/size itself, its entries summing to 1."""
        within = torch.eye(self._size).to(inner := self._inner.matrix())
        return torch.kron(inner, within) / self._size
