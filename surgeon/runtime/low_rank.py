"""A product B A of two narrow matrices, which stands beside a block or a linear module."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .births import low_rank_births
from .newborn import Newborn


class LowRank(Newborn):
    """B A, with B zero at birth: `lora_A` is rank × in, `lora_B` out × rank.

    What uses the matrices calls the module for them, so that hooks which bring weights and take them away see it.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(self, rank: int, width_in: int, width_out: int) -> None:
        super().__init__()
        self.bear(low_rank_births(rank, width_in, width_out))

    def forward(self) -> tuple[Tensor, Tensor]:
        """A and B."""
        return self.lora_A, self.lora_B


def product(x: Tensor, matrices: tuple[Tensor, Tensor], weight: float | Tensor = 1.0) -> Tensor:
    """B A x: … in to … out, times `weight` (a number, or … 1)."""
    down, up = matrices
    narrow = F.linear(x, down)
    if not isinstance(weight, float):
        narrow = narrow * weight.to(narrow.dtype)
    elif weight != 1.0:
        narrow = narrow * weight
    return F.linear(narrow, up)
