"""Gated adapters and routed experts for planners: the checks of their entries, and the initial values of adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from surgeon.grafts.checks import ACTIVATIONS, check_layers, loss_weight, one_of
from surgeon.grafts.kinds import Kind, KnownGraft
from surgeon.runtime.adapters_rules import ADAPTER, AdapterRules, AdapterSpec
from surgeon.runtime.births import Birth
from surgeon.runtime.routed_rules import ROUTED, Routed, RoutedRules
from surgeon.runtime.rules import BRANCH, Surgery

GATES = ("relu", "sigmoid", "none")
# Variance of the matrices that read the stream, by the hidden size d and the number L of the trunk's layers.
VARIANCES: dict[str, Callable[[int, int], float]] = {
    "low_variance": lambda width, layers: 1 / (width * layers),
    "he": lambda width, layers: 2 / width,
}
LOCAL_LOSSES = ("l1", "cross_entropy")


class AdapterKind(Kind):
    """A gated adapter next to the layer's FFN."""

    key = "adapters"
    mark = "A"
    in_twin = "copied"
    fields = ("layer", "size", "gate", "init", "frozen", "activation")

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """Return a text like `adapter of 512, relu gate`."""
        gate = entry.get("gate", "relu")
        return f"adapter of {entry['size']}{where}, " + ("no gate" if gate == "none" else f"{gate} gate")

    def claims(self, suffix: str) -> bool:
        """Return whether the tensor is under `mlp.adapter`."""
        return suffix.removeprefix(BRANCH).startswith(ADAPTER)


class KnownAdapters(KnownGraft, AdapterRules):
    """Gated adapters, as planners use them."""

    kinds = (AdapterKind(),)
    part = "surgeon.runtime.adapters"
    module = "AdapterGraft"
    roles = ("mlp",)

    def check(self, surgery: Surgery, config: Any) -> None:
        """Check that entries are consistent, layers exist, and domain cross-entropy has sigmoid gates to classify by.

        Raises ValueError.
        """
        found: dict[int, AdapterSpec] = surgery.of[self.name]
        for spec in found.values():
            one_of("adapter gate", spec.gate, GATES)
            if spec.activation:
                one_of("adapter activation", spec.activation, ACTIVATIONS)
            one_of("adapter init", spec.init, VARIANCES)
            loss_weight("local_loss l1", spec.l1)
            loss_weight("local_loss cross_entropy", spec.cross_entropy)
            if spec.size < 1:
                raise ValueError(
                    f"config.surgery: adapter of layer {spec.layer} has size {spec.size}; at least 1 is needed"
                )
        check_layers(found, surgery.layers, "adapter")
        ungated = [spec.layer for spec in found.values() if spec.cross_entropy > 0 and spec.gate != "sigmoid"]
        if ungated:
            raise ValueError(
                "config.surgery: local_loss cross_entropy classifies domains by a sigmoid gate; adapters of "
                f"layers {ungated} have none"
            )


def adapter_births(spec: AdapterSpec, width: int, trunk_layers: int) -> dict[str, Birth]:
    """Return an adapter's initial tensors: W_g, W_i and the gate read and are random; W_o writes and is zero."""
    std = math.sqrt(VARIANCES[spec.init](width, trunk_layers))
    tensors = {f"{name}_proj.weight": Birth((spec.size, width), std) for name in ("gate", "up")}
    if spec.gate != "none":
        tensors["gate.weight"] = Birth((1, width), std)
    return tensors | {"down_proj.weight": Birth((width, spec.size))}


class RoutedKind(Kind):
    """Routed experts next to a layer's FFN."""

    key = "routed_experts"
    mark = "E"
    in_twin = "copied"

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """Return a text like `8 experts of 2048, top 2`."""
        return f"{entry['experts']} experts of {entry['size']}{where}, top {entry['top_k']}"

    def claims(self, suffix: str) -> bool:
        """Return whether the tensor is under `mlp.routed`."""
        return suffix.removeprefix(BRANCH).startswith(ROUTED)


class KnownRouted(KnownGraft, RoutedRules):
    """Routed experts, as planners use them."""

    kinds = (RoutedKind(),)
    part = "surgeon.runtime.routed"
    module = "RoutedGraft"
    roles = ("mlp",)

    def check(self, surgery: Surgery, config: Any) -> None:
        """Check that entries are consistent and layers exist. Raises ValueError."""
        found: Routed = surgery.of[self.name]
        loss_weight("routed_loss balance", found.loss.balance)
        for spec in found.by_layer.values():
            if spec.activation:
                one_of("routed_experts activation", spec.activation, ACTIVATIONS)
            if spec.size < 1 or not 1 <= spec.top_k <= spec.experts:
                raise ValueError(
                    f"config.surgery: routed_experts of layer {spec.layer} take {spec.top_k} of {spec.experts} experts"
                    f" of {spec.size} neurons; at least one neuron is needed, and no more experts than there are"
                )
        check_layers(found.by_layer, surgery.layers, "routed_experts")
