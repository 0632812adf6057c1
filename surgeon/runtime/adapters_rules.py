"""Gated adapters in `config.surgery`: the keys `adapters` and `local_loss`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .rules import GraftRules, Surgery

ADAPTER = "mlp.adapter."


@dataclass(frozen=True)
class AdapterSpec:
    """The settings of a gated adapter; an empty `activation` means the activation of the FFN.

    `l1` and `cross_entropy` are the weights of its local losses.
    """

    layer: int
    size: int
    gate: str = "relu"
    init: str = "low_variance"
    frozen: bool = False
    activation: str = ""
    l1: float = 0.0
    cross_entropy: float = 0.0


class AdapterRules(GraftRules):
    """The rules of gated adapters."""

    name = "adapters"
    keys = ("adapters", "local_loss")
    losses: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("local_l1_loss", "local_cross_entropy_loss"), "mean over adapters"
    )

    def read(self, raw: Mapping[str, Any]) -> dict[int, AdapterSpec]:
        """Return the adapters by layer."""
        specs = (AdapterSpec(**entry, **raw.get("local_loss") or {}) for entry in raw.get("adapters", ()))
        return {spec.layer: spec for spec in specs}

    def trains(self, surgery: Surgery) -> list[str]:
        """Return the name prefix of every adapter that is not frozen."""
        specs = surgery.of[self.name].values()
        return [f"layers.{spec.layer}.{ADAPTER}" for spec in specs if not spec.frozen]

    def needs_domains(self, surgery: Surgery) -> bool:
        """Return whether a local loss has a weight above 0."""
        return any(spec.l1 > 0 or spec.cross_entropy > 0 for spec in surgery.of[self.name].values())
