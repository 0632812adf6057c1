"""Decoder layers with grafts, mixed in before a family's native layer.

A layer's `forward` is a pure function of tensors, so gradient checkpointing may run it again; `__call__`
carries what crosses layers (the router's distribution, the auxiliary losses) in and out of the forward's `Flow`. What
carries gradient goes in by position and comes out as a result; a frame shows it to the layer's own modules.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .experts import ExpertRouter, attach_experts, task_loss
from .frames import AdapterRecord, Frame, enter_frame
from .interpolators import build_interpolator
from .losses import Flow, divergence, local_losses
from .sites import AttentionSite, FeedForwardSite
from .states import Mixing
from .surgery import Surgery, read_surgery


class BranchLayer(nn.Module):
    """The inner layer of a control block: a native layer, at its own index of cache and masks.

    The trunk layer around it is checkpointed as a whole; a second checkpoint inside would only compute twice.
    """

    mlp_class: ClassVar[type[FeedForwardSite]]

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        surgery = read_surgery(config)
        if layer_idx in surgery.adapters:
            self.mlp = self.mlp_class(config, surgery.adapters[layer_idx], surgery.trunk_layers)
        if layer_idx in surgery.experts:
            attach_experts(self, surgery.experts[layer_idx])

    @property
    def gradient_checkpointing(self) -> bool:
        """Always off; what a model-wide switch sets is ignored here."""
        return False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        return


class UpcycledLayer(nn.Module):
    """A trunk layer: native, with what the surgery put into it and beside it."""

    attention_class: ClassVar[type[AttentionSite]]
    mlp_class: ClassVar[type[FeedForwardSite]]
    branch_class: ClassVar[type[BranchLayer]]

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        surgery = read_surgery(config)
        self.local_loss = surgery.local_loss
        self.control = surgery.controls.get(layer_idx)
        self._replace_blocks(config, layer_idx, surgery)
        if layer_idx in surgery.experts:
            attach_experts(self, surgery.experts[layer_idx])
        self.expert_router = None
        if surgery.router is not None and surgery.router.layer == layer_idx:
            self.expert_router = ExpertRouter(surgery.router, config.hidden_size)
        if self.control is not None:
            self.expanded = self.branch_class(config, self.control.branch)
            self.interpolator = build_interpolator(self.control.interpolator, config.hidden_size)
        own = {layer_idx} if self.control is None else {layer_idx, self.control.branch}
        self.grafted = bool(
            self.control is not None
            or self.expert_router is not None
            or own & {*surgery.adapters, *surgery.experts}
            or surgery.sites_of(layer_idx)
        )
        weights = (surgery.local_loss.l1, surgery.local_loss.cross_entropy)
        balance = 0.0 if surgery.mixture is None else surgery.mixture.balance_weight
        diverges = 0.0 if self.control is None else self.control.divergence.weight
        self.loss_weights = (diverges, *weights, balance, surgery.router_loss.task_id)

    def _replace_blocks(self, config: Any, layer_idx: int, surgery: Surgery) -> None:
        sites, adapter = surgery.sites_of(layer_idx), surgery.adapters.get(layer_idx)
        if "attention" in sites:
            self.self_attn = self.attention_class(config, layer_idx, sites["attention"])
        if "ffn" in sites or adapter is not None:
            self.mlp = self.mlp_class(config, adapter, surgery.trunk_layers, sites.get("ffn"))

    def __call__(self, hidden_states: Tensor, *args: Any, surgery_flow: Flow | None = None, **kwargs: Any) -> Any:
        """Run the layer; `surgery_flow` brings what crosses layers and takes the losses."""
        if surgery_flow is None or not self.grafted:
            return super().__call__(hidden_states, *args, **kwargs)
        output, *told = super().__call__(
            hidden_states,
            surgery_flow.routing,
            *args,
            valid_tokens=surgery_flow.valid,
            token_domains=surgery_flow.domains,
            mixing=surgery_flow.mixing,
            in_flow=True,
            **kwargs,
        )
        if self.expert_router is not None:
            surgery_flow.routing = told.pop(0)
        if told:
            surgery_flow.add(told, self.loss_weights)
        return output

    def forward(
        self,
        hidden_states: Tensor,
        routing: Tensor | None = None,
        *args: Any,
        valid_tokens: Tensor | None = None,
        token_domains: Tensor | None = None,
        mixing: Mixing | None = None,
        in_flow: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The layer's output, B T D; in a flow also the routing (B T slots), where made here, and losses.

        Losses are vectors, one for each of `LOSS_FIELDS`, or none without `valid_tokens` (B T). The result is flat:
        what is nested gets no gradient from reentrant checkpointing.
        """
        logs = None
        if self.expert_router is not None:
            routing, logs = self.expert_router(hidden_states)
        records: list[AdapterRecord] | None = None if valid_tokens is None else []
        frame = Frame(records=records, routing=routing, mixing=mixing)
        previous = enter_frame(frame)
        try:
            output, diverged = self.combine(hidden_states, *args, valid_tokens=valid_tokens, **kwargs)
        finally:
            enter_frame(previous)
        if not in_flow:
            return output
        made = (output,) if self.expert_router is None else (output, routing)
        if valid_tokens is None or records is None:
            return made
        none = valid_tokens.new_zeros(0, dtype=torch.float32)
        routed = none
        if logs is not None and token_domains is not None and self.loss_weights[-1] > 0:
            routed = task_loss(logs, valid_tokens, token_domains)
        return (
            *made,
            diverged,
            *local_losses(records, valid_tokens, token_domains, self.local_loss),
            torch.cat(frame.balance) if frame.balance else none,
            routed,
        )

    def combine(
        self, hidden_states: Tensor, *args: Any, valid_tokens: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The branches combined, B T D; with `valid_tokens` also the divergence, shape (0,) or (1,)."""
        pretrained: Tensor = super().forward(hidden_states, *args, **kwargs)
        diverged = None if valid_tokens is None else valid_tokens.new_zeros(0, dtype=torch.float32)
        if self.control is None:
            return pretrained, diverged
        expanded = self.expanded(hidden_states, *args, **kwargs)
        combined, alpha = self.interpolator(hidden_states, pretrained, expanded)
        kind = self.control.divergence.kind
        if valid_tokens is not None and kind != "none":
            diverged = divergence(kind, self.interpolator.anchor(pretrained), expanded, alpha, valid_tokens)
        return combined, diverged
