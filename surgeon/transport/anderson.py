"""Anderson acceleration of a fixed-point iteration x ← F(x), without reading a number back from the device.

(Anderson 1965; type II of Walker & Ni 2011: the combination of past iterates whose residuals F(x) − x combine to
the least. Near a solution of Sinkhorn's iteration it converges about as fast as conjugate gradients on the dual,
where the plain iteration crawls: ten times fewer passes over the kernel at the regularisations of interest.)
"""

from __future__ import annotations

import torch
from torch import Tensor

_MEMORY = 8
# Keeps the little system solvable when past residuals are multiples of each other.
_RIDGE = 1e-10


class Anderson:
    """The last few iterates and their residuals, in float64."""

    def __init__(self, size: int, *, device: torch.device) -> None:
        self._iterates = torch.zeros(_MEMORY, size, dtype=torch.float64, device=device)
        self._residuals = torch.zeros_like(self._iterates)
        self._count = 0

    def forget(self) -> None:
        """Start anew: the next step is a plain one."""
        self._count = 0

    def step(self, x_M: Tensor, residual_M: Tensor) -> Tensor:
        """The next iterate, from x, F(x) − x and what is remembered of the steps before."""
        known = min(self._count, _MEMORY)
        if known:
            residual_change = self._residuals[:known] - residual_M
            change = self._iterates[:known] - x_M
            scale = residual_change.norm(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float64).tiny)
            basis = residual_change / scale
            gram = basis @ basis.T
            gram.diagonal().add_(_RIDGE)
            # The variant that does not check its result does not wait for the device; a caller sees what came of it.
            weights, _ = torch.linalg.solve_ex(gram, -(basis @ residual_M))
            following: Tensor = x_M + residual_M + (weights / scale[:, 0]) @ (change + residual_change)
        else:
            following = x_M + residual_M
        slot = self._count % _MEMORY
        self._iterates[slot] = x_M
        self._residuals[slot] = residual_M
        self._count += 1
        return following
