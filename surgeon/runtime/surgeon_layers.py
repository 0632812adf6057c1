"""Decoder layers with grafts, mixed in before a family's native layer.

A layer's `forward` is a pure function of tensors, so gradient checkpointing may run it again; `__call__`
carries what crosses layers (the auxiliary losses) in and out of the forward's `Flow`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .surgeon_adapters import AdapterRecord, AdapterSite, begin_records
from .surgeon_interpolators import build_interpolator
from .surgeon_losses import Flow, divergence, local_losses
from .surgeon_surgery import read_surgery


class BranchLayer(nn.Module):
    """The inner layer of a control block: a native layer, at its own index of cache and masks.

    The trunk layer around it is checkpointed as a whole; a second checkpoint inside would only compute twice.
    """

    mlp_class: ClassVar[type[AdapterSite]]

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        surgery = read_surgery(config)
        if layer_idx in surgery.adapters:
            self.mlp = self.mlp_class(config, surgery.adapters[layer_idx], surgery.trunk_layers)

    @property
    def gradient_checkpointing(self) -> bool:
        """Always off; what a model-wide switch sets is ignored here."""
        return False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        return


class UpcycledLayer(nn.Module):
    """A trunk layer: native, perhaps with an adapter at its MLP, perhaps with an expanded twin beside it."""

    mlp_class: ClassVar[type[AdapterSite]]
    branch_class: ClassVar[type[BranchLayer]]

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        surgery = read_surgery(config)
        self.local_loss = surgery.local_loss
        self.control = surgery.controls.get(layer_idx)
        self.grafted = self.control is not None or layer_idx in surgery.adapters
        if layer_idx in surgery.adapters:
            self.mlp = self.mlp_class(config, surgery.adapters[layer_idx], surgery.trunk_layers)
        if self.control is not None:
            self.expanded = self.branch_class(config, self.control.branch)
            self.interpolator = build_interpolator(self.control.interpolator, config.hidden_size)

    def __call__(self, hidden_states: Tensor, *args: Any, surgery_flow: Flow | None = None, **kwargs: Any) -> Any:
        """Run the layer; `surgery_flow` (in training) gives the tokens and takes the losses."""
        if surgery_flow is None or not self.grafted:
            return super().__call__(hidden_states, *args, **kwargs)
        output, diverged, l1, cross_entropy = super().__call__(
            hidden_states,
            *args,
            valid_tokens=surgery_flow.valid,
            token_domains=surgery_flow.domains,
            **kwargs,
        )
        weight = 0.0 if self.control is None else self.control.divergence.weight
        surgery_flow.add(diverged, weight, l1, cross_entropy)
        return output

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        valid_tokens: Tensor | None = None,
        token_domains: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The layer's output, B T D; with `valid_tokens` (B T) also its divergence, ℓ1 and cross-entropy."""
        if valid_tokens is None:
            return self.combine(hidden_states, *args, **kwargs)[0]
        records: list[AdapterRecord] = []
        previous = begin_records(records)
        try:
            output, diverged = self.combine(hidden_states, *args, valid_tokens=valid_tokens, **kwargs)
        finally:
            begin_records(previous)
        return output, diverged, *local_losses(records, valid_tokens, token_domains, self.local_loss)

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
