"""Roles of a layer's parts, where a derived layer is called and shaped as most are: attention and a gated MLP.

Transport needs them (`ot_fusion`); no probe can find them. They are taken from the names that nearly all decoders
share, and only where shapes agree and nothing in the layer would be left unaligned.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from surgeon.families.family import Part, Role, Sizes

_PROJECTIONS: dict[str, Role] = {
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "output",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_NORMS: dict[str, Role] = {
    "input_layernorm": "pre_attention_norm",
    "post_attention_layernorm": "pre_mlp_norm",
    "pre_feedforward_layernorm": "pre_mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
    "self_attn.q_norm": "query_norm",
    "self_attn.k_norm": "key_norm",
}


def with_roles(parts: Sequence[Part], sizes: Sizes, silent: Collection[str]) -> tuple[Part, ...]:
    """The parts with their roles; as they are, where the layer is another one.

    `silent` are the suffixes that are null in a silenced layer: a norm among them stands behind a block, not before it.
    """
    shapes = {part.suffix: part.shape for part in parts}
    wide: dict[Role, tuple[int, ...]] = {
        "query": (sizes.query_width, sizes.hidden),
        "key": (sizes.kv_width, sizes.hidden),
        "value": (sizes.kv_width, sizes.hidden),
        "output": (sizes.hidden, sizes.query_width),
    }
    for path, role in _PROJECTIONS.items():
        shape = shapes.get(f"{path}.weight")
        if shape is None or shape != wide.get(role, shape):
            return tuple(parts)
    found: list[Part] = []
    for part in parts:
        path = part.suffix.rpartition(".")[0]
        known = _PROJECTIONS.get(path) or (_NORMS.get(path) if part.kind == "norm" else None)
        if known is None:
            return tuple(parts)
        behind = known == "pre_mlp_norm" and part.suffix in silent
        found.append(replace(part, blocks=(("post_attention_norm" if behind else known, part.shape[0]),)))
    return tuple(found)
