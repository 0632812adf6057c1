"""The config.json of a model with grafts, but for its `surgery`: its classes, and what reads otherwise in its trunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import changed_fields
from surgeon.runtime.composition import PREFIX, Composition, short_name, upcycled


def head_with_grafts(composition: Composition, trunk: Mapping[str, Any]) -> str:
    """The head that a model of the config `trunk` has once it has grafts, by its class without them.

    Raises BadInput where the config names one for which there are no upcycled classes.
    """
    named = [str(name) for name in trunk.get("architectures") or ()]
    head = short_name(composition.head)
    known = (head, *(short_name(each.native) for each in composition.heads), short_name(composition.model))
    found = next((name for name in known if name in named), None)
    if composition.encoder:
        # By a head that has an upcycled class, or none: the base model's then, with the head carried along.
        return found or short_name(composition.model)
    if not named:
        return head
    if found is None or len(named) > 1:
        raise BadInput(
            f"config.json: `architectures` is {printable(repr(named))}; grafts are made for"
            f" {', '.join(dict.fromkeys(known))}"
        )
    return found


def config_with_grafts(
    composition: Composition, head: str, trunk: Mapping[str, Any], made: Mapping[str, Any]
) -> dict[str, Any]:
    """The config `made` of all layers, branches among them, as that of a model with grafts; `trunk` is without them."""
    config = {
        **made,
        "model_type": PREFIX + composition.model_type,
        "architectures": [upcycled(head)],
        "auto_map": composition.auto_map,
    }
    # An `auto_map` of a tokenizer alone is no part of the trunk's model.
    unlike = {"model_type", "auto_map"}
    one, other = ({key: value for key, value in each.items() if key not in unlike} for each in (trunk, config))
    return config | {"anatomy": composition.to_json() | {"trunk": changed_fields(one, other)}}
