"""A setting that llama.cpp infers from a model's depth, not its config: the scale of queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
