"""Decoder families: the names of each model type's layer parts, and the defaults of its config.

One entry of `DECODERS` a family; `Family` (family.py) says what an entry means. `usual_layer` describes the layer of
most; any other layer has a function of its own (`phi3_layer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from surgeon.errors import BadInput, printable
from surgeon.families.family import (
    OWN_CONFIG,
    Config,
    Family,
    LayerParts,
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
    whole,
)


def usual_layer(
    *,
    norms: Literal["before", "after", "around"] = "before",
    attention_bias: Literal["by_config", "qkv", "none"] = "by_config",
    mlp_bias: bool = False,
    head_norms: Literal["none", "head", "projection"] = "none",
) -> LayerParts:
    """The parts of a layer under Llama's names: attention and a gated MLP, each with norms.

    `norms`: before attention and MLP, after them (where they scale what is added to the residual stream), or both.
    `attention_bias`: in all four projections if the config's `attention_bias` is set (`by_config`), always and only in
    query, key and value (`qkv`), or never. `mlp_bias`: in the MLP, if the config's `mlp_bias` is set.
    `head_norms`: norms of query and key, as wide as one head or as the whole projection.
    """

    def layer(config: Config, sizes: Sizes) -> tuple[Part, ...]:
        bias = attention_bias == "by_config" and flag(config, "attention_bias")
        parts = [*attention(sizes, qkv_bias=bias or attention_bias == "qkv", output_bias=bias)]
        if head_norms != "none":
            one_head = head_norms == "head"
            parts.append(norm("self_attn.q_norm", "query_norm", sizes.head_dim if one_head else sizes.query_width))
            parts.append(norm("self_attn.k_norm", "key_norm", sizes.head_dim if one_head else sizes.kv_width))
        mlp = [*gated_mlp(sizes, bias=mlp_bias and flag(config, "mlp_bias"))]
        if norms != "after":
            # Llama calls the norm before the MLP after its place behind attention; others have a norm there as well.
            before_mlp = "post_attention_layernorm" if norms == "before" else "pre_feedforward_layernorm"
            parts.insert(0, norm("input_layernorm", "pre_attention_norm", sizes.hidden))
            mlp.insert(0, norm(before_mlp, "pre_mlp_norm", sizes.hidden))
        if norms != "before":
            parts.append(norm("post_attention_layernorm", "post_attention_norm", sizes.hidden))
            mlp.append(norm("post_feedforward_layernorm", "post_mlp_norm", sizes.hidden))
        return (*parts, *mlp)

    return layer


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
    full = whole(config, "max_window_layers", 28)
    return ["sliding_attention" if i >= full else "full_attention" for i in range(layers)]


def gemma2_layer_types(config: Config, layers: int) -> list[str]:
    """The listed types, else sliding and full in turn, sliding first (as older config.json files imply).

    Raises BadInput for a `layer_types` of another length.
    """
    listed = listed_layer_types(config, layers)
    return listed or ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]


def gemma3_layer_types(config: Config, layers: int) -> list[str]:
    """The listed types, else full attention in every `sliding_window_pattern`-th layer.

    Raises BadInput for a `layer_types` of another length, or a pattern that is not a positive number.
    """
    listed = listed_layer_types(config, layers)
    if listed is not None:
        return listed
    pattern = config.get("sliding_window_pattern", 6)
    if type(pattern) is not int or pattern < 1:
        shown = printable(repr(pattern), 60)
        raise BadInput(f"config.json: `sliding_window_pattern` is {shown}, not a whole number above 0; {OWN_CONFIG}")
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]


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


@dataclass(frozen=True)
class Hint:
    """What no probe finds out about a model type.

    `roles` are those of modules that go by other names than most (roles.py), by their path in a layer: the modules
    that the matrix holds, from the top row down.
    """

    model_type: str
    roles: Mapping[str, tuple[Role, ...]] = field(default_factory=dict)


# Most types need none.
HINTS: dict[str, Hint] = {
    hint.model_type: hint
    for hint in (
        # Phi-3 and Phi-4 text models.
        Hint("phi3", {"self_attn.qkv_proj": ("query", "key", "value"), "mlp.gate_up_proj": ("gate", "up")}),
    )
}

DECODERS: tuple[Family, ...] = (
    # Llama 1 to 3.x, and the many models saved under its name.
    Family("llama", usual_layer(mlp_bias=True), lists_known=True),
    # Never give Mistral `layer_types`: transformers then takes the checkpoint for another class.
    Family("mistral", usual_layer(attention_bias="none"), defaults={"num_key_value_heads": 8}, lists_known=True),
    # Qwen2 and Qwen2.5: sliding windows from a layer on.
    Family(
        "qwen2",
        usual_layer(attention_bias="qkv"),
        defaults={"num_key_value_heads": 32},
        layer_types=qwen_layer_types,
        lists_known=True,
    ),
    Family(
        "qwen3",
        usual_layer(head_norms="head"),
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        layer_types=qwen_layer_types,
        lists_known=True,
    ),
    # Gemma's norms multiply by one plus the stored weight.
    Family(
        "gemma",
        usual_layer(),
        defaults={"num_key_value_heads": 16, "head_dim": 256},
        norm_offset=1.0,
        embeddings_scaled=True,
        tied_by_default=True,
        lists_known=True,
    ),
    Family(
        "gemma2",
        usual_layer(norms="around"),
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        norm_offset=1.0,
        embeddings_scaled=True,
        tied_by_default=True,
        layer_types=gemma2_layer_types,
        lists_known=True,
    ),
    Family(
        "gemma3_text",
        usual_layer(norms="around", head_norms="head"),
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        norm_offset=1.0,
        embeddings_scaled=True,
        tied_by_default=True,
        layer_types=gemma3_layer_types,
        lists_known=True,
    ),
    Family("olmo2", usual_layer(norms="after", head_norms="projection"), lists_known=True),
    # Phi-3 and Phi-4 text models.
    Family("phi3", phi3_layer, lists_known=True),
)
