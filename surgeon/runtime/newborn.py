"""Modules of grafts that fill their own tensors when they are new, and low-rank products."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import transformers.initialization as init
from torch import Tensor, nn
from torch.nn import functional as F

from .births import Birth


class Leaf(nn.Module):
    """A module of a graft that holds its tensors directly, so that every loader initialises it as a whole."""

    def initialise(self) -> None:
        """Fill the tensors that no checkpoint has filled with zeros, so that the module is silent."""
        for tensor in (*self.parameters(recurse=False), *self.buffers(recurse=False)):
            init.zeros_(tensor)


class Newborn(Leaf):
    """A leaf with one tensor for each of its births."""

    births: Mapping[str, Birth]

    def bear(self, births: Mapping[str, Birth]) -> None:
        """Register a parameter for each birth, without values."""
        self.births = births
        for name, birth in births.items():
            self.register_parameter(name, nn.Parameter(torch.empty(birth.shape)))

    def initialise(self) -> None:
        """Fill each tensor by its birth."""
        for name, birth in self.births.items():
            birth.fill(getattr(self, name))


def as_linear(matrix: Tensor) -> None:
    """Fill a matrix, unless a checkpoint has, with normal values of `nn.Linear`'s variance: 1/(3 · columns)."""
    init.normal_(matrix, std=math.sqrt(1 / (3 * matrix.shape[1])))


class LowRank(Leaf):
    """A low-rank product B A, with B zero at birth: `lora_A` is rank × in, `lora_B` out × rank.

    Code that uses the matrices gets them by a call of the module, so that hooks can load and unload the weights.
    """

    def __init__(self, rank: int, width_in: int, width_out: int) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, width_in))
        self.lora_B = nn.Parameter(torch.empty(width_out, rank))

    def initialise(self) -> None:
        """Fill A with the variance of `nn.Linear`, and B with zeros."""
        super().initialise()
        as_linear(self.lora_A)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return A and B."""
        return self.lora_A, self.lora_B


def product(x: Tensor, matrices: tuple[Tensor, Tensor], weight: float | Tensor = 1.0) -> Tensor:
    """Return B A x times `weight` (a number, or … 1): … in to … out; `matrices` are A and B."""
    down, up = matrices
    narrow = F.linear(x, down)
    if not isinstance(weight, float):
        narrow = narrow * weight.to(narrow.dtype)
    elif weight != 1.0:
        narrow = narrow * weight
    return F.linear(narrow, up)
