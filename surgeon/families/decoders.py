"""Decoder families: the names of each model type's layer parts, and the defaults of its config.

One function and one entry of `DECODERS` a family; `Family` (family.py) says what an entry means.
"""

from __future__ import annotations

from surgeon.errors import BadInput, printable
from surgeon.families.family import (
    Config,
    Family,
    Part,
    Role,
    Sizes,
    attention,
    flag,
    fused_projection,
    gated_mlp,
    listed_layer_types,
    norm,
    projection,
)


def llama_layer(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Pre-norm layer; biases by `attention_bias` (all four projections) and `mlp_bias`."""
    bias = flag(config, "attention_bias")
    return (
        norm("input_layernorm", "pre_attention_norm", sizes.hidden),
        *attention(sizes, qkv_bias=bias, output_bias=bias),
        norm("post_attention_layernorm", "pre_mlp_norm", sizes.hidden),
        *gated_mlp(sizes, bias=flag(config, "mlp_bias")),
    )


def mistral_layer(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Llama's layer without biases."""
    return (
        norm("input_layernorm", "pre_attention_norm", sizes.hidden),
        *attention(sizes),
        norm("post_attention_layernorm", "pre_mlp_norm", sizes.hidden),
        *gated_mlp(sizes),
    )


def qwen2_layer(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Pre-norm layer; query, key and value always carry a bias, the output projection never."""
    return (
        norm("input_layernorm", "pre_attention_norm", sizes.hidden),
        *attention(sizes, qkv_bias=True),
        norm("post_attention_layernorm", "pre_mlp_norm", sizes.hidden),
        *gated_mlp(sizes),
    )


def qwen3_layer(config: Config, sizes: Sizes) -> tuple[Part, ...]:
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


def qwen_layer_types(config: Config, layers: int) -> list[str] | None:
    """The listed types, else those that `use_sliding_window` and `max_window_layers` imply.

    None where no window is used, as every layer is then of one type. Raises BadInput for a `layer_types` of another
    length.
    """
    listed = listed_layer_types(config, layers)
    if listed is not None or not flag(config, "use_sliding_window"):
        return listed
    if config.get("sliding_window", 4096) is None:
        return None
    full = config.get("max_window_layers", 28)
    return ["sliding_attention" if i >= full else "full_attention" for i in range(layers)]


def gemma_layer(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Llama's layer; its norms multiply by one plus the stored weight (`norm_offset`)."""
    bias = flag(config, "attention_bias")
    return (
        norm("input_layernorm", "pre_attention_norm", sizes.hidden),
        *attention(sizes, qkv_bias=bias, output_bias=bias),
        norm("post_attention_layernorm", "pre_mlp_norm", sizes.hidden),
        *gated_mlp(sizes),
    )


def gemma2_layer(config: Config, sizes: Sizes) -> tuple[Part, ...]:
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


def gemma2_layer_types(config: Config, layers: int) -> list[str]:
    """The listed types, else sliding and full in turn, sliding first (as older config.json files imply).

    Raises BadInput for a `layer_types` of another length.
    """
    listed = listed_layer_types(config, layers)
    return listed or ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]


def gemma3_layer(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Gemma 2's parts and a norm as wide as one head on query and key."""
    return (
        *gemma2_layer(config, sizes),
        norm("self_attn.q_norm", "query_norm", sizes.head_dim),
        norm("self_attn.k_norm", "key_norm", sizes.head_dim),
    )


def gemma3_layer_types(config: Config, layers: int) -> list[str]:
    """The listed types, else full attention in every `sliding_window_pattern`-th layer.

    Raises BadInput for a `layer_types` of another length, or a pattern that is not a positive number.
    """
    listed = listed_layer_types(config, layers)
    if listed is not None:
        return listed
    pattern = config.get("sliding_window_pattern", 6)
    if not isinstance(pattern, int) or pattern < 1:
        raise BadInput(f"config.json: `sliding_window_pattern` is {printable(repr(pattern))}, not a whole number > 0")
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]


def olmo2_layer(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Post-norm layer: norms only after attention and MLP; query and key norms as wide as their projections."""
    bias = flag(config, "attention_bias")
    return (
        *attention(sizes, qkv_bias=bias, output_bias=bias),
        norm("self_attn.q_norm", "query_norm", sizes.query_width),
        norm("self_attn.k_norm", "key_norm", sizes.kv_width),
        norm("post_attention_layernorm", "post_attention_norm", sizes.hidden),
        *gated_mlp(sizes),
        norm("post_feedforward_layernorm", "post_mlp_norm", sizes.hidden),
    )


def phi3_layer(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Pre-norm layer without biases; query, key and value in one tensor, gate and up in another."""
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


DECODERS: tuple[Family, ...] = (
    # Llama 1 to 3.x, and the many models saved under its name.
    Family(model_type="llama", layer_parts=llama_layer),
    # Never give Mistral `layer_types`: transformers then takes the checkpoint for another class.
    Family(model_type="mistral", layer_parts=mistral_layer, defaults={"num_key_value_heads": 8}),
    # Qwen2 and Qwen2.5: sliding windows from a layer on.
    Family(
        model_type="qwen2",
        layer_parts=qwen2_layer,
        defaults={"num_key_value_heads": 32},
        layer_types=qwen_layer_types,
    ),
    Family(
        model_type="qwen3",
        layer_parts=qwen3_layer,
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        layer_types=qwen_layer_types,
    ),
    Family(
        model_type="gemma",
        layer_parts=gemma_layer,
        defaults={"num_key_value_heads": 16, "head_dim": 256},
        norm_offset=1.0,
        tied_by_default=True,
    ),
    Family(
        model_type="gemma2",
        layer_parts=gemma2_layer,
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        norm_offset=1.0,
        tied_by_default=True,
        layer_types=gemma2_layer_types,
    ),
    Family(
        model_type="gemma3_text",
        layer_parts=gemma3_layer,
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        norm_offset=1.0,
        tied_by_default=True,
        layer_types=gemma3_layer_types,
    ),
    Family(model_type="olmo2", layer_parts=olmo2_layer),
    # Phi-3 and Phi-4 text models.
    Family(model_type="phi3", layer_parts=phi3_layer),
)
