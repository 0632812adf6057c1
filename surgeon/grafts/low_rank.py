"""What narrow matrices of several grafts hold at birth."""

from __future__ import annotations

import math

from surgeon.runtime.births import Birth, Fill, Normal


def linear_birth(rows: int, columns: int) -> Normal:
    """A matrix of variance 1/(3 · columns), as `nn.Linear` and LoRA's A have it."""
    return Normal((rows, columns), math.sqrt(1 / (3 * columns)))


def low_rank_births(rank: int, width_in: int, width_out: int) -> dict[str, Birth]:
    """A product B A of two narrow matrices that adds nothing at birth, as B is zero."""
    return {"lora_A": linear_birth(rank, width_in), "lora_B": Fill((width_out, rank))}
