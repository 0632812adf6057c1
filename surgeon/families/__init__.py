"""What each architecture calls its parts. One file a family, named after its `model_type`.

A new family is one file here and one line in `FAMILIES` or `ENCODERS`; see CONTRIBUTING.md for the checklist.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgeon.errors import BadInput, printable
from surgeon.families import (
    deberta,
    deberta_v2,
    gemma,
    gemma2,
    gemma3_text,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    roberta,
)
from surgeon.families.family import Family

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "gemma": gemma.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3_text": gemma3_text.FAMILY,
    "olmo2": olmo2.FAMILY,
    "phi3": phi3.FAMILY,
}

# Read in both directions; only operations of `surgeon.operations.ON_ENCODERS` work on them.
ENCODERS: dict[str, Family] = {
    "roberta": roberta.FAMILY,
    "deberta": deberta.FAMILY,
    "deberta-v2": deberta_v2.FAMILY,
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint's config; BadInput for an architecture surgeon does not know."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise BadInput("config.json: no `model_type`; is this a transformers checkpoint?")
    family = FAMILIES.get(model_type) or ENCODERS.get(model_type)
    if family is None:
        hint = ""
        if isinstance(config.get("text_config"), Mapping):
            hint = "; it wraps a text model: save that alone (its `text_config` and language_model tensors)"
        raise BadInput(
            f"config.json: model_type {printable(model_type)!r} is not a family surgeon knows"
            f" ({', '.join([*FAMILIES, *ENCODERS])}){hint}; docs/adding.md tells how to add one"
        )
    return family
