"""Transport maps by how T is held: dense, as a permutation, as the identity, as ½ (T + I)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surgeon.transport.cost import product, transposed_product
from surgeon.transport.problem import Solution, TransportMap


class DenseMap(TransportMap):
    """s · T in one buffer, which this map owns from then on."""

    def __init__(self, scaled_NM: Tensor, *, factor: float, solution: Solution) -> None:
        self.solution = solution
        self._scaled = scaled_NM
        self._factor = factor

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """s · Tᵀ · W, (m, d)."""
        return transposed_product(self._scaled, weight_ND.to(self._scaled.dtype))

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """s · W · T, (r, m)."""
        return product(weight_RN.to(self._scaled.dtype), self._scaled)

    def matrix(self) -> Tensor:
        """T itself, (n, m)."""
        return self._scaled / self._factor


class AssignmentMap(TransportMap):
    """T = P/n for a permutation P: row i goes whole to row `target[i]`."""

    def __init__(self, target_N: Tensor, *, factor: float, dtype: torch.dtype, solution: Solution) -> None:
        self.solution = solution
        self._target = target_N
        self._source = torch.argsort(target_N)
        self._scale = factor / len(target_N)
        self._dtype = dtype

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """s · Tᵀ · W, (n, d)."""
        return weight_ND[self._source].to(self._dtype).mul_(self._scale)

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """s · W · T, (r, n)."""
        return weight_RN[:, self._source].to(self._dtype).mul_(self._scale)

    def matrix(self) -> Tensor:
        """T itself, (n, n)."""
        n = len(self._target)
        full = torch.zeros(n, n, device=self._target.device, dtype=self._dtype)
        full[torch.arange(n, device=full.device), self._target] = 1 / n
        return full


class IdentityMap(TransportMap):
    """Changes nothing: T = I/n with s = n."""

    def __init__(self, n: int) -> None:
        if n < 1:
            raise ValueError(f"an identity map needs at least one row, not {n}")
        self.solution = Solution(n, n, 0, True, 0.0, 0.0, math.log(n), 0.0)

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """W."""
        return weight_ND

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """W."""
        return weight_RN

    def matrix(self) -> Tensor:
        """I/n."""
        return torch.eye(self.n) / self.n


class HalfIdentity(TransportMap):
    """½ (s·T + I): the mean of a residual stream's two paths (OpT-DeUS, Table 1, normalisation before the MLP).

    Its solution is that of the map inside.
    """

    def __init__(self, inner: TransportMap) -> None:
        if inner.n != inner.m:
            raise ValueError(f"½ (T + I) needs a square map, not one of {inner.n} × {inner.m}")
        self._inner = inner
        self.solution = inner.solution

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """½ (s · Tᵀ · W + W)."""
        return (self._inner.align_rows(weight_ND) + weight_ND).mul_(0.5)

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """½ (s · W · T + W)."""
        return (self._inner.align_columns(weight_RN) + weight_RN).mul_(0.5)

    def matrix(self) -> Tensor:
        """½ (T + I/n), its entries summing to 1."""
        half = self._inner.matrix().mul_(0.5)
        half.diagonal().add_(0.5 / self.n)
        return half


def identity(n: int) -> IdentityMap:
    """The identity map of n rows or columns. Raises ValueError for n below 1."""
    return IdentityMap(n)


def half_identity(inner: TransportMap) -> HalfIdentity:
    """½ (T + I) of a square map. Raises ValueError for any other."""
    return HalfIdentity(inner)
