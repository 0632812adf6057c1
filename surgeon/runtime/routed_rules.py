"""Routed experts beside the FFN (sparse upcycling with the base's FFN as a shared expert): config entries, births.

    "routed_experts": [{"layer": 0, "experts": 8, "size": 2048, "top_k": 2}],
    "routed_loss": {"balance": 0.01}

The `layer` may be of the trunk or of the tail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .births import Birth, Fill, Normal
from .rules import GraftRules, Surgery, built, by_layer

ROUTED = "mlp.routed."
# What a model begins with that is made without a checkpoint.
_STD = 0.02


@dataclass(frozen=True)
class RoutedSpec:
    """The experts of one layer: how many, how many neurons each has, and how many of them a token takes.

    They are as the FFN is: without a gate where it is not `gated`, `biased` where what it reads with is. `activation`
    is empty for the FFN's.
    """

    layer: int
    experts: int
    size: int
    top_k: int
    frozen: bool = False
    gated: bool = True
    biased: bool = False
    activation: str = ""

    def births(self, width: int) -> dict[str, Birth]:
        """Its tensors for a stream of `width`, all experts' in one; what writes is zero."""
        inner = Normal((self.experts, self.size, width), _STD)
        reading = ("gate", "up") if self.gated else ("up",)
        biases = {f"{name}_bias": Fill((self.experts, self.size)) for name in reading if self.biased}
        return {
            "router": Normal((self.experts, width), _STD),
            **{f"{name}_proj": inner for name in reading},
            **biases,
            "down_proj": Fill((self.experts, width, self.size)),
        }


@dataclass(frozen=True)
class RoutedLossSpec:
    """The weight of the loss that spreads tokens over experts; 0 is off."""

    balance: float = 0.0


@dataclass(frozen=True)
class Routed:
    """The routed experts of a model, by layer of trunk or tail, and their loss."""

    by_layer: Mapping[int, RoutedSpec] = field(default_factory=dict)
    loss: RoutedLossSpec = field(default_factory=RoutedLossSpec)

    def balanced(self, layer: int) -> bool:
        """Whether a layer has routed experts that train, whose tokens the loss spreads."""
        spec = self.by_layer.get(layer)
        return self.loss.balance > 0 and spec is not None and not spec.frozen


class RoutedRules(GraftRules):
    """Routed experts."""

    name = "routed"
    keys = ("routed_experts", "routed_loss")
    losses: ClassVar[Mapping[str, str]] = {"routed_balance_loss": "mean over layers with routed experts"}

    def read(self, raw: Mapping[str, Any]) -> Routed:
        """Experts by layer, and their loss."""
        specs = [built(RoutedSpec, entry, "routed_experts") for entry in raw.get("routed_experts", ())]
        loss = built(RoutedLossSpec, raw.get("routed_loss") or {}, "routed_loss")
        return Routed(by_layer(specs, "routed_experts"), loss)

    def trains(self, surgery: Surgery) -> list[str]:
        """All that are not frozen."""
        return [f"layers.{spec.layer}.{ROUTED}" for spec in surgery.of[self.name].by_layer.values() if not spec.frozen]

    def measures(self, surgery: Surgery) -> bool:
        """Whether tokens are to be spread over experts."""
        found: Routed = surgery.of[self.name]
        return any(found.balanced(layer) for layer in found.by_layer)
