"""The transport-matrix flow (OpT-DeUS, Table 1, and the variants of Table 7) as data: role → (T_in, T_out).

A weight becomes T_outᵀ · W · T_in; a bias goes with the rows of its weight, T_outᵀ · b, and takes no part in the cost.
A norm's scale is a vector: its T_out aligns it, its T_in is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Role = Literal[
    "pre_attention_norm",
    "query",
    "key",
    "value",
    "query_norm",
    "key_norm",
    "output",
    "post_attention_norm",
    "pre_mlp_norm",
    "gate",
    "up",
    "down",
    "post_mlp_norm",
]
Variant = Literal["opt_deus", "vanilla_output", "vanilla_mlp", "vanilla"]

# Modules with a transport problem of their own, each after those it takes its T_in from.
SOLVED: tuple[Role, ...] = ("query", "key", "value", "output", "gate", "up", "down")


@dataclass(frozen=True)
class MapRef:
    """The map of a role's module (None: the identity), perhaps as ½ (T + I)."""

    role: Role | None = None
    half_identity: bool = False


IDENTITY = MapRef()


@dataclass(frozen=True)
class Flow:
    """What aligns a tensor from the right and from the left."""

    t_in: MapRef = IDENTITY
    t_out: MapRef = IDENTITY


def transport_flow(variant: Variant = "opt_deus") -> dict[Role, Flow]:
    """The flow of every role, in the order of the layer.

    `vanilla_output`: attention output takes T_in = T_Q; `vanilla_mlp`: gate and up take ½ (T_O + I); `vanilla`:
    both (Imfeld et al. 2024, as far as it applies here). A norm over single heads (`query_norm`, `key_norm` of
    head_dim numbers) is as wide as no map: the caller leaves it as it is. ValueError for another variant.
    """
    if variant not in get_args(Variant):
        raise ValueError(f"flow must be one of {', '.join(get_args(Variant))}, not {variant!r}")
    output_in = MapRef("query") if variant in ("vanilla_output", "vanilla") else IDENTITY
    mlp_in = MapRef("output", half_identity=variant in ("vanilla_mlp", "vanilla"))
    return {
        "pre_attention_norm": Flow(),
        "query": Flow(t_out=MapRef("query")),
        "key": Flow(t_out=MapRef("key")),
        "value": Flow(t_out=MapRef("value")),
        "query_norm": Flow(t_out=MapRef("query")),
        "key_norm": Flow(t_out=MapRef("key")),
        "output": Flow(t_in=output_in, t_out=MapRef("output")),
        # Scales the rows of the attention's output; the residual stream before the MLP is the mean of two paths.
        "post_attention_norm": Flow(t_out=MapRef("output")),
        "pre_mlp_norm": Flow(t_out=MapRef("output", half_identity=True)),
        "gate": Flow(t_in=mlp_in, t_out=MapRef("gate")),
        "up": Flow(t_in=mlp_in, t_out=MapRef("up")),
        "down": Flow(t_out=MapRef("down")),
        "post_mlp_norm": Flow(t_out=MapRef("down")),
    }
