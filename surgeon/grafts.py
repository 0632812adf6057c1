"""Grafts as data: their entry in `config.surgery`, their tensors' recipes, and the config of a grafted output.

A graft is a module that the native architecture lacks; its code ships beside the weights (`surgeon.runtime`). Layer
numbers are left out of a graft until the output's layers are numbered, so that it moves with its layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surgeon.errors import BadInput, printable
from surgeon.families.grafted import PREFIX, GraftKind, is_grafted
from surgeon.recipes import Recipe
from surgeon.runtime import AUTO_MAP, CLASS_PREFIXES

# Heads of a base that have an upcycled twin; a checkpoint without a head is its family's base model.
_HEADS = ("ForCausalLM", "ForSequenceClassification", "Model")
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
        """What preview says of it: `control block, lerp`; `adapter of 512, relu gate`."""
        if self.kind == "control":
            return f"control block, {self.entry['interpolator']['kind']}"
        gate = self.entry.get("gate", "relu")
        where = " in the branch" if self.in_branch else ""
        return f"adapter of {self.entry['size']}{where}, " + ("no gate" if gate == "none" else f"{gate} gate")


def grafts_of(config: Mapping[str, Any]) -> dict[int, list[Graft]]:
    """The grafts that a base brings, by trunk layer, without tensors; marked frozen, as no new surgery made them."""
    found: dict[int, list[Graft]] = {}
    if not is_grafted(config):
        return found
    homes: dict[int, int] = {}
    for entry in config["surgery"].get("control", ()):
        homes[entry["branch"]] = entry["layer"]
        found.setdefault(entry["layer"], []).append(Graft("control", _kept(entry)))
    for entry in config["surgery"].get("adapters", ()):
        home = homes.get(entry["layer"], entry["layer"])
        found.setdefault(home, []).append(Graft("adapters", _kept(entry), in_branch=entry["layer"] in homes))
    return found


def grafted_config(
    config: Mapping[str, Any],
    grafts: Sequence[Sequence[Graft]],
    *,
    new_layers: Sequence[int],
    settings: Mapping[str, Any],
    per_layer: Mapping[str, Sequence[Any]],
) -> dict[str, Any]:
    """The config of an output whose layer i carries `grafts[i]`, made from the native `config` of its trunk.

    Branches become layers of the tail; the lists `per_layer` (attention types and their like) repeat the twin's entry
    for each. `settings` are model-wide keys of `surgery`. BadInput where the base's class has no upcycled twin.
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
    for key, values in per_layer.items():
        grown[key] = [*values, *(values[layer] for layer in twins)]
    grown["num_hidden_layers"] = len(grafts) + len(twins)
    grown["model_type"] = PREFIX + family
    grown["architectures"] = [_architecture(config, family)]
    grown["auto_map"] = dict(AUTO_MAP[family])
    grown["surgery"] = surgery | copy.deepcopy(dict(settings)) | {"new_layers": list(new_layers)}
    return grown


def _kept(entry: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: copy.deepcopy(value) for key, value in entry.items() if key not in _LAYER_NUMBERS}
    return kept | {"frozen": True}


def _architecture(config: Mapping[str, Any], family: str) -> str:
    named = [str(name) for name in config.get("architectures") or ()] or [_HEADS[0]]
    head = next((head for head in _HEADS if named[0].endswith(head)), None)
    if len(named) > 1 or head is None:
        raise BadInput(
            f"config.json: `architectures` is {printable(repr(named))}; grafts are made for models with"
            f" {_HEADS[0]}, {_HEADS[1]} or no head ({_HEADS[2]})"
        )
    return CLASS_PREFIXES[family] + head
