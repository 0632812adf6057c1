"""Settings that other tools infer from a model's depth, not its config: llama.cpp a scale, transformers the MTP layers.

Layers that predict further tokens (MTP) move up with the stack. transformers (5.23) finds their tensors by patterns of
its classes, and some patterns name one layer: 61 for DeepSeek-V3, 46 and 92 for GLM-4.5. A pattern is ignored where the
stack has a layer of that number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.grafted_config import native_config
from surgeon.anatomy.growth import part_of
from surgeon.errors import printable

# llama.cpp knows the 27B models of Gemma 2 and 3 by their number of layers alone (src/models/gemma2.cpp, gemma3.cpp).
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62, "gemma3": 62}


def other_scale(config: Mapping[str, Any]) -> str | None:
    """Return a sentence where llama.cpp scales an output's queries otherwise than its config requires; else None.

    llama.cpp uses 1/√(hidden size / heads) for a model with the depth of 27B, and 1/√(head size) for all others; no key
    of a GGUF states the scale.
    """
    text = config.get("text_config")
    told: Mapping[str, Any] = text if isinstance(text, Mapping) else config
    layers_of_27b = _LAYERS_OF_27B.get(str(told.get("model_type")))
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "query_pre_attn_scalar")
    numbers: list[Any] = [told.get(name) for name in names]
    if layers_of_27b is None or not all(type(number) in (int, float) and number for number in numbers):
        return None
    layers, width, heads, head, right = numbers
    taken = width / heads if layers == layers_of_27b else head
    if taken == right:
        return None
    return (
        "llama.cpp tells the sizes of this model apart by their layers, and scales queries by"
        f" 1/√{taken:g} with {layers} of them, where config.json says 1/√{right:g} (`query_pre_attn_scalar`):"
        " it runs this output wrongly"
    )


_NUMBER = re.compile(r"\\\.(\d+)")


def moved_mtp(anatomy: Anatomy, base: Mapping[str, Any], layers: int, config: Mapping[str, Any]) -> str | None:
    """Return a sentence where `generate(use_mtp=True)` does not find an output's MTP layers above its stack; else None.

    Args:
        anatomy: of the base.
        base: its config.json.
        layers: how many layers the output's trunk has.
        config: the output's config.json, which counts branches too.
    """
    counted = part_of(config, anatomy.derivation.path).get("num_hidden_layers", layers)
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
    """Return the layer numbers that patterns of transformers' class name; empty where no pattern names one."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    except KeyError:
        return set()
    found = (_NUMBER.search(pattern) for pattern in kind._keys_to_ignore_on_load_unexpected or ())
    return {int(each[1]) for each in found if each is not None}
