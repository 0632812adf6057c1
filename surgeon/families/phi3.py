"""Phi-3 and Phi-4 text models (`Phi3ForCausalLM`): query, key and value in one tensor, gate and up in another."""

from __future__ import annotations

from surgeon.families.family import Config, Family, Part, Role, Sizes, fused_projection, norm, projection


def layer_parts(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Pre-norm layer with fused projections, no biases."""
    qkv: tuple[tuple[Role, int], ...] = (
        ("query", sizes.query_width),
        ("key", sizes.kv_width),
        ("value", sizes.kv_width),
    )
    return (
        norm("input_layernorm", "pre_attention_norm", sizes.hidden),
        *fused_projection("self_attn.qkv_proj", qkv, sizes.hidden),
        *projection("self_attn.o_proj", "output", sizes.hidden, sizes.query_width),
        norm("post_attention_layernorm", "pre_mlp_norm", sizes.hidden),
        *fused_projection("mlp.gate_up_proj", (("gate", sizes.intermediate), ("up", sizes.intermediate)), sizes.hidden),
        *projection("mlp.down_proj", "down", sizes.hidden, sizes.intermediate),
    )


FAMILY = Family(model_type="phi3", layer_parts=layer_parts)
