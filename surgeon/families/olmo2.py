"""OLMo 2 (`Olmo2ForCausalLM`): norms only after attention and MLP; query and key norms over all heads at once."""

from __future__ import annotations

from surgeon.families.family import Config, Family, Part, Sizes, attention, flag, gated_mlp, norm


def layer_parts(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Post-norm layer; the query and key norms are as wide as their projections."""
    bias = flag(config, "attention_bias")
    return (
        *attention(sizes, qkv_bias=bias, output_bias=bias),
        norm("self_attn.q_norm", "query_norm", sizes.query_width),
        norm("self_attn.k_norm", "key_norm", sizes.kv_width),
        norm("post_attention_layernorm", "post_attention_norm", sizes.hidden),
        *gated_mlp(sizes),
        norm("post_feedforward_layernorm", "post_mlp_norm", sizes.hidden),
    )


FAMILY = Family(model_type="olmo2", layer_parts=layer_parts)
