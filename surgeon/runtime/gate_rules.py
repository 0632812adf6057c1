"""A domain gate and the modules that it switches in `config.surgery`:

    "domain_gate": [{"layer": 2, "reads": "cusum", "form": "mlp", "units": 64, "prior": 8, "closes": 6.0,
                     "false_positives": 0.03, "opens": 12.0, "turns": true}],
    "gated": [{"layer": 3, "inserted": true, "grafts": []}, {"layer": 4, "inserted": false, "grafts": ["adapters"]}]

The gate reads the input of its `layer`. `gated` lists, for each layer, what takes part only where the gate is open:
the grafts in the layer, by their names, and with `inserted` the whole layer, which a surgery inserted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .rules import GraftRules, Surgery, built, by_layer, refuse_engine

GATE = "domain_gate."
# The default of `opens`: the evidence of new text, in nats, that a gate needs at least to open.
OPENS = 12.0


@dataclass(frozen=True)
class GateSpec:
    """The settings of a gate that reads the input of trunk layer `layer`.

    `reads`: how evidence becomes a decision (`cusum`, `prefix_mean` or `token`). `form`: the classifier (`linear` or
    `mlp`, with `units`). `prior`: the number of tokens without evidence with which a prefix's mean begins. `closes`:
    how much evidence of original text closes an open gate (`cusum`), or how far the score must fall below the threshold
    to close it; None: the gate stays open to the end of the sequence or document. `false_positives`: the share of
    original tokens on which the gate may be open; the threshold is chosen for it. `opens`: the least threshold
    (`cusum`). `turns`: in chats whole turns of the user decide (`cusum` that closes).
    """

    layer: int
    reads: str = "cusum"
    form: str = "mlp"
    units: int = 64
    prior: int = 8
    closes: float | None = None
    false_positives: float = 0.03
    opens: float = OPENS
    turns: bool = False
    frozen: bool = False

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the gate's tensors by name, for hidden states of size `width`."""
        mlp = self.form == "mlp"
        found: dict[str, tuple[int, ...]] = {"weight": (self.units if mlp else 1, width)}
        found |= {"bias": (self.units,), "out": (1, self.units)} if mlp else {}
        found |= {"offset": (1,), "threshold": (1,)}
        # Three pairs of ids of three digits each.
        return found | ({"turn_threshold": (1,), "turns": (3, 2, 3)} if self.turns else {})


@dataclass(frozen=True)
class GatedSpec:
    """The parts of a layer that the gate switches: `grafts` by name, and the whole layer if `inserted`."""

    layer: int
    inserted: bool = False
    grafts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gates:
    """The gate of a model, and the parts that it switches, by layer."""

    gate: GateSpec
    gated: Mapping[int, GatedSpec]


class GateRules(GraftRules):
    """The rules of a domain gate and of the parts that it switches."""

    name = "gate"
    keys = ("domain_gate", "gated")
    losses: ClassVar[Mapping[str, str]] = {}
    # The reason, in error messages, why the gate must know where documents begin.
    what: ClassVar[str] = "a domain gate decides by the tokens before each in its document"

    def read(self, raw: Mapping[str, Any]) -> Gates:
        """Return the gate and the parts that it switches; ValueError for several gates or for nothing to switch."""
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
        """Raise ValueError where an engine replaced transformers' attention."""
        refuse_engine(config, self.what, "serve this output with transformers' own attention, or one without a gate")

    def trains(self, surgery: Surgery) -> list[str]:
        """Return no names: the gate gets no gradient, it is fitted before training."""
        return []

    def needs_domains(self, surgery: Surgery) -> bool:
        """Return True: in training `domain_ids` decide where the gate is open."""
        return True

    def crosses(self, surgery: Surgery) -> int:
        """Return the gate's layer, whose decision deeper layers use."""
        found: Gates = surgery.of[self.name]
        return found.gate.layer


def _renamed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with the key `closes` for `hysteresis`, its name in earlier versions."""
    return {("closes" if key == "hysteresis" else key): value for key, value in entry.items()}
