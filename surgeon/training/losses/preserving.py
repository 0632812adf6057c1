"""`preserve`: the base inside the model teaches its predictions on text of its own domain (Li and Hoiem, 2016; the KL
to a frozen reference in RLHF).

Shapes: N tokens that count, D hidden size, V vocabulary, B batch, T tokens.

The base runs without gradient, and only on sequences with tokens that count. Its predictions are compared with the
model's where the model's own loss is computed, some tokens at a time. Or the base ran before the first step, and its
recorded predictions are looked up (`cached_teacher`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from surgeon.common.distributed import is_sharded
from surgeon.data.packing import ALONE, IGNORED_LABEL, NUMBERS
from surgeon.manifest.within import Within
from surgeon.models.teacher import BaseWithin
from surgeon.training.config.schema import PreserveSpec
from surgeon.training.losses.cross_entropy import CHUNK_BYTES, ChunkedLoss, FusedHead, capped_logits, next_labels
from surgeon.training.losses.top_k import TopK

# Bytes of one float32 logit of the model and one of the base.
_BYTES_A_LOGIT = 8


def chunked_divergence(
    hidden: Tensor,
    weight: Tensor,
    taught: Tensor | TopK,
    *,
    cap: float | None = None,
    temperature: float = 1.0,
    old: int | None = None,
    rows: int | None = None,
    teacher: Tensor | None = None,
) -> Tensor:
    """Sum τ² KL(p ‖ q) in nats, float32, without all logits in memory.

    p is the base's distribution, q = softmax(cap(h Wᵀ) / τ) the model's.

    Args:
        hidden: N D, the input of the model's head.
        weight: V D, the head.
        taught: N D, the input of the base's head; or the `TopK` that was kept of the base's distributions at this
            temperature, for which the divergence of the coarsened distributions is summed.
        cap: a final logit soft cap.
        temperature: τ.
        old: how many rows of the head the base has; None: all.
        rows: rows of logits in memory at most (default: 128 MiB of them).
        teacher: the base's own head; None: `weight`.
    """
    rows = rows or _rows_at_once(weight)
    old = old or len(weight)
    head = weight if teacher is None else teacher

    def says(begin: int, log_q: Tensor) -> Tensor:
        """Return log p of the rows from `begin` on, for the first `old` tokens; p is 0 for the others."""
        part = taught[begin : begin + rows]
        return part.dealt_out(log_q) if isinstance(part, TopK) else _log_softmax(part, head[:old], cap, temperature)

    def loss(begin: int, logits: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return (a chunk's divergence, summed over its rows; a function that computes its gradient)."""
        log_q = torch.log_softmax(logits.div_(temperature), dim=-1)
        log_p = says(begin, log_q[:, :old])
        p = log_p.exp()
        each = (p * (log_p - log_q[:, :old])).sum(-1, keepdim=True)

        def gradient() -> Tensor:
            """Return τ (q − p), which overwrites log q."""
            q = log_q.exp_()
            q[:, :old] -= p
            return q.mul_(temperature)

        return each.sum() * temperature**2, gradient

    total: Tensor = ChunkedLoss.apply(hidden, weight, loss, cap, rows)  # type: ignore[no-untyped-call]
    return total


def _log_softmax(hidden: Tensor, weight: Tensor, cap: float | None, temperature: float) -> Tensor:
    """Return log softmax(cap(h Wᵀ) / τ), float32."""
    return torch.log_softmax(capped_logits(hidden, weight, cap)[0].div_(temperature), dim=-1)


def _rows_at_once(weight: Tensor) -> int:
    """Return for how many tokens the float32 logits of two models under the head take 128 MiB."""
    return max(1, CHUNK_BYTES // (_BYTES_A_LOGIT * len(weight)))


class Preserving:
    """The term of the loss, configured by `spec`, by which the base inside a model teaches the model.

    It is added through `head`, which computes the model's loss. Where the base's own tensors train, the base is inside
    `copy`, a frozen second model; or its predictions were recorded before, and `said` looks them up: from the numbers
    of sequences, their tokens (B T) and which tokens count (B T), it returns the predictions at the tokens that count.
    """

    def __init__(
        self, model: Any, spec: PreserveSpec, within: Within, head: FusedHead, *, copy: FusedHead | None = None
    ) -> None:
        """Find the base in the model; where the model must still compute the same as the base, check that it does.

        Raises BadInput where the decoder's list of layers is not known, and SurgeonError where the model's logits
        differ from the base's.
        """
        self.model = model
        self.teacher = head if copy is None else copy
        self.spec = spec
        self.weight = spec.weight_of("kl")
        self.rows = within.rows
        self.head = head
        self.said: Callable[[Tensor, Tensor, Tensor], TopK] | None = None
        self.base = BaseWithin(self.teacher.model, layers=within.layers, inserted=within.inserted, grafts=within.grafts)
        if within.newborn:
            count = within.rows or model.get_input_embeddings().weight.shape[0]
            ids = torch.randint(count, (1, 16), generator=torch.Generator().manual_seed(0))
            self.base.check(ids.to(self.teacher.model.device), within.rows)
        # This process's part of the unweighted mean of every step, summed over the steps since the last call of `take`.
        self.found = torch.zeros(())

    def counted(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return which tokens count, B T, bool: tokens whose next token has a label, where the base is to teach.

        With `on: original` the base teaches only on sequences of its own domain, else on all. In a sequence, no token
        counts from the first one on that is not in the base's vocabulary.
        """
        counts = next_labels(batch["labels"]) != IGNORED_LABEL
        if self.spec.on == "original":
            counts = counts & (batch["domain_ids"] == 0)[:, None]
        if self.rows is not None:
            counts = counts & ((batch["input_ids"] >= self.rows).cumsum(dim=1) == 0)
        return counts

    @contextlib.contextmanager
    def teaching(self, batch: Mapping[str, Tensor], total: int, *, anywhere: bool) -> Iterator[None]:
        """Add this batch's share of the term to the loss of a forward on `batch` within the context, in an armed head.

        The loss leaves out the cross-entropy of sequences on which the base teaches alone. `batch` may be on the host,
        where it costs no waiting for the device to find which tokens count.
        `total` is the number of tokens that count in the accumulated batch, over all processes. `anywhere`: in some
        process a token of the batch counts; all processes must take part in gathering sharded weights, or none.
        """
        self.head.beside = self._term(batch, total, anywhere=anywhere)
        self.head.left_out = batch[ALONE] if bool(batch[ALONE].any()) else None
        try:
            yield
        finally:
            self.head.beside = self.head.left_out = None

    def _term(self, batch: Mapping[str, Tensor], total: int, *, anywhere: bool) -> Callable[[Tensor], Tensor] | None:
        """Return the function that computes this batch's share of the term from the head's input; None: it is zero.

        The arguments are those of `teaching`.
        """
        counts = self.counted(batch)
        rows = counts.any(dim=1).nonzero()[:, 0]
        # With a cached teacher the predictions must be recorded by now, as the base in the model may change.
        assert self.said is not None or self.spec.cached is None
        runs = self.said is None and anywhere and is_sharded(self.model)
        if total == 0 or (len(rows) == 0 and not runs):
            return None
        if len(rows) == 0:
            rows = rows.new_zeros(1)
        chosen, device = counts[rows], self.model.device
        # The tokens that count among those of these rows.
        places = chosen.flatten().nonzero()[:, 0].to(device)
        taught: Tensor | TopK
        if self.said is None:
            taught = self._states(batch, rows).flatten(0, 1)[places]
        else:
            taught = self.said(batch[NUMBERS][rows], batch["input_ids"][rows], chosen).to(device)
        rows = rows.to(device)
        weight = self.weight / total

        def beside(hidden: Tensor) -> Tensor:
            """Return the batch's weighted term from the head's input; add the unweighted term to `found`."""
            # The model may run all sequences as one row.
            hidden = hidden.reshape(*counts.shape, -1)
            apart = chunked_divergence(
                hidden[rows].flatten(0, 1)[places],
                self.head.head.weight,
                taught,
                cap=self.head.cap,
                temperature=self.spec.temperature,
                old=self.rows,
                teacher=self.teacher.head.weight,
            )
            self.found = self.found.to(apart.device) + apart.detach() / total
            return weight * apart

        return beside

    @torch.no_grad()
    def top(self, batch: Mapping[str, Tensor], k: int) -> TopK:
        """Return the base's `k` likeliest next tokens at the tokens of `batch` that count, at the term's temperature.

        Sharded weights are gathered for it, and stay gathered; all processes call this.
        """
        counts = self.counted(batch)
        hidden = self._states(batch, slice(None))[counts]
        weight = self.teacher.head.weight[: self.rows]
        logs = (
            _log_softmax(part, weight, self.teacher.cap, self.spec.temperature)
            for part in torch.split(hidden, _rows_at_once(weight))
        )
        return TopK.joined([TopK.of(log_p, k) for log_p in logs])

    def _states(self, batch: Mapping[str, Tensor], rows: Tensor | slice) -> Tensor:
        """Return the inputs of the base's head for some sequences of a batch, B T D."""
        with self.teacher.armed():
            given = {name: batch[name][rows].to(self.model.device) for name in ("input_ids", "position_ids")}
            return self.base.logits(**given)

    def take(self) -> Tensor:
        """Return this process's part of the unweighted term, summed over the steps since the last call."""
        found, self.found = self.found, torch.zeros_like(self.found)
        return found
