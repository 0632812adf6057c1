"""Routed experts parallel to the FFN (sparse upcycling with the base's FFN as shared expert) in `config.surgery`:

    "routed_experts": [{"layer": 0, "experts": 8, "size": 2048, "top_k": 2}],
    "routed_loss": {"balance": 0.01}

The `layer` may be in the trunk or in the tail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .births import Birth, Fill, Normal
from .rules import GraftRules, Surgery, built, by_layer

ROUTED = "mlp.routed."
# The standard deviation of random values in a model that is made without a checkpoint.
_STD = 0.02


@dataclass(frozen=True)
class RoutedSpec:
    """The experts of one layer: their number, the neurons of each (`size`), and the experts of a token (`top_k`).

    An expert has the FFN's form. `gated`: the FFN has a gate matrix. `biased`: the matrices that read in the FFN have
    biases. An empty `activation` means the activation of the FFN.
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
        """Return the births of its tensors for a residual stream of size `width`.

        One tensor holds all experts; the matrices that write are zero.
        """
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
    """The weight `balance` of the loss that spreads tokens over experts; 0 is off."""

    balance: float = 0.0


@dataclass(frozen=True)
class Routed:
    """The routed experts of a model, by layer of trunk or tail, and the weight of their loss."""

    by_layer: Mapping[int, RoutedSpec] = field(default_factory=dict)
    loss: RoutedLossSpec = field(default_factory=RoutedLossSpec)

    def balanced(self, layer: int) -> bool:
        """Return whether the loss applies to a layer: its weight is above 0, and the layer has experts that train."""
        spec = self.by_layer.get(layer)
        return self.loss.balance > 0 and spec is not None and not spec.frozen


class RoutedRules(GraftRules):
    """The rules of routed experts."""

    name = "routed"
    keys = ("routed_experts", "routed_loss")
    losses: ClassVar[Mapping[str, str]] = {"routed_balance_loss": "mean over layers with routed experts"}

    def read(self, raw: Mapping[str, Any]) -> Routed:
        """Return the experts by layer, and the weight of their loss."""
        specs = [built(RoutedSpec, entry, "routed_experts") for entry in raw.get("routed_experts", ())]
        loss = built(RoutedLossSpec, raw.get("routed_loss") or {}, "routed_loss")
        return Routed(by_layer(specs, "routed_experts"), loss)

    def trains(self, surgery: Surgery) -> list[str]:
        """Return the name prefixes of the experts that are not frozen."""
        return [f"layers.{spec.layer}.{ROUTED}" for spec in surgery.of[self.name].by_layer.values() if not spec.frozen]

    def measures(self, surgery: Surgery) -> bool:
        """Return whether the loss that spreads tokens over experts applies to any layer."""
        found: Routed = surgery.of[self.name]
        return any(found.balanced(layer) for layer in found.by_layer)
