"""What a graft's tensors hold at birth: data that the planner makes recipes of, and modules their first values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Birth:
    """What a tensor holds at birth: independent normal values around `value`, or that one where `std` is 0."""

    shape: tuple[int, ...]
    std: float = 0.0
    value: float = 0.0

    def fill(self, tensor: Tensor) -> None:
        """Give a tensor its values, where no checkpoint did."""
        import transformers.initialization as init

        if self.std:
            init.normal_(tensor, mean=self.value, std=self.std)
        else:
            init.constant_(tensor, self.value)


class Normal(Birth):
    """Independent normal values around zero."""


class Fill(Birth):
    """One value everywhere."""

    def __init__(self, shape: tuple[int, ...], value: float = 0.0) -> None:
        super().__init__(shape, 0.0, value)


@dataclass(frozen=True)
class Values(Birth):
    """These values."""

    values: tuple[float, ...] = ()

    def fill(self, tensor: Tensor) -> None:
        """Give a tensor its values, where no checkpoint did."""
        import torch
        import transformers.initialization as init

        init.copy_(tensor, torch.tensor(self.values))


def linear_birth(rows: int, columns: int) -> Normal:
    """A matrix of variance 1/(3 · columns), as `nn.Linear` and LoRA's A have it."""
    return Normal((rows, columns), math.sqrt(1 / (3 * columns)))


def low_rank_births(rank: int, width_in: int, width_out: int) -> dict[str, Birth]:
    """A product B A of two narrow matrices that adds nothing at birth, as B is zero."""
    return {"lora_A": linear_birth(rank, width_in), "lora_B": Fill((width_out, rank))}
