"""A domain gate: what `config.surgery` says of it and of what it switches.

    "domain_gate": [{"layer": 2, "reads": "cusum", "form": "mlp", "units": 64, "prior": 8, "closes": 6.0,
                     "false_positives": 0.03, "opens": 7.0}],
    "gated": [{"layer": 3, "inserted": true, "grafts": []}, {"layer": 4, "inserted": false, "grafts": ["adapters"]}]

The gate reads what goes into its `layer`. `gated` names what takes part only where it is open: of each layer the
grafts that stand in it, by their names, and whether the whole layer, which a surgery inserted, does so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .rules import GraftRules, Surgery, built, by_layer, refuse_engine

GATE = "domain_gate."
# Evidence of new text, in nats, that opens a gate at least where nothing is said.
OPENS = 7.0


@dataclass(frozen=True)
class GateSpec:
    """A gate that reads what goes into trunk layer `layer`.

    `prior`: how many tokens of no evidence a prefix's mean begins with. `closes`: how much evidence of original text
    closes an open gate (`cusum`), or how far below the threshold the score falls until it does; None: it stays open to
    the end of the sequence or document. `false_positives`: on what share of original tokens it may be open, for which
    its threshold is chosen, and `opens`: what that is at least (`cusum`).
    """

    layer: int
    reads: str = "cusum"
    form: str = "mlp"
    units: int = 64
    prior: int = 8
    closes: float | None = None
    false_positives: float = 0.03
    opens: float = OPENS
    frozen: bool = False

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Its tensors' shapes."""
        mlp = self.form == "mlp"
        found: dict[str, tuple[int, ...]] = {"weight": (self.units if mlp else 1, width)}
        found |= {"bias": (self.units,), "out": (1, self.units)} if mlp else {}
        return found | {"offset": (1,), "threshold": (1,)}


@dataclass(frozen=True)
class GatedSpec:
    """What of a layer takes part only where the gate is open: `grafts` by name, the layer itself if `inserted`."""

    layer: int
    inserted: bool = False
    grafts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gates:
    """The gate of a model, and what it switches, by layer."""

    gate: GateSpec
    gated: Mapping[int, GatedSpec]


class GateRules(GraftRules):
    """A domain gate, and what it switches."""

    name = "gate"
    keys = ("domain_gate", "gated")
    losses: ClassVar[Mapping[str, str]] = {}
    # What it does with sequences, for those that are told why it cannot.
    what: ClassVar[str] = "a domain gate decides by the tokens before each in its document"

    def read(self, raw: Mapping[str, Any]) -> Gates:
        """The one gate, and what it switches by layer."""
        gates = [built(GateSpec, _renamed(entry), "domain_gate") for entry in raw.get("domain_gate", ())]
        switched = [
            built(GatedSpec, dict(entry) | {"grafts": tuple(entry.get("grafts", ()))}, "gated")
            for entry in raw.get("gated", ())
        ]
        if len(gates) != 1 or not switched:
            raise ValueError(
                f"config.surgery: {len(gates)} domain_gate entries and {len(switched)} gated ones; a gate is one, and"
                " has something to switch"
            )
        return Gates(gates[0], by_layer(switched, "gated"))

    def refuse_engine(self, config: Any) -> None:
        """ValueError where an engine brought its own attention."""
        refuse_engine(config, self.what, "serve this output with transformers' own attention, or one without a gate")

    def trains(self, surgery: Surgery) -> list[str]:
        """Nothing by a gradient: the gate is fitted before training."""
        return []

    def needs_domains(self, surgery: Surgery) -> bool:
        """In training the batch says which tokens are new."""
        return True

    def crosses(self, surgery: Surgery) -> int:
        """Its layer, whose decision does."""
        found: Gates = surgery.of[self.name]
        return found.gate.layer


def _renamed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with today's name of what earlier versions wrote as `hysteresis`."""
    return {("closes" if key == "hysteresis" else key): value for key, value in entry.items()}
