"""Auxiliary losses: measured in a layer, carried through a forward, added to the task's loss.

Shapes: B batch, T tokens, D hidden size. All measures are in at least fp32 and skip padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutputWithPast
from transformers.utils import logging

from .frames import AdapterRecord
from .precision import at_least_fp32
from .specs import LocalLossSpec
from .states import Mixing
from .surgery import Surgery

logger = logging.get_logger(__name__)

IGNORED_LABEL = -100


# What a layer measures in training, in the order in which it tells: the field of the output each becomes.
LOSS_FIELDS = (
    "divergence_loss",
    "local_l1_loss",
    "local_cross_entropy_loss",
    "balance_loss",
    "router_loss",
)


@dataclass
class UpcycledCausalLMOutput(CausalLMOutputWithPast):
    """The native output, and in training the auxiliary losses before their weights (None where they are off).

    divergence_loss: mean over control blocks; local_l1_loss, local_cross_entropy_loss: means over adapters;
    balance_loss: mean over control states; router_loss: the experts' router against the tasks.
    """

    divergence_loss: torch.FloatTensor | None = None
    local_l1_loss: torch.FloatTensor | None = None
    local_cross_entropy_loss: torch.FloatTensor | None = None
    balance_loss: torch.FloatTensor | None = None
    router_loss: torch.FloatTensor | None = None


@dataclass
class UpcycledSequenceClassifierOutput(SequenceClassifierOutputWithPast):
    """As `UpcycledCausalLMOutput`, for a classifier."""

    divergence_loss: torch.FloatTensor | None = None
    local_l1_loss: torch.FloatTensor | None = None
    local_cross_entropy_loss: torch.FloatTensor | None = None
    balance_loss: torch.FloatTensor | None = None
    router_loss: torch.FloatTensor | None = None


@dataclass
class Flow:
    """What crosses layers in one forward. New for each call, so threads do not meet.

    `valid` (B T, bool; None where no loss is asked for) are the tokens that count in losses, `domains` (B T) their
    domains; layers leave their losses in `losses`, weighted ones beside them. `routing` (B T slots) is there from the
    router's layer on; `mixing` are the control states at work. A caller may pass a flow of its own to a model, to see
    afterwards what was routed where.
    """

    valid: Tensor | None = None
    domains: Tensor | None = None
    routing: Tensor | None = None
    mixing: Mixing | None = None
    records_choices: bool = False
    losses: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in LOSS_FIELDS])
    weighted: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in LOSS_FIELDS])

    def add(self, losses: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Take one layer's losses: for each kind a vector with an entry for each graft, and their common weight."""
        for kind, (loss, weight) in enumerate(zip(losses, weights, strict=True)):
            self.losses[kind].append(loss)
            self.weighted[kind].append(weight * loss)


def open_flow(surgery: Surgery, inputs: Tensor, attention_mask: Any, domain_ids: Tensor | None) -> Flow | None:
    """The flow of a training step, or None where no auxiliary loss applies. `inputs` is B T or B T D."""
    if surgery.needs_domains and domain_ids is None and not torch.compiler.is_compiling():
        logger.warning_once(
            "The losses that need domains (adapters' local loss, the router's loss) are off: this batch has no "
            "`domain_ids` (0 for the original domain, 1 and up for new ones; one for each sample or each token)."
        )
    with_domains = surgery.needs_domains and domain_ids is not None
    if not surgery.diverges and not surgery.balances and not with_domains:
        return None
    shape = torch.Size(inputs.shape[:2])
    domains = None
    if with_domains and domain_ids is not None:
        domains = (domain_ids.unsqueeze(-1) if domain_ids.dim() == 1 else domain_ids).expand(shape)
    return Flow(valid=valid_tokens(attention_mask, shape, inputs.device), domains=domains)


def tell_of_lost_losses(surgery: Surgery) -> None:
    """Say once that a step trains without the auxiliary losses that the surgery asks for.

    So it is where a loss is made outside of the model's head: without `labels`, or by a trainer that asks the base
    model alone, as TRL's do to spare the logits.
    """
    asked = surgery.diverges or surgery.needs_domains or surgery.balances
    if asked and not torch.compiler.is_compiling():
        logger.warning_once(
            "The auxiliary losses have no part in this training: the model was asked for states or logits and not for "
            "its loss. Give it `labels` and take `output.loss`; TRL's SFTTrainer does so if its `compute_loss` is "
            "replaced by that of transformers' Trainer."
        )


def valid_tokens(attention_mask: Any, shape: torch.Size, device: torch.device, seen: int | Tensor = 0) -> Tensor:
    """Which of the tokens that go in are no padding: B T, bool. `seen` tokens are in the cache before them.

    A 4-D mask is read at each token's own column; where a window has cut that off, a token that sees anything counts.
    """
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get("full_attention", next(iter(attention_mask.values())))
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if not isinstance(attention_mask, Tensor):
        raise ValueError(
            f"attention_mask is a {type(attention_mask).__name__}, which does not show padding; "
            "what is computed over a batch's tokens needs the two-dimensional mask"
        )
    if attention_mask.dim() == 2:
        return attention_mask[:, -shape[1] :].bool()
    visible = attention_mask[:, 0] if attention_mask.dtype == torch.bool else attention_mask[:, 0] >= 0
    own = torch.arange(shape[1], device=visible.device) + (seen if shape[1] != visible.shape[-1] else 0)
    if int(own[-1]) < visible.shape[-1]:
        found = visible.gather(-1, own.view(1, -1, 1).expand(visible.shape[0], -1, -1)).squeeze(-1)
    else:
        found = visible.any(dim=-1)
    return found.expand(shape)


def masked_mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of `values` (B T) over `chosen` (B T, bool); 0 where nothing is chosen."""
    return torch.where(chosen, values, torch.zeros_like(values)).sum() / chosen.sum().clamp(min=1)


def divergence(kind: str, anchor: Tensor, expanded: Tensor, alpha: float | Tensor, valid: Tensor) -> Tensor:
    """E[α Δ(anchor, expanded)] over valid tokens (Control LLM, section 3.3), shape (1,).

    mse: mean over D of the squared difference. cosine: 1 − cos, computed as ½‖ê − p̂‖², which is exactly
    zero for equal states.
    """
    anchor, expanded = at_least_fp32(anchor), at_least_fp32(expanded)
    if kind == "mse":
        distance = (expanded - anchor).square().mean(dim=-1)
    else:
        distance = (F.normalize(expanded, dim=-1) - F.normalize(anchor, dim=-1)).square().sum(dim=-1) / 2
    if isinstance(alpha, Tensor):
        alpha = alpha.squeeze(-1) if alpha.dim() > 1 else alpha
    return masked_mean(alpha * distance, valid).reshape(1)


def local_losses(
    records: list[AdapterRecord], valid: Tensor, domains: Tensor | None, spec: LocalLossSpec
) -> tuple[Tensor, Tensor]:
    """Each adapter's ℓ1 term on original-domain tokens, and its gate's domain cross-entropy on all tokens.

    Vectors with one entry for each record, or none where the loss is off.
    """
    none = valid.new_zeros(0, dtype=torch.float32)
    if domains is None or not records:
        return none, none
    l1, cross_entropy = none, none
    if spec.l1 > 0:
        original = valid & (domains == 0)
        l1 = torch.stack([masked_mean(record.l1, original) for record in records])
    if spec.cross_entropy > 0:
        new = (domains > 0).to(records[0].l1.dtype)
        logits = [record.gate_logit for record in records if record.gate_logit is not None]
        cross_entropy = torch.stack(
            [masked_mean(F.binary_cross_entropy_with_logits(z, new, reduction="none"), valid) for z in logits]
        )
    return l1, cross_entropy


def close_flow(output: Any, flow: Flow | None, scale: float | Tensor) -> dict[str, Any]:
    """The fields of the output with `loss` raised by scale · Σ over kinds of the mean weighted loss."""
    fields = dict(output.items())
    if flow is None:
        return fields
    total: Tensor = output.loss
    for name, losses, weighted in zip(LOSS_FIELDS, flow.losses, flow.weighted, strict=True):
        if any(part.numel() for part in losses):
            fields[name] = _mean(losses, output.loss).detach()
            total = total + scale * _mean(weighted, output.loss)
    fields["loss"] = total
    return fields


def accumulation_scale(labels: Tensor, shift_labels: Tensor | None, num_items_in_batch: Any) -> float | Tensor:
    """This micro-batch's share of the accumulated batch: its valid labels / `num_items_in_batch`.

    The task's loss is normalised so by Trainer; without the same factor auxiliary losses would count once for
    every micro-batch.
    """
    if num_items_in_batch is None:
        return 1.0
    counted = labels[..., 1:] if shift_labels is None else shift_labels
    here = (counted != IGNORED_LABEL).sum()
    return here / torch.as_tensor(num_items_in_batch, device=here.device)


def _mean(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([part.to(like.device) for part in parts]).mean()
