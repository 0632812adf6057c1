"""Llama 1 to 3.x (`LlamaForCausalLM`), and the many models saved under its name."""

from __future__ import annotations

from surgeon.families.family import Config, Family, Part, Sizes, attention, flag, gated_mlp, norm


def layer_parts(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Pre-norm layer; biases by `attention_bias` (all four projections) and `mlp_bias`."""
    bias = flag(config, "attention_bias")
    return (
        norm("input_layernorm", "pre_attention_norm", sizes.hidden),
        *attention(sizes, qkv_bias=bias, output_bias=bias),
        norm("post_attention_layernorm", "pre_mlp_norm", sizes.hidden),
        *gated_mlp(sizes, bias=flag(config, "mlp_bias")),
    )


FAMILY = Family(model_type="llama", layer_parts=layer_parts)
