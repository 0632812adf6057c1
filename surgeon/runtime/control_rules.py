"""Control blocks (Control LLM, arXiv:2501.10979): what `config.surgery` says of them, and what they are born with.

    "control": [{"layer": 3, "branch": 8,
                 "interpolator": {"kind": "lerp", "alpha": 0.5, "inference_alpha": null, "learnable": false},
                 "divergence": {"kind": "mse", "weight": 1.0}}]

`branch` is a layer of the tail, which exists so that caches and masks are allocated for it; in the model it stands at
`layers[layer].expanded`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .interpolators import Interpolation, InterpolatorSpec
from .rules import (
    BRANCH,
    GraftRules,
    Kind,
    Surgery,
    built,
    by_layer,
    check_layers,
    loss_weight,
    one_of,
)

INTERPOLATOR = "interpolator."
DIVERGENCES = ("mse", "cosine", "none")


@dataclass(frozen=True)
class DivergenceSpec:
    """The loss that keeps the expanded branch near the pre-trained one, and its weight λ."""

    kind: str = "none"
    weight: float = 1.0

    def check(self) -> None:
        """ValueError for what no divergence is."""
        if self.kind == "attention":
            raise ValueError(f"config.surgery: {NO_ATTENTION}")
        one_of("divergence kind", self.kind, DIVERGENCES)
        loss_weight("divergence weight", self.weight)


NO_ATTENTION = (
    "divergence `attention` compares attention maps, which sdpa, flash and flex attention never form;"
    " use `mse` or `cosine`"
)


@dataclass(frozen=True)
class ControlSpec:
    """One control block: trunk layer `layer` gets the tail layer `branch` as its expanded twin."""

    layer: int
    branch: int
    interpolator: InterpolatorSpec = field(default_factory=InterpolatorSpec)
    divergence: DivergenceSpec = field(default_factory=DivergenceSpec)
    frozen: bool = False


class ControlKind(Kind):
    """A control block: an expanded twin of the layer, and an interpolator."""

    key = "control"
    mark = "C"
    in_twin = "refused"
    branching = True

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """`control block, lerp`."""
        return f"control block, {entry['interpolator']['kind']}"

    def claims(self, suffix: str) -> bool:
        """All of a twin that no other graft claims, and the interpolator."""
        return suffix.startswith((BRANCH, INTERPOLATOR))


class ControlRules(GraftRules):
    """Control blocks; `interpolators` are those that can be named."""

    name = "control"
    keys = ("control",)
    kinds = (ControlKind(),)
    losses: ClassVar[Mapping[str, str]] = {"divergence_loss": "mean over control blocks"}
    part = "surgeon.runtime.control"
    module = "ControlGraft"
    roles = ()

    def __init__(self, interpolators: Mapping[str, Interpolation]) -> None:
        self.interpolators = interpolators

    def uses(self, raw: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
        """The interpolators that its entries name."""
        entries = raw.get("control")
        stated = [entry.get("interpolator") for entry in entries if isinstance(entry, Mapping)] if entries else []
        named = {str(told.get("kind", "lerp")) if isinstance(told, Mapping) else "lerp" for told in stated}
        kinds = {key: type(rule) for key, rule in self.interpolators.items() if key in named}
        return tuple((key, kind.__module__, kind.__name__) for key, kind in kinds.items())

    def read(self, raw: Mapping[str, Any]) -> dict[int, ControlSpec]:
        """Control blocks by trunk layer."""
        return by_layer([self._block(entry) for entry in raw.get("control", ())], "control")

    def _block(self, entry: Mapping[str, Any]) -> ControlSpec:
        interpolator = built(InterpolatorSpec, entry.get("interpolator", {}), "interpolator")
        divergence = built(DivergenceSpec, entry.get("divergence", {}), "divergence")
        return built(ControlSpec, {**entry, "interpolator": interpolator, "divergence": divergence}, "control")

    def branches(self, found: Any) -> list[tuple[int, int]]:
        """Each block's."""
        return [(block.branch, block.layer) for block in found.values()]

    def check(self, surgery: Surgery, config: Any) -> None:
        """Entries hold together, layers exist, and what projects has something to project for."""
        blocks: dict[int, ControlSpec] = surgery.of[self.name]
        check_layers(blocks, surgery.trunk_layers, "control")
        for block in blocks.values():
            one_of("interpolator kind", block.interpolator.kind, self.interpolators)
            self.interpolators[block.interpolator.kind].check(block.interpolator, self.interpolators.values())
            block.divergence.check()
            if self.interpolators[block.interpolator.kind].projects and block.divergence.kind == "none":
                raise ValueError(
                    f"config.surgery: layer {block.layer} projects for a divergence that is `none`; "
                    "its matrix would never train: use `lerp`"
                )

    def trains(self, surgery: Surgery) -> list[str]:
        """The twin and the interpolator of every block that is not frozen."""
        return [
            f"layers.{block.layer}.{part}"
            for block in surgery.of[self.name].values()
            if not block.frozen
            for part in (BRANCH, INTERPOLATOR)
        ]

    def measures(self, surgery: Surgery) -> bool:
        """Whether a divergence has a weight."""
        return any(b.divergence.kind != "none" and b.divergence.weight > 0 for b in surgery.of[self.name].values())
