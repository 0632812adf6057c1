"""Qwen3 dense models (`Qwen3ForCausalLM`): norms on each query and key head, head size of its own."""

from __future__ import annotations

from surgeon.families.family import Config, Family, Part, Sizes, attention, flag, gated_mlp, norm
from surgeon.families.qwen2 import layer_types


def layer_parts(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Pre-norm layer; the query and key norms are as wide as one head."""
    bias = flag(config, "attention_bias")
    return (
        norm("input_layernorm", "pre_attention_norm", sizes.hidden),
        *attention(sizes, qkv_bias=bias, output_bias=bias),
        norm("self_attn.q_norm", "query_norm", sizes.head_dim),
        norm("self_attn.k_norm", "key_norm", sizes.head_dim),
        norm("post_attention_layernorm", "pre_mlp_norm", sizes.hidden),
        *gated_mlp(sizes),
    )


FAMILY = Family(
    model_type="qwen3",
    layer_parts=layer_parts,
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    layer_types=layer_types,
)
