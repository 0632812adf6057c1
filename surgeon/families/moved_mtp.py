"""Layers that predict further tokens (MTP), which a surgery moves up with the stack: whether transformers finds them.

transformers (5.23) looks for their tensors by patterns of its classes, and some name one layer: 61 for DeepSeek-V3, 46
and 92 for GLM-4.5. A pattern of a layer that the stack has is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from surgeon.errors import printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.grafted_config import native_config

_NUMBER = re.compile(r"\\\.(\d+)")


def moved_mtp(anatomy: Anatomy, base: Mapping[str, Any], layers: int, config: Mapping[str, Any]) -> str | None:
    """A sentence where `generate(use_mtp=True)` does not find an output's MTP layers above its stack; else None.

    Args:
        anatomy: of the base.
        base: its config.json.
        layers: how many layers the output's trunk has.
        config: the output's config.json, which counts branches too.
    """
    part = config
    for key in anatomy.derivation.path:
        part = part.get(key, {})
    counted = part.get("num_hidden_layers", layers)
    if not anatomy.beyond or layers == anatomy.sizes.layers == counted:
        return None
    numbers = [layers + number for number in range(len(anatomy.beyond))]
    shown = ", ".join(map(str, numbers))
    if layers != counted:
        return (
            f"MTP layers ({shown}) are copied, but `generate(use_mtp=True)` looks for them from {counted} on, where"
            " branches are counted"
        )
    model_type = str(native_config(base).get("model_type"))
    known = _numbered(model_type)
    if not known or set(numbers) <= known:
        return None
    pattern = rf'[r"layers\.({"|".join(map(str, numbers))})\."]'
    return (
        f"MTP layers become {shown}, and transformers finds those of a {printable(model_type)} at"
        f" {' or '.join(map(str, sorted(known)))} alone: before `generate(use_mtp=True)`, set"
        f" `model._keys_to_ignore_on_load_unexpected = {pattern}`"
    )


def _numbered(model_type: str) -> set[int]:
    """The layers that patterns of transformers' class name; none where no pattern names one."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    except KeyError:
        return set()
    found = (_NUMBER.search(pattern) for pattern in kind._keys_to_ignore_on_load_unexpected or ())
    return {int(each[1]) for each in found if each is not None}
