"""Mixtures of experts, for operations that change the number of experts: their tensors, and the config's counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.family import Part
from surgeon.anatomy.growth import part_of
from surgeon.blueprint.draft import Draft, LayerDraft
from surgeon.blueprint.recipes import Copy, Recipe, whole
from surgeon.errors import BadInput, printable

# An expert's number in a tensor's suffix.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Parts of config keys with "expert" that count something else; and the keys for how many experts a token takes.
_OTHERS = ("per_tok", "shared", "top", "active", "selected", "group")
_AT_ONCE = re.compile(r".*experts_per_tok(en)?|.*expert.*top_?k|top_k_experts|moe_.*top_?k|moe_k|num_selected_experts")
ExpertNumber = Annotated[int, Field(ge=0, le=65535)]
LayerKey = Annotated[str, Field(pattern=r"^[0-9]{1,4}$")]
# How a tensor of the output is made of one of the base.
Made = Callable[[Copy, Part], Recipe]


@dataclass(frozen=True)
class LayerExperts:
    """The experts of a layer: their number, the parts of experts and router, and the number of their groups."""

    count: int
    parts: list[Part]
    groups: int

    @property
    def by_group(self) -> list[range]:
        """The numbers of the experts of each group."""
        size = self.count // self.groups
        return [range(begin, begin + size) for begin in range(0, self.count, size)]


# The experts of each layer that has some.
Mixtures = Mapping[int, LayerExperts]


class Place(NamedTuple):
    """One expert of the output: the base's expert `source`, or, if `new`, an expert made from it."""

    source: int
    new: bool


def arrange(
    home: LayerDraft,
    own: Sequence[Part],
    places: Sequence[Place],
    draft: Draft,
    *,
    stacked: Made,
    born: Made | None = None,
) -> None:
    """Give a layer the experts `places`, in this order, and renumber their tensors; other experts are left out.

    Args:
        home: The layer.
        own: The parts of experts and router.
        places: The experts of the output.
        draft: The draft with the layer.
        stacked: Makes a tensor that has a slice for each expert.
        born: Makes a tensor of one new expert; None where no expert is new.
    """
    parts, made = {part.suffix: part for part in own}, dict[str, Recipe]()
    copies: dict[int, list[int]] = {}
    for place, (source, _) in enumerate(places):
        copies.setdefault(source, []).append(place)
    for suffix, recipe in home.tensors.items():
        part = parts.get(suffix)
        if part is None:
            made[suffix] = recipe
            continue
        assert isinstance(recipe, Copy), suffix
        number = None if part.expert is None else part.expert.number
        if number is None:
            made[suffix] = stacked(recipe, part)
            home.rewritten[suffix] = draft.number
            continue
        for place in copies.get(number, ()):
            name = _NUMBER.sub(str(place), suffix)
            if places[place].new:
                assert born is not None
                made[name] = born(recipe, part)
            else:
                made[name] = recipe if place == number else whole(recipe)
            if place != number:
                home.rewritten[name] = draft.number
    home.tensors = made


def check_layers(named: Mapping[int, Sequence[int]], mixtures: Mixtures) -> None:
    """Raise BadInput unless the layers in `named` are exactly the layers with experts."""
    if missing := sorted(mixtures.keys() ^ named.keys()):
        raise BadInput(
            f"layer {missing[0]}: name experts of every layer that has some, and of no other: the config has one"
            f" number of experts for all ({', '.join(map(str, mixtures))})"
        )


def mixtures_of(anatomy: Anatomy) -> dict[int, LayerExperts]:
    """Return the experts of each layer that has some.

    Raises BadInput where there are none, they are quantised, or layers that predict further tokens have experts too.
    """
    found: dict[int, LayerExperts] = {}
    for layer, number in enumerate(anatomy.kind_of):
        kind = anatomy.kinds[number]
        own = [
            part for part in kind.parts if part.expert is not None or (part.blocks and part.blocks[0][0] == "router")
        ]
        if not own:
            continue
        if kind.packed:
            raise BadInput(
                f"layer {layer}: its experts are quantised, so their number cannot change; use the full-precision"
                " model, or `dequantise` it first"
            )
        count = next(part.blocks[0][1] for part in own if part.expert is None)
        found[layer] = LayerExperts(count, own, kind.expert_groups)
    if not found:
        raise BadInput("no layer of this model has experts that surgeon understands; is it a mixture of experts?")
    if (further := next((name for name in anatomy.further if ".experts." in name), None)) is not None:
        raise BadInput(
            f"{printable(further)}: layers that predict further tokens have experts of their own, which the config"
            " counts with these; take these layers out first"
        )
    return found


def listed(
    experts: Sequence[int] | Mapping[str, Sequence[int]], mixtures: Mapping[int, object]
) -> dict[int, list[int]]:
    """Return experts by layer, from a plan's list: the same for all layers of a mixture, or by layer."""
    if isinstance(experts, Mapping):
        return {int(layer): [*numbers] for layer, numbers in experts.items()}
    return {layer: [*experts] for layer in mixtures}


def counted(draft: Draft) -> dict[str, int]:
    """Return the integers of the config's text part, by key."""
    part = part_of(draft.config, draft.anatomy.derivation.path)
    return {key: value for key, value in part.items() if type(value) is int}


def chosen_by(draft: Draft) -> dict[str, int]:
    """Return the config's entries, by key, for how many experts a token goes to."""
    return {key: value for key, value in counted(draft).items() if _AT_ONCE.fullmatch(key)}


def sizes_with(draft: Draft, before: int, after: int) -> dict[str, int]:
    """Return the config's entries for the number of experts, set to `after`; `before` is the present number.

    Raises BadInput where no entry has it, or a token takes more than `after` experts.
    """
    found = [key for key, value in counted(draft).items() if "expert" in key and value == before]
    found = [key for key in found if not any(word in key for word in _OTHERS)]
    if not found:
        raise BadInput("config.json: no field says how many experts there are, so their number cannot change")
    for key, value in chosen_by(draft).items():
        if value > after:
            raise BadInput(f"{after} experts would be left of {before}, and each token takes {value} (`{key}`)")
    return dict.fromkeys(found, after)


def check_plain(draft: Draft) -> None:
    """Raise BadInput where an earlier operation added layers or changed the base's."""
    if draft.bank is not None or any(layer.grafts for layer in draft.layers):
        raise BadInput("the model carries grafts beside its layers; change experts before grafting, or revert first")
    if draft.records and (draft.dropped or any(home.base is None or home.rewritten for home in draft.layers)):
        raise BadInput("an earlier operation of this plan changed layers; change experts first, or apply two plans")
