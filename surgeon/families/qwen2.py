"""Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): biases on query, key and value; sliding windows from a layer on."""

from __future__ import annotations

from surgeon.families.family import (
    Config,
    Family,
    Part,
    Sizes,
    attention,
    flag,
    gated_mlp,
    listed_layer_types,
    norm,
)


def layer_parts(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Pre-norm layer; query, key and value always carry a bias, the output projection never."""
    return (
        norm("input_layernorm", "pre_attention_norm", sizes.hidden),
        *attention(sizes, qkv_bias=True),
        norm("post_attention_layernorm", "pre_mlp_norm", sizes.hidden),
        *gated_mlp(sizes),
    )


def layer_types(config: Config, layers: int) -> list[str] | None:
    """The listed types, else those `use_sliding_window` and `max_window_layers` imply.

    None where no window is used: every layer is then of one type and nothing needs saying.
    """
    listed = listed_layer_types(config, layers)
    if listed is not None or not flag(config, "use_sliding_window"):
        return listed
    if config.get("sliding_window", 4096) is None:
        return None
    full = config.get("max_window_layers", 28)
    return ["sliding_attention" if i >= full else "full_attention" for i in range(layers)]


FAMILY = Family(
    model_type="qwen2",
    layer_parts=layer_parts,
    defaults={"num_key_value_heads": 32},
    layer_types=layer_types,
)
