"""A product B A of two narrow matrices, which stands beside a block or a linear module."""

from __future__ import annotations

import math

import torch
import transformers.initialization as init
from torch import Tensor, nn
from torch.nn import functional as F


class LowRank(nn.Module):
    """B A, with B zero at birth: `lora_A` is rank × in, `lora_B` out × rank.

    What uses the matrices calls the module for them, so that hooks which bring weights and take them away see it.
    """

    def __init__(self, rank: int, width_in: int, width_out: int) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, width_in))
        self.lora_B = nn.Parameter(torch.empty(width_out, rank))

    def forward(self) -> tuple[Tensor, Tensor]:
        """A and B."""
        return self.lora_A, self.lora_B

    def initialise(self) -> None:
        """Variance 1/(3·in), as `nn.Linear` and LoRA have it; the output zero."""
        init.normal_(self.lora_A, mean=0.0, std=math.sqrt(1.0 / (3 * self.lora_A.shape[1])))
        init.zeros_(self.lora_B)


def product(x: Tensor, matrices: tuple[Tensor, Tensor], weight: float | Tensor = 1.0) -> Tensor:
    """B A x: … in to … out, times `weight` (a number, or … 1)."""
    down, up = matrices
    narrow = F.linear(x, down)
    if not isinstance(weight, float):
        narrow = narrow * weight.to(narrow.dtype)
    elif weight != 1.0:
        narrow = narrow * weight
    return F.linear(narrow, up)
