"""Mixtures of experts, as operations that change their number find them: their tensors, and the config's counts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from surgeon.blueprint.draft import Draft
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.family import Part
from surgeon.operations.operation import Spec

if TYPE_CHECKING:
    from surgeon.models.expert_choice import Estimate

# An expert's number in a tensor's suffix.
EXPERT_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Of keys of a config that count experts, those that count something else; and those that say how many a token takes.
_OTHERS = ("per_tok", "shared", "top", "active", "selected", "group")
_AT_ONCE = re.compile(r".*experts_per_tok(en)?|.*expert.*top_?k|top_k_experts|moe_.*top_?k|moe_k|num_selected_experts")
ExpertNumber = Annotated[int, Field(ge=0, le=65535)]
LayerKey = Annotated[str, Field(pattern=r"^[0-9]{1,4}$")]


class Loss(Spec):
    """A mean over windows in nats a token, with the ends of its 95 % interval."""

    mean: Annotated[float, Field(allow_inf_nan=False)]
    low: Annotated[float, Field(allow_inf_nan=False)]
    high: Annotated[float, Field(allow_inf_nan=False)]

    @classmethod
    def of(cls, found: Estimate) -> Loss:
        """What was measured."""
        return cls(mean=found.mean, low=found.low, high=found.high)

    @property
    def shown(self) -> str:
        """A difference, in words."""
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def mixtures_of(anatomy: Anatomy) -> dict[int, tuple[int, list[Part]]]:
    """The layers that have experts: how many, and what belongs to them. Raises BadInput where there are none."""
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
    """Experts of every layer of a mixture, as a plan lists them: for all layers the same, or by layer."""
    if isinstance(experts, Mapping):
        return {int(layer): [*numbers] for layer, numbers in experts.items()}
    return {layer: [*experts] for layer in mixtures}


def counted(draft: Draft) -> dict[str, int]:
    """The whole numbers of the text's part of the config, by key."""
    part: Mapping[str, object] = draft.config
    for key in draft.anatomy.derivation.path:
        inner = part.get(key)
        part = inner if isinstance(inner, Mapping) else {}
    return {key: value for key, value in part.items() if type(value) is int}


def chosen_by(draft: Draft) -> dict[str, int]:
    """What the config calls the number of experts that a token takes, with that number."""
    return {key: value for key, value in counted(draft).items() if _AT_ONCE.fullmatch(key)}


def sizes_with(draft: Draft, before: int, after: int) -> dict[str, int]:
    """What the config calls the number of experts, with the new one. Raises BadInput where that cannot be."""
    found = [key for key, value in counted(draft).items() if "expert" in key and value == before]
    found = [key for key in found if not any(word in key for word in _OTHERS)]
    if not found:
        raise BadInput("config.json: no field says how many experts there are, so their number cannot change")
    for key, value in chosen_by(draft).items():
        if value > after:
            raise BadInput(f"{after} experts would be left of {before}, and each token takes {value} (`{key}`)")
    return dict.fromkeys(found, after)


def check_plain(draft: Draft) -> None:
    """Raise BadInput where an earlier operation made layers, or others than the base's."""
    if draft.bank is not None or any(layer.grafts for layer in draft.layers):
        raise BadInput("the model carries grafts beside its layers; change experts before grafting, or revert first")
    if draft.records and (draft.dropped or any(home.base is None or home.rewritten for home in draft.layers)):
        raise BadInput("an earlier operation of this plan changed layers; change experts first, or apply two plans")
