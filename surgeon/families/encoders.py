"""Encoder families: post-norm layers that read a whole sequence; they can carry control states only.

RoBERTa; DeBERTa, with disentangled attention and query, key and value in one tensor; DeBERTa-v2 and -v3, with separate
projections, relative positions in buckets and an optional convolution. Functions raise BadInput where the config has a
value that surgeon does not know.
"""

from __future__ import annotations

from surgeon.errors import BadInput, printable
from surgeon.families.family import (
    OWN_CONFIG,
    Config,
    Family,
    LayerParts,
    OuterParts,
    Part,
    Sizes,
    flag,
    layer_norm,
    projection,
    whole,
)


def roberta_layer(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Attention and FFN, each followed by a norm of output plus input. Raises BadInput for a decoder's config."""
    for key in ("is_decoder", "add_cross_attention"):
        if flag(config, key):
            raise BadInput(f"config.json: `{key}` is set; surgeon knows RoBERTa as an encoder only; use one")
    return (
        *projection("attention.self.query", "query", sizes.hidden, sizes.hidden, bias=True),
        *projection("attention.self.key", "key", sizes.hidden, sizes.hidden, bias=True),
        *projection("attention.self.value", "value", sizes.hidden, sizes.hidden, bias=True),
        *block_ends(sizes),
    )


def block_ends(sizes: Sizes) -> tuple[Part, ...]:
    """The attention output and the whole FFN, by the names of BERT and similar models."""
    return (
        *projection("attention.output.dense", "output", sizes.hidden, sizes.hidden, bias=True),
        *layer_norm("attention.output.LayerNorm", "post_attention_norm", sizes.hidden),
        *projection("intermediate.dense", "up", sizes.intermediate, sizes.hidden, bias=True),
        *projection("output.dense", "down", sizes.hidden, sizes.intermediate, bias=True),
        *layer_norm("output.LayerNorm", "post_mlp_norm", sizes.hidden),
    )


def roberta_outer(config: Config, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Three embeddings and their norm. Raises BadInput for a size that is not a whole number."""
    return {
        "embeddings.word_embeddings.weight": (sizes.vocabulary, sizes.hidden),
        "embeddings.position_embeddings.weight": (whole(config, "max_position_embeddings", 512), sizes.hidden),
        "embeddings.token_type_embeddings.weight": (whole(config, "type_vocab_size", 2), sizes.hidden),
        "embeddings.LayerNorm.weight": (sizes.hidden,),
        "embeddings.LayerNorm.bias": (sizes.hidden,),
    }


def deberta_layer(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Post-norm layer; `in_proj` holds query, key and value head by head. Raises BadInput for unknown settings."""
    width = sizes.hidden
    parts = [
        Part("attention.self.in_proj.weight", (3 * width, width), "weight", (("query", 3 * width),)),
        Part("attention.self.q_bias", (width,), "bias", (("query", width),)),
        Part("attention.self.v_bias", (width,), "bias", (("value", width),)),
    ]
    if flag(config, "talking_head"):
        for name in ("head_logits_proj", "head_weights_proj"):
            parts += projection(f"attention.self.{name}", "talking_heads", sizes.heads, sizes.heads)
    terms = position_terms(config)
    if "c2p" in terms:
        parts += projection("attention.self.pos_proj", "position_key", width, width)
    if "p2c" in terms:
        parts += projection("attention.self.pos_q_proj", "position_query", width, width, bias=True)
    return (*parts, *block_ends(sizes))


def position_terms(config: Config) -> tuple[str, ...]:
    """Which of `c2p` and `p2c` the attention has; none without relative positions. Raises BadInput for others."""
    terms = config.get("pos_att_type") or []
    if isinstance(terms, str):
        terms = [term.strip() for term in terms.lower().split("|")]
    if not isinstance(terms, list) or not all(isinstance(term, str) for term in terms):
        raise BadInput(f"config.json: `pos_att_type` is {printable(repr(terms), 60)}, not names; {OWN_CONFIG}")
    return tuple(terms) if flag(config, "relative_attention") else ()


def embedding_parts(config: Config, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Word embeddings and their norm; positions, segments and a projection where the config has them.

    Raises BadInput for a size that is not a whole number.
    """
    size = whole(config, "embedding_size", sizes.hidden)
    parts: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (sizes.vocabulary, size),
        "embeddings.LayerNorm.weight": (sizes.hidden,),
        "embeddings.LayerNorm.bias": (sizes.hidden,),
    }
    if config.get("position_biased_input", True):
        parts["embeddings.position_embeddings.weight"] = (positions(config), size)
    if (segments := whole(config, "type_vocab_size", 0)) > 0:
        parts["embeddings.token_type_embeddings.weight"] = (segments, size)
    if size != sizes.hidden:
        parts["embeddings.embed_proj.weight"] = (sizes.hidden, size)
    return parts


def positions(config: Config) -> int:
    """The number of position embeddings. Raises BadInput where it is not a whole number."""
    return whole(config, "max_position_embeddings", 512)


def relative_span(config: Config) -> int:
    """The largest relative position. Raises BadInput where it is not a whole number."""
    span = whole(config, "max_relative_positions", -1)
    return span if span > 0 else positions(config)


def deberta_outer(config: Config, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The embeddings, and those of relative positions, which all layers share. Raises BadInput for unknown settings."""
    parts = embedding_parts(config, sizes)
    if flag(config, "relative_attention"):
        parts["encoder.rel_embeddings.weight"] = (2 * relative_span(config), sizes.hidden)
    return parts


def deberta_v2_layer(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Post-norm layer; `share_att_key`: positions use the content's projections. Raises BadInput for a bad setting."""
    width = sizes.hidden
    parts = [
        *projection("attention.self.query_proj", "query", width, width, bias=True),
        *projection("attention.self.key_proj", "key", width, width, bias=True),
        *projection("attention.self.value_proj", "value", width, width, bias=True),
    ]
    terms = () if flag(config, "share_att_key") else position_terms(config)
    if "c2p" in terms:
        parts += projection("attention.self.pos_key_proj", "position_key", width, width, bias=True)
    if "p2c" in terms:
        parts += projection("attention.self.pos_query_proj", "position_query", width, width, bias=True)
    return (*parts, *block_ends(sizes))


def deberta_v2_outer(config: Config, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Embeddings, relative positions and their norm, and the convolution beside the first layer.

    Raises BadInput for unknown settings.
    """
    parts = embedding_parts(config, sizes)
    if flag(config, "relative_attention"):
        buckets = whole(config, "position_buckets", -1)
        span = buckets if buckets > 0 else relative_span(config)
        parts["encoder.rel_embeddings.weight"] = (2 * span, sizes.hidden)
    normed = config.get("norm_rel_ebd", "none")
    if not isinstance(normed, str):
        raise BadInput(f"config.json: `norm_rel_ebd` is {printable(repr(normed), 60)}, not a name; {OWN_CONFIG}")
    norms = ["encoder.LayerNorm"] if "layer_norm" in normed.lower().split("|") else []
    kernel = whole(config, "conv_kernel_size", 0)
    if kernel > 0:
        groups = max(1, whole(config, "conv_groups", 1))
        parts["encoder.conv.conv.weight"] = (sizes.hidden, sizes.hidden // groups, kernel)
        parts["encoder.conv.conv.bias"] = (sizes.hidden,)
        norms.append("encoder.conv.LayerNorm")
    return parts | {f"{name}.{part}": (sizes.hidden,) for name in norms for part in ("weight", "bias")}


def encoder(model_type: str, layer_parts: LayerParts, outer_parts: OuterParts, *, prefix: str) -> Family:
    """An encoder family whose embeddings are tied by default and whose layers stand under `encoder.layer.`."""
    return Family(
        model_type,
        layer_parts,
        tied_by_default=True,
        encoder=True,
        lists_known=True,
        prefix=prefix,
        stem="encoder.layer.",
        outer_parts=outer_parts,
    )


ENCODER_FAMILIES: tuple[Family, ...] = (
    encoder("roberta", roberta_layer, roberta_outer, prefix="roberta."),
    encoder("deberta", deberta_layer, deberta_outer, prefix="deberta."),
    encoder("deberta-v2", deberta_v2_layer, deberta_v2_outer, prefix="deberta."),
)
