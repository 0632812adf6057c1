"""Modules whose tensors are born with stated values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers.initialization as init
from torch import nn

from .births import Birth, Fill, Normal


class Newborn(nn.Module):
    """A leaf module: its tensors are direct parameters, so that every loader initialises it as a whole."""

    births: Mapping[str, Birth]

    def bear(self, births: Mapping[str, Birth], *, absent: tuple[str, ...] = ()) -> None:
        """Make a parameter for each birth, and none for the names `absent` that have no birth."""
        self.births = births
        for name, birth in births.items():
            self.register_parameter(name, nn.Parameter(torch.empty(birth.shape)))
        for name in absent:
            if name not in births:
                self.register_parameter(name, None)

    def initialise(self) -> None:
        """Set the values that the tensors are born with (a checkpoint's values replace them)."""
        for name, birth in self.births.items():
            fill(self.get_parameter(name), birth)


class Projection(Newborn, nn.Linear):
    """A linear module without bias whose matrix is born with stated values."""

    def __init__(self, birth: Birth) -> None:
        rows, columns = birth.shape
        nn.Linear.__init__(self, columns, rows, bias=False)
        self.births = {"weight": birth}


def fill(tensor: Any, birth: Birth) -> None:
    """Give a tensor its values at birth."""
    match birth:
        case Fill(value=value):
            init.constant_(tensor, value)
        case Normal(std=std):
            init.normal_(tensor, mean=0.0, std=std)
        case _:
            init.copy_(tensor, torch.tensor(birth.values))
