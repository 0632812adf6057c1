"""Modules whose tensors are born with stated values, and low-rank products of such."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import transformers.initialization as init
from torch import Tensor, nn
from torch.nn import functional as F

from .births import Birth


class Leaf(nn.Module):
    """A module of a graft whose tensors are its own, so that every loader initialises it as a whole."""

    def initialise(self) -> None:
        """Begin, where no checkpoint brings values, with zeros: silent."""
        for tensor in (*self.parameters(recurse=False), *self.buffers(recurse=False)):
            init.zeros_(tensor)


class Newborn(Leaf):
    """One whose tensors are stated by their births."""

    births: Mapping[str, Birth]

    def bear(self, births: Mapping[str, Birth]) -> None:
        """Make a parameter for each birth."""
        self.births = births
        for name, birth in births.items():
            self.register_parameter(name, nn.Parameter(torch.empty(birth.shape)))

    def initialise(self) -> None:
        """Those that they are born with."""
        for name, birth in self.births.items():
            birth.fill(getattr(self, name))


def as_linear(matrix: Tensor) -> None:
    """Fill a matrix, where no checkpoint did, with the variance of `nn.Linear`: 1/(3 · columns)."""
    init.normal_(matrix, std=math.sqrt(1 / (3 * matrix.shape[1])))


class LowRank(Leaf):
    """B A, with B zero at birth: `lora_A` is rank × in, `lora_B` out × rank.

    What uses the matrices calls the module for them, so that hooks which bring weights and take them away see it.
    """

    def __init__(self, rank: int, width_in: int, width_out: int) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, width_in))
        self.lora_B = nn.Parameter(torch.empty(width_out, rank))

    def initialise(self) -> None:
        """A as `nn.Linear` has it, B zero."""
        super().initialise()
        as_linear(self.lora_A)

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
