"""Gemma 2 (`Gemma2ForCausalLM`): norms before and after attention and MLP; every other layer sliding."""

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
    """Sandwich-norm layer: `post_*` norms scale what the branches add to the residual stream."""
    bias = flag(config, "attention_bias")
    return (
        norm("input_layernorm", "pre_attention_norm", sizes.hidden),
        *attention(sizes, qkv_bias=bias, output_bias=bias),
        norm("post_attention_layernorm", "post_attention_norm", sizes.hidden),
        norm("pre_feedforward_layernorm", "pre_mlp_norm", sizes.hidden),
        *gated_mlp(sizes),
        norm("post_feedforward_layernorm", "post_mlp_norm", sizes.hidden),
    )


def layer_types(config: Config, layers: int) -> list[str]:
    """The listed types, else sliding and full in turn, sliding first (as older config.json files imply)."""
    listed = listed_layer_types(config, layers)
    return listed or ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]


FAMILY = Family(
    model_type="gemma2",
    layer_parts=layer_parts,
    defaults={"num_key_value_heads": 4, "head_dim": 256},
    norm_offset=1.0,
    tied_by_default=True,
    layer_types=layer_types,
)
