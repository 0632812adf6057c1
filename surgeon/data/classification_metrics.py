"""A classification model's scores on examples: loss, accuracy, F1 and Matthews' correlation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from surgeon.common.distributed import is_sharded, summed
from surgeon.data.examples import Example, batch_of_examples
from surgeon.data.scores import Judged
from surgeon.models.load import running


@torch.no_grad()
def judge_examples(
    model: nn.Module,
    examples: Sequence[Example],
    *,
    micro_batch: int,
    pad: int,
    process: int = 0,
    processes: int = 1,
    advance: Callable[[int], None] = lambda _examples: None,
) -> Judged:
    """Run `model`, in eval mode, over `examples`, `micro_batch` of about one length at a time.

    Cross-entropy is in float32 over the model's logits, without auxiliary losses. With `processes`, each runs its share
    and all return the same. `advance` receives how many examples are done.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    order = sorted(range(len(examples)), key=lambda number: len(examples[number].ids))
    sums = np.zeros((2, len(examples)))
    for begin in range(0, len(order), micro_batch * processes):
        whole = order[begin : begin + micro_batch * processes]
        mine = whole[process::processes]
        # Of a sharded model the others' forward needs this process's shares.
        if mine or is_sharded(model):
            logits, expected = _run(model, [examples[number] for number in mine or whole[:1]], pad, device)
            if mine:
                sums[0, mine] = F.cross_entropy(logits.float(), expected, reduction="none").double().cpu().numpy()
                sums[1, mine] = logits.argmax(dim=-1).cpu().numpy()
        advance(len(whole))
    sums = summed(sums, processes, device)
    model.train(training)
    labels: Any = model.config.num_labels  # type: ignore[union-attr]
    return Judged(sums[0], sums[1].astype(np.int64), np.array([example.label for example in examples]), int(labels))


def _run(
    model: nn.Module, examples: Sequence[Example], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (examples, labels) and the expected labels (examples)."""
    batch = {key: value.to(device) for key, value in batch_of_examples(examples, pad=pad).items()}
    expected = batch.pop("labels")
    with running(model):
        return model(**batch).logits, expected
