"""What each architecture calls its parts.

A new family is one function and one entry in `decoders.py` (or `encoders.py`); docs/adding.md has the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from surgeon.common.plugins import Plugin, Registry, wrong_kind
from surgeon.errors import BadInput, printable
from surgeon.families.decoders import DECODERS
from surgeon.families.encoders import ENCODER_FAMILIES
from surgeon.families.family import Family

GROUP = "surgeon.families"


def _admits(*, encoder: bool) -> Callable[[Plugin], Family | None]:
    def admit(plugin: Plugin) -> Family | None:
        if not isinstance(plugin.value, Family):
            raise wrong_kind(plugin, GROUP, "a surgeon.families.family.Family")
        if plugin.value.model_type != plugin.name:
            raise wrong_kind(plugin, GROUP, f"called as its model_type, `{printable(plugin.value.model_type)}`")
        return plugin.value if plugin.value.encoder is encoder else None

    return admit


FAMILIES: Registry[Family] = Registry(GROUP, {family.model_type: family for family in DECODERS}, _admits(encoder=False))

# Read in both directions; only operations that know encoders work on them.
ENCODERS: Registry[Family] = Registry(
    GROUP, {family.model_type: family for family in ENCODER_FAMILIES}, _admits(encoder=True)
)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint's config; BadInput for an architecture surgeon does not know."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        found = f"is {printable(repr(model_type), 60)}, not a name" if "model_type" in config else "is missing"
        raise BadInput(f"config.json: `model_type` {found}; is this a transformers checkpoint?")
    family = FAMILIES.get(model_type) or ENCODERS.get(model_type)
    if family is None:
        hint = ""
        if isinstance(config.get("text_config"), Mapping):
            hint = "; it wraps a text model: save that alone (its `text_config` and language_model tensors)"
        raise BadInput(
            f"config.json: model_type {printable(model_type)!r} is not a family surgeon knows"
            f" ({', '.join([*FAMILIES, *ENCODERS])}), nor a text decoder of the installed transformers{hint};"
            " docs/adding.md shows how to add one"
        )
    return family
