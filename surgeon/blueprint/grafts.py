"""Grafts as data: their entry in `config.surgery`, their tensors' recipes, and the config of a grafted output.

A graft is a module that the native architecture lacks; its code ships beside the weights (`surgeon.runtime`). Layer
numbers are left out of a graft until the output's layers are numbered, so that it moves with its layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surgeon.blueprint.recipes import Recipe
from surgeon.errors import BadInput, printable
from surgeon.families.grafted import BRANCH, GraftKind, Owner, is_grafted
from surgeon.runtime.natives import NATIVES, PREFIX, Native

# Heads of a base that have an upcycled twin; a checkpoint without a head is its family's base model. Where a config
# names no class, it is the first.
_HEADS = ("ForCausalLM", "ForSequenceClassification", "Model")


_ENCODER_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification")


_LAYER_NUMBERS = ("layer", "branch")


@dataclass(slots=True)
class Graft:
    """One graft of one layer.

    `entry` is its entry in `config.surgery[kind]` without layer numbers; `tensors` are its recipes by suffix (what
    follows `layers.{i}.`). `operation` made it, None where the base brought it. `in_branch` says that it stands
    inside the layer's expanded twin.
    """

    kind: GraftKind
    entry: dict[str, Any]
    tensors: dict[str, Recipe] = field(default_factory=dict)
    operation: int | None = None
    in_branch: bool = False

    @property
    def text(self) -> str:
        """What preview says of it: `control block, lerp`; `adapter of 512, relu gate`; `slot 1 of rank 4`."""
        where = " in the branch" if self.in_branch else ""
        match self.kind:
            case "control":
                return f"control block, {self.entry['interpolator']['kind']}"
            case "adapters":
                gate = self.entry.get("gate", "relu")
                return f"adapter of {self.entry['size']}{where}, " + ("no gate" if gate == "none" else f"{gate} gate")
            case "experts":
                return ", ".join(self._slot_text(slot) for slot in self.entry["slots"]) + where
            case "expert_router":
                return "router " + ", ".join(f"column {slot['slot']}" for slot in self.entry["slots"])
            case "control_states":
                return "control states at " + " and ".join(self.entry["sites"])
            case "mixture":
                return f"bank of control states of rank {self.entry['rank']}"

    def _slot_text(self, slot: Mapping[str, Any]) -> str:
        name = f"slot {slot['slot']}" if self.entry["routed"] else "shared LoRA"
        targets = ", ".join(target.rpartition(".")[2] for target in slot["targets"])
        ranks = sorted({slot.get("ranks", {}).get(target, slot["rank"]) for target in slot["targets"]})
        rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        return f"{name} of rank {rank} at {targets}"

    def twin(self, operation: int) -> Graft:
        """The same graft inside the layer's expanded twin, where it trains: its tensors begin as copies."""
        entry = {key: copy.deepcopy(value) for key, value in self.entry.items() if key != "frozen"}
        if "slots" in entry:
            thawed = [dict(slot) for slot in entry["slots"]]
            for slot in thawed:
                slot.pop("frozen", None)
            entry["slots"] = thawed
        tensors = {f"{BRANCH}{suffix}": recipe for suffix, recipe in self.tensors.items()}
        return Graft(self.kind, entry, tensors, operation, in_branch=True)

    def owns(self, owner: Owner) -> bool:
        """Whether a tensor of this owner is one of the graft's."""
        if owner.kind != self.kind or owner.in_branch != self.in_branch:
            return False
        if owner.slot is None:
            return True
        held = next((slot for slot in self.entry["slots"] if slot["slot"] == owner.slot), None)
        return held is not None and (self.kind == "expert_router" or owner.target in held["targets"])


def grafts_of(config: Mapping[str, Any]) -> dict[int, list[Graft]]:
    """The grafts that a base brings, by trunk layer, without tensors; marked frozen, as no new surgery made them."""
    found: dict[int, list[Graft]] = {}
    if not is_grafted(config):
        return found
    homes: dict[int, int] = {}
    for entry in config["surgery"].get("control", ()):
        homes[entry["branch"]] = entry["layer"]
    kinds: tuple[GraftKind, ...] = ("control", "adapters", "experts", "expert_router", "control_states")
    for kind in kinds:
        for entry in config["surgery"].get(kind, ()):
            in_branch = kind in ("adapters", "experts") and entry["layer"] in homes
            home = homes[entry["layer"]] if in_branch else entry["layer"]
            found.setdefault(home, []).append(Graft(kind, _kept(kind, entry), in_branch=in_branch))
    return found


def bank_of(config: Mapping[str, Any]) -> Graft | None:
    """The control states that a base brings, all layers' together, without tensors; marked frozen."""
    mixture = config["surgery"].get("mixture") if is_grafted(config) else None
    return None if mixture is None else Graft("mixture", _kept("mixture", mixture))


def grafted_config(
    config: Mapping[str, Any],
    grafts: Sequence[Sequence[Graft]],
    *,
    new_layers: Sequence[int],
    settings: Mapping[str, Any],
    per_layer: Mapping[str, Sequence[Any]],
    bank: Graft | None = None,
) -> dict[str, Any]:
    """The config of an output whose layer i carries `grafts[i]`, made from the native `config` of its trunk.

    Branches become layers of the tail; the lists `per_layer` (attention types and their like) repeat the twin's entry
    for each. `settings` are model-wide keys of `surgery`, `bank` the control states of all layers, where there are any.
    BadInput where the base's class has no upcycled twin.
    """
    grown = copy.deepcopy(dict(config))
    family = str(config["model_type"])
    twins = [index for index, here in enumerate(grafts) if any(graft.kind == "control" for graft in here)]
    branch = {layer: len(grafts) + nth for nth, layer in enumerate(twins)}
    surgery: dict[str, Any] = {"trunk_layers": len(grafts)}
    for index, here in enumerate(grafts):
        for graft in here:
            numbers = {"layer": branch[index] if graft.in_branch else index}
            if graft.kind == "control":
                numbers["branch"] = branch[index]
            surgery.setdefault(graft.kind, []).append(numbers | graft.entry)
    if bank is not None:
        surgery["mixture"] = copy.deepcopy(bank.entry)
    for key, values in per_layer.items():
        grown[key] = [*values, *(values[layer] for layer in twins)]
    grown["num_hidden_layers"] = len(grafts) + len(twins)
    grown["model_type"] = PREFIX + family
    native = NATIVES[family]
    grown["architectures"] = [_architecture(config, native)]
    grown["auto_map"] = native.auto_map
    grown["surgery"] = surgery | copy.deepcopy(dict(settings)) | {"new_layers": list(new_layers)}
    return grown


def _kept(kind: GraftKind, entry: Mapping[str, Any]) -> dict[str, Any]:
    """A base's entry without layer numbers and marked frozen, slot by slot where it holds several."""
    kept = {key: copy.deepcopy(value) for key, value in entry.items() if key not in _LAYER_NUMBERS}
    match kind:
        case "experts" | "expert_router":
            return kept | {"slots": [slot | {"frozen": True} for slot in kept["slots"]]}
        case "control_states":
            return kept
        case _:
            return kept | {"frozen": True}


def _architecture(config: Mapping[str, Any], native: Native) -> str:
    heads = _ENCODER_HEADS if native.encoder else _HEADS
    named = [str(name) for name in config.get("architectures") or ()] or [heads[0]]
    head = next((head for head in heads if named[0].endswith(head)), None)
    if len(named) > 1 or head is None:
        with_head = ", ".join(head for head in heads if head != "Model")
        raise BadInput(
            f"config.json: `architectures` is {printable(repr(named))}; grafts are made for models with"
            f" {with_head} or no head (Model)"
        )
    return native.prefix + head
