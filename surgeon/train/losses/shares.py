"""A micro-batch's share of the accumulated batch, over all processes: by labels, by original tokens, by others.

Every term of the loss is a mean over some tokens of the accumulated batch; a micro-batch adds its part of it. The
runtime scales the mean that a micro-batch finds by its share of the labels. That is right for means over all tokens;
of a mean over the tokens of some domains it would let a sequence count the more, the fewer of its domain come with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgeon.data.packing import IGNORED_LABEL
from surgeon.train.losses.preserving import Preserving

# Losses of the runtime that are means over the tokens of some domains: original text, or that of tasks.
_ORIGINAL, _TASKS = "local_l1_loss", "router_loss"


@dataclass(frozen=True)
class Share:
    """`factors`: by what the runtime's scale of a loss is to be multiplied, by the loss's name.

    `taught` is the number of tokens on which the base teaches in the whole accumulated batch; `anywhere`: some process
    has one in its micro-batch.
    """

    factors: Mapping[str, float]
    taught: int
    anywhere: bool


def shares_of(
    batches: Sequence[Mapping[str, Tensor]], preserving: Preserving | None, *, device: torch.device, processes: int
) -> list[Share]:
    """Return the shares of one process's micro-batches of one step; all processes call.

    Args:
        batches: the micro-batches.
        preserving: the base that teaches, if one does.
        device: where numbers of all processes are summed.
        processes: how many there are.
    """
    counts = torch.tensor([_counts(batch, preserving) for batch in batches], dtype=torch.int64, device=device)
    together = counts.clone()
    if processes > 1:
        torch.distributed.all_reduce(together)
    labels, original, tasks, taught = together.sum(dim=0).tolist()
    shares = []
    for (own_labels, own_original, own_tasks, _), (*_, anywhere) in zip(
        counts.tolist(), together.tolist(), strict=True
    ):
        by_labels = own_labels / labels
        factors = {
            name: own / whole / by_labels
            for name, own, whole in ((_ORIGINAL, own_original, original), (_TASKS, own_tasks, tasks))
            if whole
        }
        shares.append(Share(factors, taught, bool(anywhere)))
    return shares


def _counts(batch: Mapping[str, Tensor], preserving: Preserving | None) -> tuple[int, int, int, int]:
    """Count a micro-batch's labels, tokens of original text, tokens of tasks or new text, and tokens to teach on."""
    labels = int((batch["labels"][..., 1:] != IGNORED_LABEL).sum())
    original = int((batch["domain_ids"] == 0).sum()) * batch["input_ids"].shape[1]
    taught = 0 if preserving is None else int(preserving.counted(batch).sum())
    return labels, original, batch["input_ids"].numel() - original, taught


@contextlib.contextmanager
def weighed(model: Any, share: Share) -> Iterator[None]:
    """Inside, the model's layers weigh their losses by this micro-batch's share of the tokens that they are about."""
    with contextlib.ExitStack() as back:
        for layer in model.modules():
            weights = vars(layer).get("loss_weights")
            if isinstance(weights, dict) and (scaled := weights.keys() & share.factors.keys()):
                back.callback(setattr, layer, "loss_weights", weights)
                layer.loss_weights = weights | {name: weights[name] * share.factors[name] for name in scaled}
        yield
