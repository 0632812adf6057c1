"""The values of a graft's tensors at birth: the planner makes recipes from them, and modules their initial values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Birth:
    """The values of a tensor at birth: independent normal values around `value`, or only `value` where `std` is 0."""

    shape: tuple[int, ...]
    std: float = 0.0
    value: float = 0.0

    def fill(self, tensor: Tensor) -> None:
        """Fill a tensor with its values at birth, unless a checkpoint has filled it."""
        import transformers.initialization as init

        if self.std:
            init.normal_(tensor, mean=self.value, std=self.std)
        else:
            init.constant_(tensor, self.value)


class Normal(Birth):
    """A birth with independent normal values around zero."""


class Fill(Birth):
    """A birth with one value everywhere."""

    def __init__(self, shape: tuple[int, ...], value: float = 0.0) -> None:
        super().__init__(shape, 0.0, value)


@dataclass(frozen=True)
class Values(Birth):
    """A birth with the listed values."""

    values: tuple[float, ...] = ()

    def fill(self, tensor: Tensor) -> None:
        """Fill a tensor with the listed values, unless a checkpoint has filled it."""
        import torch
        import transformers.initialization as init

        init.copy_(tensor, torch.tensor(self.values))
