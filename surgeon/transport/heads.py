"""Aligning whole attention heads: rows stay in their head, rotary pairs stay pairs, groups stay groups.

If rows of Q and K are matched one by one, they end up in other heads and at other rotary frequencies; the scores of
such a layer are no longer those of attention heads. Here T = H ⊗ I/head_dim for a map H between heads. Grouped-query
attention makes H two-staged: H[(g, a), (g', b)] = P[g, g'] · R_{g g'}[a, b], where P maps groups of heads that share a
key and value head, and R maps the query heads within a pair of groups. Keys and values use P, queries H: one choice for
all of Q, K, V and the columns of O.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surgeon.transport.cost import distances, product
from surgeon.transport.maps import Solution, TransportMap, TransportSettings
from surgeon.transport.solving import check_rows, solve_cost


@dataclass(frozen=True)
class AttentionWeights:
    """One layer's projections, rows as outputs: query (heads · head_dim, d), key and value (kv heads · head_dim, d).

    `output` (d, heads · head_dim) is compared by its columns.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


@dataclass(frozen=True)
class HeadMaps:
    """The maps of the rows of Q, and of K and V; `query` is also the T_in of the attention output."""

    query: TransportMap
    key: TransportMap


class HeadMap(TransportMap):
    """A map T = H ⊗ I/head_dim, stored as s · H / head_dim."""

    def __init__(self, heads_NM: Tensor, *, head_dim: int, factor: float, solution: Solution) -> None:
        self.solution = solution
        self._head_dim = head_dim
        self._factor = factor
        self._scaled = heads_NM

    def align_rows(self, weight_ND: Tensor) -> Tensor:
        """Return s · Tᵀ · W, (m, d)."""
        heads = weight_ND.to(self._scaled.dtype).reshape(len(self._scaled), -1)
        return product(self._scaled.T, heads).reshape(self.m, *weight_ND.shape[1:])

    def align_columns(self, weight_RN: Tensor) -> Tensor:
        """Return s · W · T, (r, m)."""
        heads = weight_RN.to(self._scaled.dtype).reshape(len(weight_RN), -1, self._head_dim)
        return torch.einsum("rnh,nm->rmh", heads, self._scaled).reshape(len(weight_RN), self.m)

    def matrix(self) -> Tensor:
        """Return T itself, (n, m)."""
        within = torch.eye(self._head_dim, dtype=self._scaled.dtype, device=self._scaled.device)
        return torch.kron(self._scaled, within) / self._factor


def head_maps(
    source: AttentionWeights,
    target: AttentionWeights,
    settings: TransportSettings,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
) -> HeadMaps:
    """Return maps that send whole heads of `source` onto those of `target`, solved on the source's device.

    The cost of two heads is the root mean square of the distances between their rows, so `reg` has the same scale as
    for single rows. With `solver="emd"` each group, and each head in it, maps to exactly one other.

    Args:
        source: the lower layer's projections.
        target: the upper layer's.
        settings: how maps are solved.
        n_heads: query heads.
        n_kv_heads: heads of keys and values.
        head_dim: rows of a head.

    Raises:
        ValueError: rows that are not finite, or a cost beyond what its dtype holds.
    """
    device = source.query.device
    group = n_heads // n_kv_heads
    parts = ((source.query, target.query), (source.output.T, target.output.T))
    query_NN, query_rows = _squared(parts, n_heads, device)
    key_GG, key_rows = _squared(((source.key, target.key), (source.value, target.value)), n_kv_heads, device)
    within = _map_within(query_NN.view(n_kv_heads, group, n_kv_heads, group), query_rows, settings)
    shared = torch.einsum("gahb,gahb->gh", within.plans, query_NN.view(n_kv_heads, group, n_kv_heads, group))
    squared = (key_GG + group * shared) / (key_rows + group * query_rows)
    between = solve_cost(lambda: squared.T.sqrt().contiguous(), settings)
    groups = between.matrix().double()
    heads = (groups[:, None, :, None] * within.plans).reshape(n_heads, n_heads)
    dtype = torch.float64 if source.query.dtype == torch.float64 else torch.float32
    like = torch.empty(0, dtype=dtype, device=device)
    key = _head_map(groups, head_dim, settings, between.solution, like)
    solution = dataclasses.replace(
        between.solution,
        iterations=between.solution.iterations + within.iterations,
        converged=between.solution.converged and within.converged,
    )
    return HeadMaps(_head_map(heads, head_dim, settings, solution, like), key)


@dataclass(frozen=True)
class _Within:
    """The plans between the query heads of every pair of groups, (g, a, g', b); each plan sums to 1."""

    plans: Tensor
    iterations: int
    converged: bool


def _map_within(squared_GAGA: Tensor, rows: int, settings: TransportSettings) -> _Within:
    """Solve the maps between query heads within every pair of groups; with one head per group there is no choice."""
    groups, group = squared_GAGA.shape[:2]
    plans = torch.ones_like(squared_GAGA, dtype=torch.float64)
    if group == 1:
        return _Within(plans, 0, True)
    cost_GAGA = (squared_GAGA / rows).sqrt()
    # One unit for all pairs of groups: if each had its own unit, all would be equally cheap.
    unit = {"none": 1.0, "max": float(cost_GAGA.max()), "mean": float(cost_GAGA.mean())}[settings.cost_scale] or 1.0
    inner = dataclasses.replace(settings, cost_scale="none", reg=settings.reg * unit)
    iterations, converged = 0, True
    for g in range(groups):
        for h in range(groups):
            solved = solve_cost(cost_GAGA[g, :, h].T.contiguous().clone, inner)
            plans[g, :, h] = solved.matrix()
            iterations = max(iterations, solved.solution.iterations)
            converged = converged and solved.solution.converged
    return _Within(plans, iterations, converged)


def _head_map(
    heads_NM: Tensor, head_dim: int, settings: TransportSettings, solution: Solution, like: Tensor
) -> HeadMap:
    """Turn a plan between heads (float64, summing to 1) into the map of their rows, with a solution for that map."""
    n, m = heads_NM.shape
    factor = settings.factor(m * head_dim)
    whole = dataclasses.replace(
        solution,
        rows=n * head_dim,
        columns=m * head_dim,
        row_error=float((heads_NM.sum(1) - 1 / n).abs().sum()),
        column_error=float((heads_NM.sum(0) - 1 / m).abs().sum()),
        entropy=-float(torch.xlogy(heads_NM, heads_NM).sum()) + math.log(head_dim),
    )
    scaled = (heads_NM * (factor / head_dim)).to(like)
    return HeadMap(scaled, head_dim=head_dim, factor=factor, solution=whole)


def _squared(parts: tuple[tuple[Tensor, Tensor], ...], heads: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the squared distances between heads, summed over parts and rows, and the number of these rows.

    The result is on the CPU in float64: problems of a few dozen heads are solved there.
    """
    total: Tensor | None = None
    rows = 0
    for x, y in parts:
        check_rows(x, y)
        dtype = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
        apart = distances(x.to(device, dtype).reshape(heads, -1), y.to(device, dtype).reshape(heads, -1))
        squared = apart.to("cpu", torch.float64).square_()
        total = squared if total is None else total + squared
        rows += len(x) // heads
    assert total is not None
    return total, rows
