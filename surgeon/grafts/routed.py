"""Routed experts, as planners know them: what is checked of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgeon.grafts.checks import ACTIVATIONS, check_layers, loss_weight, one_of
from surgeon.grafts.kinds import Kind, KnownGraft
from surgeon.runtime.routed_rules import ROUTED, Routed, RoutedRules, RoutedSpec
from surgeon.runtime.rules import BRANCH, Surgery


class RoutedKind(Kind):
    """Routed experts beside a layer's FFN."""

    key = "routed_experts"
    mark = "E"
    in_twin = "copied"

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """`8 experts of 2048, top 2`."""
        return f"{entry['experts']} experts of {entry['size']}{where}, top {entry['top_k']}"

    def claims(self, suffix: str) -> bool:
        """What stands at `mlp.routed`."""
        return suffix.removeprefix(BRANCH).startswith(ROUTED)


class KnownRouted(KnownGraft, RoutedRules):
    """Routed experts."""

    kinds = (RoutedKind(),)
    part = "surgeon.runtime.routed"
    module = "RoutedGraft"
    roles = ("mlp",)

    def check(self, surgery: Surgery, config: Any) -> None:
        """Entries hold together, and layers exist."""
        found: Routed = surgery.of[self.name]
        loss_weight("routed_loss balance", found.loss.balance)
        for spec in found.by_layer.values():
            _check(spec)
        check_layers(found.by_layer, surgery.layers, "routed_experts")


def _check(spec: RoutedSpec) -> None:
    """ValueError for experts that cannot be."""
    if spec.activation:
        one_of("routed_experts activation", spec.activation, ACTIVATIONS)
    if spec.size < 1 or not 1 <= spec.top_k <= spec.experts:
        raise ValueError(
            f"config.surgery: routed_experts of layer {spec.layer} take {spec.top_k} of {spec.experts} experts of"
            f" {spec.size} neurons; at least one neuron is needed, and no more experts than there are"
        )
