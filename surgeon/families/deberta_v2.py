"""DeBERTa-v2 and -v3 (`DebertaV2For…`): separate projections, relative positions in buckets, perhaps a convolution."""

from __future__ import annotations

from surgeon.errors import BadInput, printable
from surgeon.families.deberta import embedding_parts, position_terms, relative_span
from surgeon.families.family import Config, Family, Part, Sizes, flag, projection, whole
from surgeon.families.roberta import block_ends


def layer_parts(config: Config, sizes: Sizes) -> tuple[Part, ...]:
    """Post-norm layer; with `share_att_key` positions go through the content's own projections."""
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


def outer_parts(config: Config, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Embeddings, relative positions and their norm, and the convolution beside the first layer."""
    parts = embedding_parts(config, sizes)
    if flag(config, "relative_attention"):
        buckets = whole(config, "position_buckets", -1)
        span = buckets if buckets > 0 else relative_span(config)
        parts["encoder.rel_embeddings.weight"] = (2 * span, sizes.hidden)
    normed = config.get("norm_rel_ebd", "none")
    if not isinstance(normed, str):
        raise BadInput(f"config.json: `norm_rel_ebd` is {printable(repr(normed))}, not a name")
    norms = ["encoder.LayerNorm"] if "layer_norm" in normed.lower().split("|") else []
    kernel = whole(config, "conv_kernel_size", 0)
    if kernel > 0:
        groups = max(1, whole(config, "conv_groups", 1))
        parts["encoder.conv.conv.weight"] = (sizes.hidden, sizes.hidden // groups, kernel)
        parts["encoder.conv.conv.bias"] = (sizes.hidden,)
        norms.append("encoder.conv.LayerNorm")
    return parts | {f"{name}.{part}": (sizes.hidden,) for name in norms for part in ("weight", "bias")}


FAMILY = Family(
    model_type="deberta-v2",
    layer_parts=layer_parts,
    tied_by_default=True,
    encoder=True,
    prefix="deberta.",
    stem="encoder.layer.",
    outer_parts=outer_parts,
)
