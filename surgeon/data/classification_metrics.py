"""A classification model's scores on examples: loss, accuracy, F1 and Matthews' correlation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from surgeon.common.distributed import is_sharded
from surgeon.data.examples import Example, batch_of_examples
from surgeon.data.scoring import Ratio, ratio
from surgeon.models.load import running


@dataclass(frozen=True)
class Judged:
    """Each example's loss in nats, the label that was given (the largest logit's) and the expected one: (examples,).

    `labels` is how many labels the model knows.
    """

    nats: NDArray[np.float64]
    given: NDArray[np.int64]
    expected: NDArray[np.int64]
    labels: int

    @property
    def right(self) -> NDArray[np.bool_]:
        """Which examples got their label."""
        return np.asarray(self.given == self.expected)

    @property
    def loss(self) -> Ratio:
        """Mean cross-entropy, nats an example."""
        return ratio(self.nats, np.ones(len(self.nats)))

    @property
    def accuracy(self) -> Ratio:
        """Share of the examples that got their label."""
        return ratio(self.right, np.ones(len(self.nats)))

    @property
    def f1(self) -> float | None:
        """Of two labels, F1 of the second: 2 TP / (2 TP + FP + FN), as GLUE has it; None of more, or where it is 0 / 0.

        Wang et al. 2018, section 3.2 (MRPC, QQP).
        """
        if self.labels != 2:
            return None
        right = int(((self.given == 1) & (self.expected == 1)).sum())
        named = int((self.given == 1).sum() + (self.expected == 1).sum())
        return 2 * right / named if named else None

    @property
    def matthews(self) -> float | None:
        """Matthews' correlation coefficient (Gorodkin's R_K for more than two labels); None where one label is alone.

        (c s − Σ p_k t_k) / √((s² − Σ p_k²)(s² − Σ t_k²)), with s examples, c of them right, and p_k given and t_k
        expected of label k (Gorodkin 2004).
        """
        count = len(self.given)
        given, expected = (
            np.bincount(each, minlength=self.labels).astype(float) for each in (self.given, self.expected)
        )
        right = float(self.right.sum())
        spread = math.sqrt((count**2 - (given**2).sum()) * (count**2 - (expected**2).sum()))
        return float(right * count - (given * expected).sum()) / spread if spread else None

    def figures(self) -> dict[str, float]:
        """The loss, accuracy, F1 and Matthews' correlation that there are, by name."""
        found = {"loss": self.loss.value, "accuracy": self.accuracy.value, "f1": self.f1, "matthews": self.matthews}
        return {name: value for name, value in found.items() if value is not None}


@torch.no_grad()
def judge(
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
    if processes > 1:
        together = torch.from_numpy(sums).to(device if device.type == "cuda" else "cpu")
        torch.distributed.all_reduce(together)
        sums = together.cpu().numpy()
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
