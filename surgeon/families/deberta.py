"""DeBERTa (`DebertaFor…`): RoBERTa's layer with disentangled attention; query, key and value in one tensor."""

from __future__ import annotations

from surgeon.errors import BadInput, printable
from surgeon.families.family import Config, Family, Part, Sizes, flag, projection, whole
from surgeon.families.roberta import block_ends


def layer_parts(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Post-norm layer; query, key and value are stacked head by head, so that `in_proj` is no stack of three."""
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
    """Which of `c2p` and `p2c` the attention has: none without relative positions."""
    terms = config.get("pos_att_type") or []
    if isinstance(terms, str):
        terms = [term.strip() for term in terms.lower().split("|")]
    if not isinstance(terms, list) or not all(isinstance(term, str) for term in terms):
        raise BadInput(f"config.json: `pos_att_type` is {printable(repr(terms))}, not a list of names")
    return tuple(terms) if flag(config, "relative_attention") else ()


def embedding_parts(config: Config, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Word embeddings and their norm; positions, segments and a projection where the config has them."""
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
    """Positions that the embeddings tell apart."""
    return whole(config, "max_position_embeddings", 512)


def relative_span(config: Config) -> int:
    """The farthest relative position."""
    span = whole(config, "max_relative_positions", -1)
    return span if span > 0 else positions(config)


def outer_parts(config: Config, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The embeddings and those of relative positions, which all layers share."""
    parts = embedding_parts(config, sizes)
    if flag(config, "relative_attention"):
        parts["encoder.rel_embeddings.weight"] = (2 * relative_span(config), sizes.hidden)
    return parts


FAMILY = Family(
    model_type="deberta",
    layer_parts=layer_parts,
    tied_by_default=True,
    encoder=True,
    prefix="deberta.",
    stem="encoder.layer.",
    outer_parts=outer_parts,
)
