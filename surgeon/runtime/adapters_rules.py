"""Gated adapters: what `config.surgery` says of them, and what they are born with.

"adapters": [{"layer": 0, "size": 64, "gate": "relu", "init": "low_variance"}],
"local_loss": {"l1": 0.01, "cross_entropy": 0.0}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .births import Birth
from .present import LOSSES
from .rules import ACTIVATIONS, BRANCH, GraftRules, Kind, Surgery, check_layers, loss_weight, one_of

ADAPTER = "mlp.adapter."
GATES = ("relu", "sigmoid", "none")
# Variance of the matrices that read, by the hidden size d and the number of the trunk's layers L.
VARIANCES: dict[str, Callable[[int, int], float]] = {
    "low_variance": lambda width, layers: 1 / (width * layers),
    "he": lambda width, layers: 2 / width,
}
LOCAL_LOSSES = ("l1", "cross_entropy")


@dataclass(frozen=True)
class AdapterSpec:
    """One gated adapter of hidden size `size` parallel to the FFN of `layer`; `activation` is empty for the FFN's."""

    layer: int
    size: int
    gate: str = "relu"
    init: str = "low_variance"
    frozen: bool = False
    activation: str = ""

    def check(self) -> None:
        """ValueError for what no adapter has."""
        one_of("adapter gate", self.gate, GATES)
        if self.activation:
            one_of("adapter activation", self.activation, ACTIVATIONS)
        one_of("adapter init", self.init, VARIANCES)
        if self.size < 1:
            raise ValueError(
                f"config.surgery: adapter of layer {self.layer} has size {self.size}; at least 1 is needed"
            )

    def births(self, width: int, trunk_layers: int) -> dict[str, Birth]:
        """Its tensors at birth: W_g, W_i and the gate read, W_o writes and is zero."""
        std = math.sqrt(VARIANCES[self.init](width, trunk_layers))
        tensors = {f"{name}_proj.weight": Birth((self.size, width), std) for name in ("gate", "up")}
        if self.gate != "none":
            tensors["gate.weight"] = Birth((1, width), std)
        return tensors | {"down_proj.weight": Birth((width, self.size))}


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model, by layer of trunk or tail, and the weights of their losses; 0 is off."""

    by_layer: Mapping[int, AdapterSpec]
    l1: float = 0.0
    cross_entropy: float = 0.0


class AdapterKind(Kind):
    """A gated adapter beside the layer's FFN."""

    key = "adapters"
    mark = "A"
    in_twin = "copied"
    spec = AdapterSpec

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """`adapter of 512, relu gate`."""
        gate = entry.get("gate", "relu")
        return f"adapter of {entry['size']}{where}, " + ("no gate" if gate == "none" else f"{gate} gate")

    def claims(self, suffix: str) -> bool:
        """What stands at `mlp.adapter`."""
        return suffix.removeprefix(BRANCH).startswith(ADAPTER)


class AdapterRules(GraftRules):
    """Gated adapters."""

    name = "adapters"
    keys = ("adapters", "local_loss")
    tensors = ("*mlp.adapter.*",)
    kinds = (AdapterKind(),)
    losses: ClassVar[Mapping[str, str]] = {
        "local_l1_loss": "mean over adapters",
        "local_cross_entropy_loss": "mean over adapters",
    }
    part = "surgeon.runtime.adapters"
    module = "AdapterGraft"
    roles = ("mlp",)

    def read(self, raw: Mapping[str, Any]) -> Adapters:
        """Adapters by layer, and the local losses."""
        specs = [AdapterSpec(**entry) for entry in raw.get("adapters", ())]
        return Adapters({spec.layer: spec for spec in specs}, **raw.get("local_loss") or {})

    def stated_losses(self, raw: Mapping[str, Any]) -> Mapping[str, str]:
        """The local losses that have a weight."""
        weights = raw.get("local_loss")
        weighed = (
            [f"local_{name}_loss" for name, value in weights.items() if value] if isinstance(weights, Mapping) else []
        )
        return {name: what for name, what in self.losses.items() if name in weighed}

    def check(self, surgery: Surgery, config: Any) -> None:
        """Entries hold together, layers exist, and the domain cross-entropy has gates to classify by."""
        found: Adapters = surgery.of[self.name]
        loss_weight("local_loss l1", found.l1)
        loss_weight("local_loss cross_entropy", found.cross_entropy)
        for spec in found.by_layer.values():
            spec.check()
        check_layers(found.by_layer, surgery.layers, "adapter")
        ungated = [adapter.layer for adapter in found.by_layer.values() if adapter.gate != "sigmoid"]
        if found.cross_entropy > 0 and ungated:
            raise ValueError(
                "config.surgery: local_loss cross_entropy classifies domains by a sigmoid gate; adapters of "
                f"layers {ungated} have none"
            )

    def trains(self, surgery: Surgery) -> list[str]:
        """Every adapter that is not frozen."""
        return [
            f"layers.{surgery.place(adapter.layer)}.{ADAPTER}"
            for adapter in surgery.of[self.name].by_layer.values()
            if not adapter.frozen
        ]

    if LOSSES:

        def needs_domains(self, surgery: Surgery) -> bool:
            """Whether a local loss has a weight."""
            found: Adapters = surgery.of[self.name]
            return found.l1 > 0 or found.cross_entropy > 0
