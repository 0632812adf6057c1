"""What a graft's tensors hold at birth: data that the planner makes recipes of, and modules their first values."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Fill:
    """One value everywhere."""

    shape: tuple[int, ...]
    value: float = 0.0


@dataclass(frozen=True)
class Normal:
    """Independent normal values around zero."""

    shape: tuple[int, ...]
    std: float


@dataclass(frozen=True)
class Values:
    """These values."""

    shape: tuple[int, ...]
    values: tuple[float, ...]


Birth = Fill | Normal | Values


def as_linear(rows: int, columns: int) -> Normal:
    """A matrix of variance 1/(3 · columns), as `nn.Linear` and LoRA's A have it."""
    return Normal((rows, columns), math.sqrt(1 / (3 * columns)))


def low_rank_births(rank: int, width_in: int, width_out: int) -> dict[str, Birth]:
    """A product B A of two narrow matrices that adds nothing at birth, as B is zero."""
    return {"lora_A": as_linear(rank, width_in), "lora_B": Fill((width_out, rank))}
