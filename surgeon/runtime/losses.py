"""Auxiliary losses: measured in a layer, carried through a forward, added to the task's loss.

Shapes: B batch, T tokens, D hidden size. All measures are in at least fp32 and skip padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from .rules import Surgery

logger = logging.get_logger(__name__)

IGNORED_LABEL = -100


@dataclass
class Flow:
    """What crosses layers in one forward. New for each call, so threads do not meet.

    `valid` (B T, bool; None where no loss is asked for) are the tokens that count in losses, `domains` (B T) their
    domains; layers leave their losses in `losses`, by the output's field, weighted ones beside them. `routing` (B T
    slots) is there from a router's layer on, `on` (B T, bool) from a domain gate's; `mixing` and `gating` are what the
    model shares among its layers, `positions` the position ids that were given; `packed`: a row holds several
    sequences, as in continuous batching. All grafts are `off` where a caller said so. A caller may pass a flow of its
    own to a model, to see afterwards what was routed where.
    """

    valid: Tensor | None = None
    domains: Tensor | None = None
    routing: Tensor | None = None
    mixing: Any = None
    gating: Any = None
    on: Tensor | None = None
    positions: Tensor | None = None
    off: bool = False
    packed: bool = False
    records_choices: bool = False
    losses: dict[str, list[Tensor]] = field(default_factory=dict)
    weighted: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> None:
        """Take one layer's losses: for each field a vector with an entry for each graft, and their common weight."""
        for name, loss in losses.items():
            if loss.numel():
                self.losses.setdefault(name, []).append(loss)
                self.weighted.setdefault(name, []).append(weights[name] * loss)


def open_flow(surgery: Surgery, inputs: Tensor, attention_mask: Any, domain_ids: Tensor | None) -> Flow | None:
    """The flow of a training step, or None where no auxiliary loss applies. `inputs` is B T or B T D."""
    if _asks_domains(surgery) and domain_ids is None and not torch.compiler.is_compiling():
        logger.warning_once(
            "The losses that need domains (adapters' local loss, the router's loss) are off: this batch has no "
            "`domain_ids` (0 for the original domain, 1 and up for new ones; one for each sample or each token)."
        )
    with_domains = surgery.needs_domains and domain_ids is not None
    if not surgery.measures and not with_domains:
        return None
    shape = torch.Size(inputs.shape[:2])
    domains = token_domains(domain_ids, shape) if with_domains else None
    return Flow(valid=valid_tokens(attention_mask, shape, inputs.device), domains=domains)


def token_domains(domain_ids: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Domains of samples, B, or of tokens as those of tokens, B T; None where none are given."""
    if domain_ids is None:
        return None
    return (domain_ids.unsqueeze(-1) if domain_ids.dim() == 1 else domain_ids).expand(shape)


def _asks_domains(surgery: Surgery) -> bool:
    """Whether there is a loss that needs domains (a gate needs them for what it switches)."""
    return any(rules.losses and rules.needs_domains(surgery) for rules in surgery.rules)


def tell_of_lost_losses(surgery: Surgery) -> None:
    """Say once that a step trains without the auxiliary losses that the surgery asks for.

    So it is where a loss is made outside of the model's head: without `labels`, or by a trainer that asks the base
    model alone, as TRL's do to spare the logits.
    """
    asked = surgery.measures or _asks_domains(surgery)
    if asked and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        logger.warning_once(
            "The auxiliary losses have no part in this training: the model was asked for states or logits and not for "
            "its loss. Give it `labels` and take `output.loss`; TRL's SFTTrainer does so if its `compute_loss` is "
            "replaced by that of transformers' Trainer."
        )


def tell_of_mode(surgery: Surgery, loss: Any) -> None:
    """Say once that a loss with gradients is asked of a model outside of training mode, in which it was loaded."""
    asked = surgery.measures or surgery.needs_domains
    if asked and isinstance(loss, Tensor) and loss.requires_grad and not torch.compiler.is_compiling():
        logger.warning_once(
            "A loss with gradients was asked for outside of training mode, where the auxiliary losses are off and a "
            "domain gate goes by the text, as in inference: what it closes gets gradients of zero. To train, call "
            "`model.train()`, as a loaded model is in evaluation mode; to evaluate, use `torch.no_grad()`."
        )


def full_mask(attention_mask: Any) -> Any:
    """Of masks by the kind of layer the one for layers that see everything, or the first; else what is given."""
    if isinstance(attention_mask, dict):
        return attention_mask.get("full_attention", next(iter(attention_mask.values())))
    return attention_mask


def shown_by(mask: Tensor) -> Tensor:
    """What a 4-D mask shows each token, the same for all heads: B T W, bool."""
    return mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0


def valid_tokens(attention_mask: Any, shape: torch.Size, device: torch.device, seen: int | Tensor = 0) -> Tensor:
    """Which of the tokens that go in are no padding: B T, bool. `seen` tokens are in the cache before them.

    A 4-D mask is read at each token's own column; where a window has cut that off, a token that sees anything counts.
    """
    attention_mask = full_mask(attention_mask)
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if not isinstance(attention_mask, Tensor):
        raise ValueError(
            f"attention_mask is a {type(attention_mask).__name__}, which does not show padding; "
            "what is computed over a batch's tokens needs the two-dimensional mask"
        )
    if attention_mask.dim() == 2:
        return attention_mask[:, -shape[1] :].bool()
    if attention_mask.dim() != 4:
        raise ValueError(
            f"attention_mask is {list(attention_mask.shape)}; what is computed over a batch's tokens needs the "
            "two-dimensional mask"
        )
    shown = shown_by(attention_mask)
    length = shown.shape[-1]
    own = torch.arange(shape[1], device=shown.device) + (seen if shape[1] != length else 0)
    columns = own.clamp(max=length - 1).view(1, -1, 1).expand(shown.shape[0], -1, -1)
    found = torch.where(own[-1] < length, shown.gather(-1, columns).squeeze(-1), shown.any(dim=-1))
    return found.expand(shape)


def masked_mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of `values` (B T) over `chosen` (B T, bool); 0 where nothing is chosen."""
    return torch.where(chosen, values, torch.zeros_like(values)).sum() / chosen.sum().clamp(min=1)


def balance_loss(probabilities: Tensor, valid: Tensor, top_k: int) -> Tensor:
    """Σ_j f_j P_j over valid tokens: f_j = L/K · share of tokens that choose j, P_j its mean probability (B T L).

    As in Mixture-of-Control (section 3.3), and in DeepSeek-V3 (equations 17 to 20) for a sequence. `valid` is B T.
    Shape (1,): 1 where all are chosen equally, up to L/K where the same K always are.
    """
    weight = valid.unsqueeze(-1).to(probabilities.dtype)
    count = weight.sum().clamp(min=1)
    chosen = (selected(probabilities, top_k) * weight).sum(dim=(0, 1)) / count
    mean = (probabilities * weight).sum(dim=(0, 1)) / count
    return (probabilities.shape[-1] / top_k * chosen * mean).sum().reshape(1)


def selected(probabilities: Tensor, top_k: int) -> Tensor:
    """1 where a token's K greatest are, else 0: B T L."""
    return torch.zeros_like(probabilities).scatter(-1, probabilities.topk(top_k, dim=-1).indices, 1.0).detach()


def close_flow(output: Any, flow: Flow | None, scale: float | Tensor) -> dict[str, Any]:
    """The fields of the output with `loss` raised by scale · Σ over kinds of the mean weighted loss."""
    fields = dict(output.items())
    if flow is None:
        return fields
    total: Tensor = output.loss
    for name, losses in flow.losses.items():
        fields[name] = _mean(losses, output.loss).detach()
        total = total + scale * _mean(flow.weighted[name], output.loss)
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
