"""A domain gate for planners: the checks of its entries, and its initial values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgeon.grafts.checks import check_layers, one_of
from surgeon.grafts.kinds import Kind, KnownGraft
from surgeon.runtime.births import Birth, Fill
from surgeon.runtime.gate_rules import GATE, GateRules, Gates, GateSpec
from surgeon.runtime.rules import Surgery

READS = ("cusum", "prefix_mean", "token")
FORMS = ("mlp", "linear")
_WORDS = {"cusum": "the evidence gathered (CUSUM)", "prefix_mean": "the mean of the prefix", "token": "the token"}


class GateKind(Kind):
    """The gate, in the layer whose input it reads."""

    key = "domain_gate"
    mark = "D"

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """Return a text like `domain gate, mlp of 64 on the mean of the prefix`."""
        form = "linear" if entry.get("form") == "linear" else f"mlp of {entry.get('units', 64)}"
        return f"domain gate, {form} on {_WORDS.get(entry.get('reads', READS[0]), '?')}"

    def claims(self, suffix: str) -> bool:
        """Return whether the tensor is under `domain_gate`."""
        return suffix.startswith(GATE)


class GatedKind(Kind):
    """The parts of a layer that the gate switches."""

    key = "gated"
    mark = "d"

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """Return a text like `gated: layer, adapters`."""
        return "gated: " + ", ".join([*(["layer"] if entry.get("inserted") else []), *entry.get("grafts", ())])

    def claims(self, suffix: str) -> bool:
        """Return False: there are no tensors of this kind."""
        return False

    def kept(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entry without its layer number; it is not marked frozen, because nothing in it is trained."""
        return {key: value for key, value in entry.items() if key != "layer"}


class KnownGate(KnownGraft, GateRules):
    """A domain gate and the parts that it switches, as planners use them."""

    kinds = (GateKind(), GatedKind())
    part = "surgeon.runtime.gate"
    module = "GateGraft"
    roles = ()

    def check(self, surgery: Surgery, config: Any) -> None:
        """Check that entries are consistent, layers exist, and switched parts exist and are not below the gate.

        Raises ValueError.
        """
        found: Gates = surgery.of[self.name]
        _check(found.gate)
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


def _check(spec: GateSpec) -> None:
    """Raise ValueError for settings that no gate can have."""
    one_of("domain_gate reads", spec.reads, READS)
    one_of("domain_gate form", spec.form, FORMS)
    if spec.units < 1 or spec.prior < 0:
        raise ValueError(
            f"config.surgery: domain_gate has {spec.units} units and a prior of {spec.prior} tokens; they must be"
            " at least 1 and 0"
        )
    if spec.turns and (spec.reads != "cusum" or spec.closes is None):
        raise ValueError("config.surgery: domain_gate has `turns`, which only a cusum that closes can read")
    if spec.closes is not None and not 0.0 <= spec.closes < float("inf"):
        raise ValueError(f"config.surgery: domain_gate closes is {spec.closes}; it must be null or a number from 0 on")
    if not 0.0 <= spec.opens < float("inf"):
        raise ValueError(f"config.surgery: domain_gate opens is {spec.opens}; it must be a number from 0 on")
    if not 0.0 < spec.false_positives < 1.0:
        raise ValueError(
            f"config.surgery: domain_gate false_positives is {spec.false_positives}; it must lie between 0 and 1"
        )


def gate_births(spec: GateSpec, width: int) -> dict[str, Birth]:
    """Return a gate's initial tensors: zeros, with which it is closed."""
    return {name: Fill(shape) for name, shape in spec.shapes(width).items()}
