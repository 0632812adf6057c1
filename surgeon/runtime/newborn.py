"""Modules whose tensors are born with stated values, and low-rank products of such."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .births import Birth, low_rank_births


class Newborn(nn.Module):
    """A leaf module: its tensors are its own, so that every loader initialises it as a whole."""

    births: Mapping[str, Birth]

    def bear(self, births: Mapping[str, Birth]) -> None:
        """Make a parameter for each birth."""
        self.births = births
        for name, birth in births.items():
            self.register_parameter(name, nn.Parameter(torch.empty(birth.shape)))

    def initialise(self) -> None:
        """Set the values that the tensors are born with (a checkpoint's values replace them)."""
        for name, birth in self.births.items():
            birth.fill(getattr(self, name))


class Projection(Newborn, nn.Linear):
    """A linear module without bias whose matrix is born with stated values."""

    def __init__(self, birth: Birth) -> None:
        nn.Linear.__init__(self, birth.shape[1], birth.shape[0], bias=False)
        self.births = {"weight": birth}


def without(module: Newborn, *names: str) -> None:
    """Give a module None for those of the names that no tensor was born by."""
    for name in names:
        if name not in module.births:
            module.register_parameter(name, None)


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
