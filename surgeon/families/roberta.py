"""RoBERTa (`RobertaFor…`): post-norm encoder with learned positions, every projection with a bias."""

from __future__ import annotations

from surgeon.errors import BadInput
from surgeon.families.family import Config, Family, Part, Sizes, flag, layer_norm, projection, whole


def layer_parts(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Attention and FFN, each followed by a norm of its output and the residual stream together."""
    for key in ("is_decoder", "add_cross_attention"):
        if flag(config, key):
            raise BadInput(f"config.json: `{key}` is set; surgeon knows RoBERTa as an encoder only")
    return (
        *projection("attention.self.query", "query", sizes.hidden, sizes.hidden, bias=True),
        *projection("attention.self.key", "key", sizes.hidden, sizes.hidden, bias=True),
        *projection("attention.self.value", "value", sizes.hidden, sizes.hidden, bias=True),
        *block_ends(sizes),
    )


def block_ends(sizes: Sizes) -> tuple[Part, ...]:
    """What attention puts out and the whole FFN, as BERT and its kin name them."""
    return (
        *projection("attention.output.dense", "output", sizes.hidden, sizes.hidden, bias=True),
        *layer_norm("attention.output.LayerNorm", "post_attention_norm", sizes.hidden),
        *projection("intermediate.dense", "up", sizes.intermediate, sizes.hidden, bias=True),
        *projection("output.dense", "down", sizes.hidden, sizes.intermediate, bias=True),
        *layer_norm("output.LayerNorm", "post_mlp_norm", sizes.hidden),
    )


def outer_parts(config: Config, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Three embeddings and their norm."""
    return {
        "embeddings.word_embeddings.weight": (sizes.vocabulary, sizes.hidden),
        "embeddings.position_embeddings.weight": (whole(config, "max_position_embeddings", 512), sizes.hidden),
        "embeddings.token_type_embeddings.weight": (whole(config, "type_vocab_size", 2), sizes.hidden),
        "embeddings.LayerNorm.weight": (sizes.hidden,),
        "embeddings.LayerNorm.bias": (sizes.hidden,),
    }


FAMILY = Family(
    model_type="roberta",
    layer_parts=layer_parts,
    tied_by_default=True,
    encoder=True,
    prefix="roberta.",
    stem="encoder.layer.",
    outer_parts=outer_parts,
)
