"""Losses on held-out sequences, source by source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from surgeon.data.packing import PackedSequence
from surgeon.data.scoring import judge_examples, score_sequences
from surgeon.training.processes.sharding import let_go


def losses_by_source(
    model: nn.Module,
    validation: Mapping[str, Sequence[PackedSequence]],
    *,
    micro_batch: int,
    process: int = 0,
    processes: int = 1,
) -> dict[str, float]:
    """Return the mean cross-entropy of each source's labels that count, in nats (`evaluation.scores`).

    Args:
        model: the model, on its device.
        validation: held-out sequences by source.
        micro_batch: sequences that run together.
        process: the number of this process.
        processes: how many share the work; all call.
    """
    found = {
        name: score_sequences(model, sequences, micro_batch=micro_batch, process=process, processes=processes).loss
        for name, sequences in validation.items()
    }
    let_go(model)
    return found


def figures_by_source(
    model: nn.Module,
    validation: Mapping[str, Sequence[Any]],
    *,
    micro_batch: int,
    process: int = 0,
    processes: int = 1,
    pad: int | None,
) -> dict[str, dict[str, float]]:
    """Return each source's `loss`, in nats, and with a classification head its other figures (`Judged`).

    Args:
        model: the model, on its device.
        validation: held-out sequences or examples by source.
        micro_batch: sequences that run together.
        process: the number of this process.
        processes: how many share the work; all call.
        pad: fills up a batch of examples; None: the sequences are text.
    """
    if pad is None:
        losses = losses_by_source(model, validation, micro_batch=micro_batch, process=process, processes=processes)
        return {name: {"loss": loss} for name, loss in losses.items()}
    judged = {
        name: judge_examples(model, held, pad=pad, micro_batch=micro_batch, process=process, processes=processes)
        for name, held in validation.items()
    }
    return {name: found.figures() for name, found in judged.items()}
