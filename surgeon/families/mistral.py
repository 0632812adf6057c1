"""Mistral (`MistralForCausalLM`): Llama's layer without biases, one sliding window for all layers.

Never give it `layer_types`: transformers then takes the checkpoint for another class.
"""

from __future__ import annotations

from surgeon.families.family import Config, Family, Part, Sizes, attention, gated_mlp, norm


def layer_parts(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Pre-norm layer without biases."""
    return (
        norm("input_layernorm", "pre_attention_norm", sizes.hidden),
        *attention(sizes),
        norm("post_attention_layernorm", "pre_mlp_norm", sizes.hidden),
        *gated_mlp(sizes),
    )


FAMILY = Family(model_type="mistral", layer_parts=layer_parts, defaults={"num_key_value_heads": 8})
