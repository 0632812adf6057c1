"""A layer's blocks with grafts beside them."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from .frames import current_frame
from .graft import Graft


class AttentionSite(nn.Module):
    """Mixed in before a family's attention: `grafts` stand beside it."""

    def __init__(self, config: Any, layer_idx: int, grafts: tuple[Graft, ...]) -> None:
        super().__init__(config, layer_idx)
        self.grafts = grafts

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The native output and weights, B T D the output."""
        output, *rest = super().forward(hidden_states, *args, **kwargs)
        frame = current_frame()
        for graft in self.grafts:
            output = graft.beside(self, hidden_states, output, frame)
        return output, *rest


class FeedForwardSite(nn.Module):
    """Mixed in before a family's MLP: `grafts` stand beside it."""

    # The config field that names the backbone's activation.
    activation_field: ClassVar[str] = "hidden_act"

    def __init__(self, config: Any, layer_idx: int, grafts: tuple[Graft, ...]) -> None:
        super().__init__(config)
        self.grafts = grafts

    def forward(self, x: Tensor) -> Tensor:
        """The native output and what grafts make of it, B T D."""
        output: Tensor = super().forward(x)
        frame = current_frame()
        for graft in self.grafts:
            output = graft.beside(self, x, output, frame)
        return output
