"""Auxiliary losses: measured in a layer, carried through a forward, added to the task's loss.

Shapes: B batch, T tokens, D hidden size. All measures are in at least fp32 and skip padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutputWithPast
from transformers.utils import logging

from .surgeon_adapters import AdapterRecord
from .surgeon_precision import at_least_fp32
from .surgeon_surgery import LocalLossSpec, Surgery

logger = logging.get_logger(__name__)

IGNORED_LABEL = -100


@dataclass
class UpcycledCausalLMOutput(CausalLMOutputWithPast):
    """The native output, and in training the auxiliary losses before their weights (None where they are off).

    divergence_loss: mean over control blocks; local_l1_loss, local_cross_entropy_loss: means over adapters.
    """

    divergence_loss: torch.FloatTensor | None = None
    local_l1_loss: torch.FloatTensor | None = None
    local_cross_entropy_loss: torch.FloatTensor | None = None


@dataclass
class UpcycledSequenceClassifierOutput(SequenceClassifierOutputWithPast):
    """As `UpcycledCausalLMOutput`, for a classifier."""

    divergence_loss: torch.FloatTensor | None = None
    local_l1_loss: torch.FloatTensor | None = None
    local_cross_entropy_loss: torch.FloatTensor | None = None


@dataclass
class Flow:
    """One forward's tokens and, layer by layer, its losses. New for each call, so threads do not meet."""

    valid: Tensor
    domains: Tensor | None
    divergences: list[Tensor] = field(default_factory=list)
    weighted_divergences: list[Tensor] = field(default_factory=list)
    l1: list[Tensor] = field(default_factory=list)
    cross_entropy: list[Tensor] = field(default_factory=list)

    def add(self, divergence: Tensor, weight: float, l1: Tensor, cross_entropy: Tensor) -> None:
        """Take one layer's losses: vectors with an entry for each control block or adapter in it."""
        self.divergences.append(divergence)
        self.weighted_divergences.append(weight * divergence)
        self.l1.append(l1)
        self.cross_entropy.append(cross_entropy)


def open_flow(surgery: Surgery, inputs: Tensor, attention_mask: Any, domain_ids: Tensor | None) -> Flow | None:
    """The flow of a training step, or None where no auxiliary loss applies. `inputs` is B T or B T D."""
    if surgery.needs_domains and domain_ids is None and not torch.compiler.is_compiling():
        logger.warning_once(
            "The adapters' local loss is off: this batch has no `domain_ids` "
            "(0 for the original domain, 1 and up for new ones; one for each sample or each token)."
        )
    with_domains = surgery.needs_domains and domain_ids is not None
    if not surgery.diverges and not with_domains:
        return None
    shape = torch.Size(inputs.shape[:2])
    domains = None
    if with_domains and domain_ids is not None:
        domains = (domain_ids.unsqueeze(-1) if domain_ids.dim() == 1 else domain_ids).expand(shape)
    return Flow(valid=valid_tokens(attention_mask, shape, inputs.device), domains=domains)


def valid_tokens(attention_mask: Any, shape: torch.Size, device: torch.device) -> Tensor:
    """Which tokens are no padding: B T, bool. A 4-D mask is read on its diagonal."""
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get("full_attention", next(iter(attention_mask.values())))
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if not isinstance(attention_mask, Tensor):
        raise ValueError(
            f"attention_mask is a {type(attention_mask).__name__}, which does not show padding; "
            "the auxiliary losses need the two-dimensional mask"
        )
    if attention_mask.dim() == 2:
        return attention_mask.bool()
    seen = attention_mask[:, 0].diagonal(dim1=-2, dim2=-1)
    return (seen if seen.dtype == torch.bool else seen >= 0).expand(shape)


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


def close_flow(output: Any, flow: Flow | None, spec: LocalLossSpec, scale: float | Tensor) -> dict[str, Any]:
    """The fields of the output with `loss` raised by scale · (mean λ·divergence + Σ weight · local loss)."""
    fields = dict(output.items())
    if flow is None:
        return fields
    total: Tensor = output.loss
    for name, parts, weighted, weight in (
        ("divergence_loss", flow.divergences, flow.weighted_divergences, 1.0),
        ("local_l1_loss", flow.l1, flow.l1, spec.l1),
        ("local_cross_entropy_loss", flow.cross_entropy, flow.cross_entropy, spec.cross_entropy),
    ):
        if any(part.numel() for part in parts):
            fields[name] = _mean(parts, output.loss).detach()
            total = total + scale * weight * _mean(weighted, output.loss)
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
