"""What a graft does in a model. One small class a graft, together with its rules (`class AdapterGraft(Graft, …)`).

A layer asks the grafts of its config, in their order: first which blocks must be able to carry something, then to put
their modules in. In a forward those that did so run `before` it, `beside` its blocks and `after` it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .frames import Frame
from .losses import Flow
from .rules import Surgery


class Graft:
    """The hooks of a graft; each does nothing here."""

    def blocks(self, surgery: Surgery, index: int) -> tuple[str, ...]:
        """Which blocks of layer `index`, `self_attn` and `mlp`, it stands beside."""
        return ()

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """Put its modules into layer `index` of trunk or tail; whether it has any part in that layer."""
        return False

    def before(self, layer: Any, hidden_states: Tensor, frame: Frame) -> None:
        """The layer is about to run on `hidden_states`, B T D."""

    def beside(self, block: Any, x: Tensor, output: Tensor, frame: Frame | None) -> Tensor:
        """What a block puts out together with the graft, B T D; `x` is what the block read, `output` what it made."""
        return output

    def after(self, layer: Any, hidden_states: Tensor, output: Tensor, frame: Frame, run: Any) -> Tensor:
        """What the layer puts out together with the graft; `run(module)` runs another layer as this one was run."""
        return output

    def weights(self, surgery: Surgery, index: int) -> Mapping[str, float]:
        """The weights of its losses in a layer, by the output's field."""
        return {}

    def complete(self, model: Any, surgery: Surgery) -> None:
        """Put what all layers share into the base model."""

    def open(self, model: Any, flow: Flow, inputs: Tensor, attention_mask: Any, cache: Any) -> None:
        """A forward of the base model begins; `flow` goes to all its layers."""

    def close(self, model: Any, flow: Flow, cache: Any) -> None:
        """A forward of the base model is over; `cache` is the one that it returns."""

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """Its modules whose tensors a checkpoint must hold: what they are, their class, how many there must be."""
        return {}
