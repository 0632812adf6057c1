"""What a graft's tensors hold at birth: data that the planner makes recipes of, and modules their first values."""

from __future__ import annotations

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
