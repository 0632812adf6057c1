"""Gated adapters, `adapters` and `local_loss` of `config.surgery`: what is said of them, what they are born with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .births import Birth
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
    """One gated adapter; `activation` is empty for the FFN's, `l1` and `cross_entropy` weigh its local losses."""

    layer: int
    size: int
    gate: str = "relu"
    init: str = "low_variance"
    frozen: bool = False
    activation: str = ""
    l1: float = 0.0
    cross_entropy: float = 0.0

    def check(self) -> None:
        """ValueError for what no adapter has."""
        one_of("adapter gate", self.gate, GATES)
        if self.activation:
            one_of("adapter activation", self.activation, ACTIVATIONS)
        one_of("adapter init", self.init, VARIANCES)
        loss_weight("local_loss l1", self.l1)
        loss_weight("local_loss cross_entropy", self.cross_entropy)
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


class AdapterKind(Kind):
    """A gated adapter beside the layer's FFN."""

    key = "adapters"
    mark = "A"
    in_twin = "copied"
    fields = ("layer", "size", "gate", "init", "frozen", "activation")

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
    kinds = (AdapterKind(),)
    losses: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("local_l1_loss", "local_cross_entropy_loss"), "mean over adapters"
    )
    part = "surgeon.runtime.adapters"
    module = "AdapterGraft"
    roles = ("mlp",)

    def read(self, raw: Mapping[str, Any]) -> dict[int, AdapterSpec]:
        """Adapters by layer."""
        specs = (AdapterSpec(**entry, **raw.get("local_loss") or {}) for entry in raw.get("adapters", ()))
        return {spec.layer: spec for spec in specs}

    def check(self, surgery: Surgery, config: Any) -> None:
        """Entries hold together, layers exist, and the domain cross-entropy has gates to classify by."""
        found: dict[int, AdapterSpec] = surgery.of[self.name]
        for spec in found.values():
            spec.check()
        check_layers(found, surgery.layers, "adapter")
        ungated = [spec.layer for spec in found.values() if spec.cross_entropy > 0 and spec.gate != "sigmoid"]
        if ungated:
            raise ValueError(
                "config.surgery: local_loss cross_entropy classifies domains by a sigmoid gate; adapters of "
                f"layers {ungated} have none"
            )

    def trains(self, surgery: Surgery) -> list[str]:
        """Every adapter that is not frozen."""
        specs = surgery.of[self.name].values()
        return [f"layers.{spec.layer}.{ADAPTER}" for spec in specs if not spec.frozen]

    def needs_domains(self, surgery: Surgery) -> bool:
        """Whether a local loss has a weight."""
        return any(spec.l1 > 0 or spec.cross_entropy > 0 for spec in surgery.of[self.name].values())

    def classifies(self, surgery: Surgery) -> bool:
        """Whether the domain cross-entropy has a weight."""
        return any(spec.cross_entropy > 0 for spec in surgery.of[self.name].values())
