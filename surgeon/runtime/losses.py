"""Auxiliary losses: measured in layers, in at least fp32 and without padding, then added to the task's loss.

Shapes: B batch, T tokens of this forward, L experts or control states among which a token chooses K.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from .graft import Flow
from .rules import Surgery

logger = logging.get_logger(__name__)
NO_DOMAINS = (
    "The losses that need domains (adapters' local loss, the router's loss) are off: this batch has no `domain_ids`"
    " (0 for the original domain, 1 and up for new ones; one for each sample or each token)."
)
LOST = (
    "The auxiliary losses have no part in this training: the model was asked for states or logits and not for its loss."
    " Give it `labels` and take `output.loss`; TRL's SFTTrainer does so with transformers' own `compute_loss`."
)
EVALUATING = (
    "A loss with gradients was asked for outside of training mode, where the auxiliary losses are off and a domain gate"
    " goes by the text. To train, call `model.train()`; to evaluate, use `torch.no_grad()`."
)


def tell(message: str) -> None:
    """Warn once with `message`; do nothing without gradients, or while a compiler records the forward."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        logger.warning_once(message)


def open_flow(surgery: Surgery, given: Mapping[str, Any], domain_ids: Tensor | None) -> Flow:
    """Return the flow of a training step; its `valid` is None where no auxiliary loss applies.

    `given` are the forward's arguments by name. Warns once where losses need `domain_ids` and there are none.
    """
    inputs, mask, domains = given_tokens(given, domain_ids)
    flow, by_domain = Flow(domains=domains), surgery.needs_domains()
    if by_domain and domain_ids is None:
        tell(NO_DOMAINS)
    if surgery.measures() or (by_domain and domain_ids is not None):
        flow.valid = valid_tokens(mask, inputs.shape[:2], inputs.device)
    return flow


def given_tokens(given: Mapping[str, Any], domain_ids: Tensor | None) -> tuple[Tensor, Any, Tensor | None]:
    """Return (token ids or embeddings, whichever were given, their mask, each token's domain, B T).

    Of several masks it is the one for full attention. The domains are None without `domain_ids`.
    """
    inputs: Tensor = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
    mask = given.get("attention_mask")
    if isinstance(mask, dict):
        # One mask for each kind of layer: take the one for full attention, or the first.
        mask = mask.get("full_attention", next(iter(mask.values())))
    return inputs, mask, None if domain_ids is None else domain_ids.reshape(len(inputs), -1).expand(inputs.shape[:2])


def valid_tokens(mask: Any, shape: torch.Size, device: torch.device, seen: int | Tensor | None = None) -> Tensor:
    """Return which of this forward's tokens are no padding: B T, bool. Raises ValueError for a mask of another shape.

    `seen` is the number of cached tokens before them; None: their columns are the last of a mask.
    """
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        given = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask is {given}; losses and controls need the two-dimensional one")
    if mask.dim() == 2:
        return mask[:, -shape[1] :].bool()
    # A token that a 4-D mask shows itself counts. If a window has cut off its column, it counts if it sees anything.
    shown = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0
    if seen is None:
        return shown.diagonal(shown.shape[-1] - shape[1], 1, 2).expand(shape)
    length = shown.shape[-1]
    own = torch.arange(shape[1], device=shown.device) + (seen if shape[1] != length else 0)
    columns = own.clamp(max=length - 1).view(1, -1, 1).expand(shown.shape[0], -1, -1)
    found = torch.where(own[-1] < length, shown.gather(-1, columns).squeeze(-1), shown.any(dim=-1))
    return found.expand(shape)


def masked_mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of `values` (B T) over `chosen` (B T, bool); 0 where nothing is chosen."""
    chosen = chosen.to(values.device)
    return torch.where(chosen, values, torch.zeros_like(values)).sum() / chosen.sum().clamp(min=1)


def balance_loss(probabilities: Tensor, valid: Tensor, top_k: int) -> Tensor:
    """Return Σ_j f_j P_j over valid tokens: f_j is L/K · share of tokens that choose j, P_j the mean probability of j.

    `probabilities` are B T L, `valid` is B T (bool). Mixture-of-Control uses this loss (section 3.3), and DeepSeek-V3
    (equations 17 to 20) over a sequence. Shape (1,): 1 where all j are chosen equally, up to L/K where all tokens
    choose the same K.
    """
    weight = valid.unsqueeze(-1).to(probabilities.dtype)
    count = weight.sum().clamp(min=1)
    chosen = (selected(probabilities, top_k) * weight).sum(dim=(0, 1)) / count
    mean = (probabilities * weight).sum(dim=(0, 1)) / count
    return (probabilities.shape[-1] / top_k * chosen * mean).sum().reshape(1)


def selected(probabilities: Tensor, top_k: int) -> Tensor:
    """Return 1 at the K greatest probabilities of each token, else 0: B T L, without gradient."""
    return torch.zeros_like(probabilities).scatter(-1, probabilities.topk(top_k, dim=-1).indices, 1.0).detach()


def with_losses(output: Any, flow: Flow, labels: Any, given: Mapping[str, Any], *, by_token: bool) -> dict[str, Any]:
    """Return the output's fields with the mean of each loss, and `loss` + share · Σ over losses of the weighted mean.

    The share is 1, or with `by_token` the micro-batch's share of the tokens in the accumulated batch.
    """
    made: dict[str, Any] = dict(output.items())
    share: Any = 1.0
    if by_token and given.get("num_items_in_batch") is not None:
        # This micro-batch's share of the accumulated batch: Trainer normalises the task's loss by the same number.
        counted = labels[..., 1:] if given.get("shift_labels") is None else given["shift_labels"]
        share = (counted != -100).sum() / torch.as_tensor(given["num_items_in_batch"], device=labels.device)
    for name, parts in flow.losses.items():
        made[name] = torch.cat([loss.to(output.loss.device) for _, loss in parts]).mean().detach()
        weighted = torch.cat([weight * loss.to(output.loss.device) for weight, loss in parts]).mean()
        made["loss"] = made["loss"] + share * weighted
    return made
