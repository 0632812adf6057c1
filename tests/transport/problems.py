"""Transport problems whose answers are known, and POT's float64 answers to the others."""

from __future__ import annotations

import functools

import numpy as np
import ot
import torch
from scipy.spatial.distance import cdist
from torch import Tensor


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(n: int, m: int, d: int, *, seed: int = 0, norm: float = 1.0) -> tuple[Tensor, Tensor]:
    """Independent rows of about this norm."""
    generator = seeded(seed)
    scale = norm / d**0.5
    return torch.randn(n, d, generator=generator) * scale, torch.randn(m, d, generator=generator) * scale


def permuted(n: int, d: int, *, seed: int = 0, norm: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, the same rows in another order, and that order: target = source[order]."""
    source, _ = gaussian(n, 1, d, seed=seed, norm=norm)
    order = torch.randperm(n, generator=seeded(seed + 1))
    return source, source[order], order


def uneven(n: int, m: int, d: int, *, seed: int = 0, norm: float = 1.0) -> tuple[Tensor, Tensor]:
    """Rows as in trained projections: norms that differ widely, directions with a decaying spectrum."""
    generator = seeded(seed)
    spectrum = torch.arange(1, d + 1).float().rsqrt()

    def rows(count: int) -> Tensor:
        directions = torch.nn.functional.normalize(torch.randn(count, d, generator=generator) * spectrum)
        return directions * (torch.randn(count, 1, generator=generator) * 0.4).exp() * norm

    return rows(n), rows(m)


PROBLEMS = {"gaussian": gaussian, "uneven": uneven}


@functools.cache
def solved_by_pot(problem: str, n: int, m: int, d: int, share: float, error: float = 1e-12) -> np.ndarray:
    """POT's plan for rows of norm one, `reg` a share of the mean cost: the same for rows of any other norm."""
    cost = cost64(*PROBLEMS[problem](n, m, d))
    return pot_log(cost, share * cost.mean(), error=error)


def cost64(source: Tensor, target: Tensor) -> np.ndarray:
    return cdist(source.double().numpy(), target.double().numpy())


def pot_log(cost: np.ndarray, reg: float, *, error: float = 1e-12) -> np.ndarray:
    """POT's Sinkhorn in float64, to a marginal error that leaves nothing to wish for.

    In the log domain where its stabilised kernel, a tenth of the time and the same to 1e-14, overflows.
    """
    n, m = cost.shape
    alpha, beta = np.full(n, 1 / n), np.full(m, 1 / m)
    method = "sinkhorn_log" if reg < 5e-3 * cost.mean() else "sinkhorn_stabilized"
    plan: np.ndarray = ot.sinkhorn(alpha, beta, cost, reg, method=method, numItermax=100_000, stopThr=error, warn=False)
    return plan
