"""Gemma 3 text models (`Gemma3ForCausalLM`): Gemma 2's layer with query and key norms, five sliding to one full."""

from __future__ import annotations

from surgeon.errors import BadInput, printable
from surgeon.families import gemma2
from surgeon.families.family import Config, Family, Part, Sizes, listed_layer_types, norm


def layer_parts(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Gemma 2's parts and a norm as wide as one head on query and key."""
    return (
        *gemma2.layer_parts(config, sizes),
        norm("self_attn.q_norm", "query_norm", sizes.head_dim),
        norm("self_attn.k_norm", "key_norm", sizes.head_dim),
    )


def layer_types(config: Config, layers: int) -> list[str]:
    """The listed types, else full attention in every `sliding_window_pattern`-th layer."""
    listed = listed_layer_types(config, layers)
    if listed is not None:
        return listed
    pattern = config.get("sliding_window_pattern", 6)
    if not isinstance(pattern, int) or pattern < 1:
        raise BadInput(f"config.json: `sliding_window_pattern` is {printable(repr(pattern))}, not a whole number > 0")
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]


FAMILY = Family(
    model_type="gemma3_text",
    layer_parts=layer_parts,
    defaults={"num_key_value_heads": 4, "head_dim": 256},
    norm_offset=1.0,
    tied_by_default=True,
    layer_types=layer_types,
)
