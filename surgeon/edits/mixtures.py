"""Mixtures of experts, for operations that change the number of experts: their tensors, and the config's counts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.family import Part
from surgeon.anatomy.growth import part_of
from surgeon.blueprint.draft import Draft
from surgeon.errors import BadInput, printable

# An expert's number in a tensor's suffix.
EXPERT_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Parts of config keys with "expert" that count something else; and the keys for how many experts a token takes.
_OTHERS = ("per_tok", "shared", "top", "active", "selected", "group")
_AT_ONCE = re.compile(r".*experts_per_tok(en)?|.*expert.*top_?k|top_k_experts|moe_.*top_?k|moe_k|num_selected_experts")
ExpertNumber = Annotated[int, Field(ge=0, le=65535)]
LayerKey = Annotated[str, Field(pattern=r"^[0-9]{1,4}$")]
# By layer: its number of experts, and the parts that belong to them.
Mixtures = Mapping[int, tuple[int, list[Part]]]


def check_layers(named: Mapping[int, Sequence[int]], mixtures: Mixtures) -> None:
    """Raise BadInput unless the layers in `named` are exactly the layers with experts."""
    if missing := sorted(mixtures.keys() ^ named.keys()):
        raise BadInput(
            f"layer {missing[0]}: name experts of every layer that has some, and of no other: the config has one"
            f" number of experts for all ({', '.join(map(str, mixtures))})"
        )


def mixtures_of(anatomy: Anatomy) -> dict[int, tuple[int, list[Part]]]:
    """Return (number of experts, their parts) for each layer with experts.

    Raises BadInput where there are none, they are quantised, or layers that predict further tokens have experts too.
    """
    found: dict[int, tuple[int, list[Part]]] = {}
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
        found[layer] = next(part.blocks[0][1] for part in own if part.expert is None), own
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
