"""Control blocks (Control LLM, arXiv:2501.10979) in `config.surgery`:

    "control": [{"layer": 3, "branch": 8,
                 "interpolator": {"kind": "lerp", "alpha": 0.5, "inference_alpha": null, "learnable": false},
                 "divergence": {"kind": "mse", "weight": 1.0}}]

`branch` is a layer of the tail. The config counts it as a layer, so that caches and masks have a place for it; in the
model it is the module `layers[layer].expanded`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .interpolators import Interpolation, InterpolatorSpec
from .rules import BRANCH, GraftRules, Surgery, built, by_layer

INTERPOLATOR = "interpolator."


@dataclass(frozen=True)
class DivergenceSpec:
    """The loss that keeps the expanded branch near the pre-trained one, and its weight λ."""

    kind: str = "none"
    weight: float = 1.0


@dataclass(frozen=True)
class ControlSpec:
    """One control block: trunk layer `layer` gets the tail layer `branch` as its expanded twin."""

    layer: int
    branch: int
    interpolator: InterpolatorSpec = field(default_factory=InterpolatorSpec)
    divergence: DivergenceSpec = field(default_factory=DivergenceSpec)
    frozen: bool = False


class ControlRules(GraftRules):
    """The rules of control blocks; `interpolators` maps names in the config to interpolators."""

    name = "control"
    keys = ("control",)
    losses: ClassVar[Mapping[str, str]] = {"divergence_loss": "mean over control blocks"}

    def __init__(self, interpolators: Mapping[str, Interpolation]) -> None:
        self.interpolators = interpolators

    def read(self, raw: Mapping[str, Any]) -> dict[int, ControlSpec]:
        """Return the control blocks by trunk layer."""
        return by_layer([self._block(entry) for entry in raw.get("control", ())], "control")

    def _block(self, entry: Mapping[str, Any]) -> ControlSpec:
        """Return the settings of one control block. Raises ValueError for a key that is not known."""
        interpolator = built(InterpolatorSpec, entry.get("interpolator", {}), "interpolator")
        divergence = built(DivergenceSpec, entry.get("divergence", {}), "divergence")
        return built(ControlSpec, {**entry, "interpolator": interpolator, "divergence": divergence}, "control")

    def branches(self, found: Any) -> list[tuple[int, int]]:
        """Return each block's tail layer with its trunk layer."""
        return [(block.branch, block.layer) for block in found.values()]

    def trains(self, surgery: Surgery) -> list[str]:
        """Return the name prefixes of the twin and the interpolator of every block that is not frozen."""
        return [
            f"layers.{block.layer}.{part}"
            for block in surgery.of[self.name].values()
            if not block.frozen
            for part in (BRANCH, INTERPOLATOR)
        ]

    def measures(self, surgery: Surgery) -> bool:
        """Return whether the divergence loss of any block has a weight above 0."""
        return any(b.divergence.kind != "none" and b.divergence.weight > 0 for b in surgery.of[self.name].values())
