"""Gemma 1 (`GemmaForCausalLM`): Llama's layer; norms multiply by one plus the stored weight; tied embeddings."""

from __future__ import annotations

from surgeon.families.family import Config, Family, Part, Sizes, attention, flag, gated_mlp, norm


def layer_parts(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Pre-norm layer."""
    bias = flag(config, "attention_bias")
    return (
        norm("input_layernorm", "pre_attention_norm", sizes.hidden),
        *attention(sizes, qkv_bias=bias, output_bias=bias),
        norm("post_attention_layernorm", "pre_mlp_norm", sizes.hidden),
        *gated_mlp(sizes),
    )


FAMILY = Family(
    model_type="gemma",
    layer_parts=layer_parts,
    defaults={"num_key_value_heads": 16, "head_dim": 256},
    norm_offset=1.0,
    tied_by_default=True,
)
