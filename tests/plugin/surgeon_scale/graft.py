"""What planners know of scales; it does not ship."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgeon.grafts.checks import check_layers
from surgeon.grafts.kinds import Kind, KnownGraft
from surgeon.runtime.rules import BRANCH, Surgery

from .rules import SCALE, ScaleRules


class ScaleKind(Kind):
    """A learned scale of what a layer's FFN puts out."""

    key = "scales"
    in_twin = "copied"

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """`scale of the FFN`."""
        return f"scale of the FFN{where}"

    def sign(self, entry: Mapping[str, Any]) -> str:
        """F."""
        return "F"

    def claims(self, suffix: str) -> bool:
        """What stands at `mlp.scale`."""
        return suffix.removeprefix(BRANCH).startswith(SCALE)


class KnownScales(KnownGraft, ScaleRules):
    """Learned scales."""

    kinds = (ScaleKind(),)
    part = "surgeon_scale.modules"
    module = "ScaleGraft"

    def check(self, surgery: Surgery, config: Any) -> None:
        """Layers exist."""
        check_layers(surgery.of[self.name], surgery.layers, "scale")


SCALES = KnownScales()
