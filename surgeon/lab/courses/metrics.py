"""The metrics of a continual run: overall performance, backward transfer and change of general ability (PMoE).

Shapes: T tasks in the order of training, M general sources. R[t][i] is the performance on task i after training on task
t; higher is better. Both indices count from 0 here (from 1 in the paper).
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
    """Sums over the held-out tokens of a task: their number, the correct predictions, and cross-entropy in nats."""

    tokens: int
    right: int
    nats: float

    @property
    def accuracy(self) -> float:
        """Share of the tokens that greedy decoding predicts correctly from the true tokens before: the performance."""
        return self.right / self.tokens

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats a token."""
        return self.nats / self.tokens


# Task or general source → its measured sums.
Measurement = Mapping[str, Measured]


def measured_rows(rows: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Measured]]:
    """Return the measurements of each row from plain data.

    Raises TypeError, KeyError or AttributeError where the data have another form.
    """
    return [
        {name: Measured(found["tokens"], found["right"], found["nats"]) for name, found in row.items()} for row in rows
    ]


def overall_performance(matrix: Sequence[Row], t: int) -> float:
    """Return OP_t = (1/t) Σ_{i=1..t} R_{t,i} (PMoE, Eq. 2) for task `t` from 0; row t has at least t + 1 numbers."""
    return fmean(matrix[t][: t + 1])


def backward_transfer(matrix: Sequence[Row], t: int) -> float:
    """Return BWT_t = (1/t) Σ_{i=1..t} (R_{t,i} - R_{i,i}) (PMoE, Eq. 2) for the task `t` from 0.

    Below zero: earlier tasks were forgotten. The last summand is zero, but the sum is divided by t, as in the paper;
    other papers (GEM) leave the last summand out and divide by t - 1.
    """
    return math.fsum(matrix[t][i] - matrix[i][i] for i in range(t + 1)) / (t + 1)


def general_ability_delta(before: Row, after: Row) -> float | None:
    """Return ΔR_t = (1/M) Σ_{i=1..M} (R_{t,i} - R_{0,i}) (PMoE, Eq. 6) over M sources that belong to no task.

    `before` is the base's row, `after` the row after a task. None where there are no such sources.
    """
    if not before:
        return None
    return fmean(later - first for first, later in zip(before, after, strict=True))
