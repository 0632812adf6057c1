"""A domain gate: what `config.surgery` says of it and of what it switches, and what it is born with.

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

from .births import Birth, Fill
from .rules import GraftRules, Kind, Surgery, built, by_layer, check_layers, one_of, refuse_engine

GATE = "domain_gate."
READS = ("cusum", "prefix_mean", "token")
FORMS = ("mlp", "linear")
# Evidence of new text, in nats, that opens a gate at least where nothing is said.
OPENS = 7.0
_WORDS = {"cusum": "the evidence gathered (CUSUM)", "prefix_mean": "the mean of the prefix", "token": "the token"}


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

    def check(self) -> None:
        """ValueError for what no gate is."""
        one_of("domain_gate reads", self.reads, READS)
        one_of("domain_gate form", self.form, FORMS)
        if self.units < 1 or self.prior < 0:
            raise ValueError(
                f"config.surgery: domain_gate has {self.units} units and a prior of {self.prior} tokens; they must be"
                " at least 1 and 0"
            )
        if self.closes is not None and not 0.0 <= self.closes < float("inf"):
            raise ValueError(
                f"config.surgery: domain_gate closes is {self.closes}; it must be null or a number from 0 on"
            )
        if not 0.0 <= self.opens < float("inf"):
            raise ValueError(f"config.surgery: domain_gate opens is {self.opens}; it must be a number from 0 on")
        if not 0.0 < self.false_positives < 1.0:
            raise ValueError(
                f"config.surgery: domain_gate false_positives is {self.false_positives}; it must lie between 0 and 1"
            )

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Its tensors' shapes."""
        mlp = self.form == "mlp"
        found: dict[str, tuple[int, ...]] = {"weight": (self.units if mlp else 1, width)}
        found |= {"bias": (self.units,), "out": (1, self.units)} if mlp else {}
        return found | {"offset": (1,), "threshold": (1,)}

    def births(self, width: int) -> dict[str, Birth]:
        """Its tensors at birth: zeros, by which it is closed."""
        return {name: Fill(shape) for name, shape in self.shapes(width).items()}


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


class GateKind(Kind):
    """The gate, in the layer whose input it reads."""

    key = "domain_gate"
    mark = "D"

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """`domain gate, mlp of 64 on the mean of the prefix`."""
        form = "linear" if entry.get("form") == "linear" else f"mlp of {entry.get('units', 64)}"
        return f"domain gate, {form} on {_WORDS.get(entry.get('reads', READS[0]), '?')}"

    def claims(self, suffix: str) -> bool:
        """What stands at `domain_gate`."""
        return suffix.startswith(GATE)


class GatedKind(Kind):
    """What the gate switches in a layer."""

    key = "gated"
    mark = "d"

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """`gated: layer, adapters`."""
        return "gated: " + ", ".join([*(["layer"] if entry.get("inserted") else []), *entry.get("grafts", ())])

    def claims(self, suffix: str) -> bool:
        """No tensor."""
        return False

    def kept(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """As it is: nothing of it trains."""
        return {key: value for key, value in entry.items() if key != "layer"}


class GateRules(GraftRules):
    """A domain gate, and what it switches."""

    name = "gate"
    keys = ("domain_gate", "gated")
    kinds = (GateKind(), GatedKind())
    losses: ClassVar[Mapping[str, str]] = {}
    part = "surgeon.runtime.gate"
    module = "GateGraft"
    roles = ()
    brings = ("GATES",)
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

    def check(self, surgery: Surgery, config: Any) -> None:
        """Entries hold together, layers exist, what is switched stands there and not below the gate."""
        found: Gates = surgery.of[self.name]
        found.gate.check()
        if config.encoder:
            raise ValueError(
                "config.surgery: a domain_gate decides token by token, and an encoder reads whole sequences"
            )
        check_layers([found.gate.layer, *found.gated], surgery.trunk_layers, "gated")
        below = [layer for layer in found.gated if layer < found.gate.layer]
        if below:
            raise ValueError(
                f"config.surgery: the domain_gate reads what goes into layer {found.gate.layer}, and layers {below}"
                " below it are gated"
            )
        present = {rules.name for rules in surgery.rules}
        for spec in found.gated.values():
            if absent := sorted(set(spec.grafts) - present):
                raise ValueError(
                    f"config.surgery: gated names `{absent[0]}` in layer {spec.layer}, a graft that is not there"
                )
            if spec.inserted and spec.layer not in surgery.inserted:
                raise ValueError(f"config.surgery: gated says that layer {spec.layer} was inserted; it is the base's")

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
