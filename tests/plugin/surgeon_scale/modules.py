"""What ships in outputs: torch, transformers, surgeon's own parts and this plugin's rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from surgeon.runtime.graft import Frame, Graft
from surgeon.runtime.newborn import Newborn
from surgeon.runtime.rules import Surgery

from .rules import ScaleRules, ScaleSpec


class FeedForwardScale(Newborn):
    """(1 + w) ⊙ x."""

    weight: nn.Parameter

    def __init__(self, spec: ScaleSpec, width: int) -> None:
        super().__init__()
        self.bear(spec.births(width))

    def forward(self, x: Tensor) -> Tensor:
        """B T D to B T D."""
        return x + x * self.weight


class ScaleGraft(Graft, ScaleRules):
    """Scales stand in MLPs."""

    def blocks(self, surgery: Surgery, index: int) -> tuple[str, ...]:
        """The MLP."""
        return ("mlp",) if index in surgery.of[self.name] else ()

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """The scale."""
        spec = surgery.of[self.name].get(index)
        if spec is not None:
            layer.mlp.scale = FeedForwardScale(spec, config.hidden_size)
            # Ten to one.
            layer.loss_weights["scale_loss"] = 0.1
        return spec is not None

    def beside(self, block: Any, x: Tensor, output: Tensor, frame: Frame | None) -> Tensor:
        """The FFN's output, scaled."""
        scaled: Tensor = block.scale(output)
        if frame is not None and frame.valid is not None:
            frame.measure("scale_loss", block.scale.weight.float().square().mean())
        return scaled

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """Scales."""
        return {"scales": (FeedForwardScale, len(surgery.of[self.name]))}
