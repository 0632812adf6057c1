"""Losses on held-out sequences, source by source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from surgeon.data.scoring import judge_examples, score_sequences
from surgeon.training.processes.sharding import let_go


def figures_by_source(
    model: nn.Module,
    validation: Mapping[str, Sequence[Any]],
    *,
    micro_batch: int,
    process: int = 0,
    processes: int = 1,
    pad: int | None = None,
) -> dict[str, dict[str, float]]:
    """Return each source's `loss`, in nats, and with a classification head its other figures (`Judged`).

    The loss of text is the mean cross-entropy of the labels that count (`evaluation.scores`).

    Args:
        model: the model, on its device.
        validation: held-out sequences or examples by source.
        micro_batch: sequences that run together.
        process: the number of this process.
        processes: how many share the work; all call.
        pad: fills up a batch of examples; None: the sequences are text.
    """
    how: dict[str, Any] = {"micro_batch": micro_batch, "process": process, "processes": processes}
    if pad is not None:
        return {name: judge_examples(model, held, pad=pad, **how).figures() for name, held in validation.items()}
    found = {name: {"loss": score_sequences(model, held, **how).loss} for name, held in validation.items()}
    let_go(model)
    return found
