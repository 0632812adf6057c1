"""What a continual run is judged by: PMoE's overall performance, backward transfer and change of general ability.

Shapes: T tasks in the order of training, M general sources. R[t][i] is the performance on task i after training on
task t, both from 0 here (the paper counts from 1), higher is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

Row = Sequence[float]


@dataclass(frozen=True)
class Measured:
    """Sums over held-out tokens of one task: how many, how many of them were guessed, their cross-entropy in nats."""

    tokens: int
    right: int
    nats: float

    @property
    def accuracy(self) -> float:
        """Share of the tokens that greedy decoding gets right when it is shown what comes before: the performance."""
        return self.right / self.tokens

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens


# Task or general source → what was measured on it.
Measurement = Mapping[str, Measured]


def measured_rows(rows: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Measured]]:
    """Rows of measurements from plain data. Raises TypeError, KeyError, AttributeError."""
    return [
        {name: Measured(found["tokens"], found["right"], found["nats"]) for name, found in row.items()} for row in rows
    ]


def overall_performance(matrix: Sequence[Row], t: int) -> float:
    """OP_t = (1/t) Σ_{i=1..t} R_{t,i} (PMoE, Eq. 2), for the task `t` from 0; row t has at least t + 1 numbers."""
    return fmean(matrix[t][: t + 1])


def backward_transfer(matrix: Sequence[Row], t: int) -> float:
    """BWT_t = (1/t) Σ_{i=1..t} (R_{t,i} - R_{i,i}) (PMoE, Eq. 2), for the task `t` from 0.

    Below zero: earlier tasks were forgotten. The last summand is zero, and the sum is divided by t all the same, as
    the paper writes it; others (GEM) leave it out and divide by t - 1.
    """
    return math.fsum(matrix[t][i] - matrix[i][i] for i in range(t + 1)) / (t + 1)


def general_ability_delta(before: Row, after: Row) -> float | None:
    """ΔR_t = (1/M) Σ_{i=1..M} (R_{t,i} - R_{0,i}) (PMoE, Eq. 6), over M sources of general ability that no task has.

    `before` is the base's row, `after` the one after a task. None where there are no such sources.
    """
    if not before:
        return None
    return fmean(later - first for first, later in zip(before, after, strict=True))
