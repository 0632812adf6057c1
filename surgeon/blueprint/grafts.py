"""Grafts as data: their entry in `config.surgery`, their tensors' recipes, and the config of a grafted output.

A graft is a module that the native architecture lacks; its code is stored next to the weights (`surgeon.runtime`). A
graft has no layer number until the output's layers are numbered, so that it moves with its layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surgeon.anatomy.anatomy import in_branch, owner_of
from surgeon.anatomy.grafted_config import is_grafted
from surgeon.blueprint.recipes import Constant, Random, Recipe
from surgeon.grafts.kinds import Kind
from surgeon.grafts.ranges import by_ranges
from surgeon.grafts.registry import GRAFTS, kinds
from surgeon.runtime.births import Birth, Values
from surgeon.runtime.rules import BRANCH
from surgeon.runtime.spread import for_each_layer


def recipe_of(birth: Birth, key: str, dtype: str) -> Recipe:
    """Return the recipe that makes a tensor with this initial value; `key` seeds it where it is random.

    The recipe is `Constant` for given values or a standard deviation of zero, otherwise `Random`.
    """
    match birth:
        case Values(values=values):
            return Constant(values, dtype, birth.shape)
        case Birth(std=0.0, value=value):
            return Constant(value, dtype, birth.shape)
        case Birth(std=std):
            return Random(key, std, dtype, birth.shape)


def recipes_of(births: Mapping[str, Birth], prefix: str, key: str, dtype: str) -> dict[str, Recipe]:
    """Return recipes of a graft's tensors whose names begin with `prefix`; the keys of seeds begin with `key`."""
    return {f"{prefix}{name}": recipe_of(birth, f"{key}{prefix}{name}", dtype) for name, birth in births.items()}


@dataclass(slots=True)
class Graft:
    """One graft of one layer.

    `entry` is its entry in `config.surgery[kind]` without layer numbers; `tensors` are its recipes by suffix (the part
    of the name after `layers.{i}.`). `operation` made it; None where the base brought it. `in_branch`: it is inside the
    layer's expanded twin.
    """

    kind: str
    entry: dict[str, Any]
    tensors: dict[str, Recipe] = field(default_factory=dict)
    operation: int | None = None
    in_branch: bool = False

    @property
    def rules(self) -> Kind:
        """Return the rules that apply to all grafts of this graft's kind."""
        return kinds()[self.kind]

    @property
    def text(self) -> str:
        """Return words for preview: `control block, lerp`; `adapter of 512, relu gate`; `slot 1 of rank 4`."""
        return self.rules.text(self.entry, " in the branch" if self.in_branch else "")

    @property
    def sign(self) -> str:
        """Return one or two characters that mark the graft in pictures of the layers."""
        return self.rules.sign(self.entry)

    def twin(self, operation: int) -> Graft:
        """Return the same graft inside the layer's expanded twin, where it trains: its tensors begin as copies."""
        tensors = {f"{BRANCH}{suffix}": recipe for suffix, recipe in self.tensors.items()}
        return Graft(self.kind, self.rules.thawed(self.entry), tensors, operation, in_branch=True)

    def owns(self, suffix: str) -> bool:
        """Return whether the tensor `layers.{i}.<suffix>` of its layer belongs to the graft."""
        owner = owner_of(suffix)
        if owner is None or owner.key != self.kind:
            return False
        return (owner.branching or in_branch(suffix) == self.in_branch) and owner.owns(self.entry, suffix)


def grafts_of(config: Mapping[str, Any]) -> dict[int, list[Graft]]:
    """Return a base's grafts by trunk layer, without tensors; marked frozen, because this plan did not make them."""
    found: dict[int, list[Graft]] = {}
    if not is_grafted(config):
        return found
    surgery = for_each_layer(config["surgery"])
    homes: dict[int, int] = {}
    for kind in kinds().values():
        if kind.branching:
            homes |= {entry["branch"]: entry["layer"] for entry in surgery.get(kind.key, ())}
    for kind in kinds().values():
        for entry in () if kind.whole else surgery.get(kind.key, ()):
            inside = kind.in_twin == "copied" and entry["layer"] in homes
            home = homes[entry["layer"]] if inside else entry["layer"]
            found.setdefault(home, []).append(Graft(kind.key, kind.kept(entry), in_branch=inside))
    return found


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `config.surgery` that concern no layer and no bank, such as the weights of losses."""
    surgery = config.get("surgery")
    keys = [key for rules in GRAFTS.values() for key in rules.settings]
    return {key: copy.deepcopy(surgery[key]) for key in keys if key in surgery} if isinstance(surgery, Mapping) else {}


def inserted_before(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the numbers of the layers that earlier surgeries inserted, from config.json.

    Empty where the base has no grafts: layers are listed from the first surgery with grafts on.
    """
    if not is_grafted(config):
        return frozenset()
    surgery = for_each_layer(config["surgery"])
    return frozenset([*surgery.get("new_layers", ()), *surgery.get("older_layers", ())])


def bank_of(config: Mapping[str, Any]) -> Graft | None:
    """Return a base's control states for all layers, as one frozen graft without tensors; None if it has none."""
    mixture = config["surgery"].get("mixture") if is_grafted(config) else None
    return None if mixture is None else Graft("mixture", kinds()["mixture"].kept(mixture))


def twins_of(grafts: Sequence[Sequence[Graft]]) -> list[int]:
    """Return the layers that have an expanded twin; `grafts[i]` are the grafts of layer i."""
    return [index for index, here in enumerate(grafts) if any(graft.rules.branching for graft in here)]


def described_surgery(
    grafts: Sequence[Sequence[Graft]],
    *,
    new_layers: Sequence[int],
    older_layers: Sequence[int],
    settings: Mapping[str, Any],
    bank: Graft | None,
) -> dict[str, Any]:
    """Return `config.surgery` of an output whose layer i has `grafts[i]`; branches get the numbers after the trunk."""
    branch = {layer: len(grafts) + nth for nth, layer in enumerate(twins_of(grafts))}
    surgery: dict[str, Any] = {"trunk_layers": len(grafts)}
    for index, here in enumerate(grafts):
        for graft in here:
            numbers = {"layer": branch[index] if graft.in_branch else index}
            if graft.rules.branching:
                numbers["branch"] = branch[index]
            surgery.setdefault(graft.kind, []).append(numbers | graft.entry)
    if bank is not None:
        surgery["mixture"] = copy.deepcopy(bank.entry)
    surgery |= copy.deepcopy(dict(settings)) | {"new_layers": list(new_layers)}
    return by_ranges(surgery | ({"older_layers": list(older_layers)} if older_layers else {}))
