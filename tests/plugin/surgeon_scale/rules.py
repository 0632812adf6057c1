"""What planner and model agree on, without torch; it ships.

"scales": [{"layer": 3, "frozen": false}]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from surgeon.runtime.births import Birth, Fill
from surgeon.runtime.rules import GraftRules, Surgery, built, by_layer

SCALE = "mlp.scale."


@dataclass(frozen=True)
class ScaleSpec:
    """The FFN of `layer` has a scale."""

    layer: int
    frozen: bool = False

    def births(self, width: int) -> dict[str, Birth]:
        """Kept as the difference from 1, so that zero is exact."""
        return {"weight": Fill((width,))}


class ScaleRules(GraftRules):
    """Learned scales."""

    name = "scales"
    keys = ("scales",)
    losses: ClassVar[Mapping[str, str]] = {"scale_loss": "mean square of the scales' differences from 1, over layers"}

    def read(self, raw: Mapping[str, Any]) -> dict[int, ScaleSpec]:
        """Scales by layer."""
        return by_layer([built(ScaleSpec, entry, "scale") for entry in raw.get("scales", ())], "scale")

    def trains(self, surgery: Surgery) -> list[str]:
        """Those that are not frozen."""
        return [f"layers.{s.layer}.{SCALE}" for s in surgery.of[self.name].values() if not s.frozen]

    def measures(self, surgery: Surgery) -> bool:
        """The scales' loss needs nothing of the batch."""
        return True
