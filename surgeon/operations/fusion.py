"""Recipes for a layer fused by optimal transport: OpT-DeUS, Algorithm 1, with the flow of Tables 1 and 7.

Pure data: which map aligns which module from which side. The maps are computed in `surgeon.transport`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import IDENTITY, Average, Block, Coupling, Fused, MapRef, Recipe, TextSupport, WholeHeads
from surgeon.errors import BadInput
from surgeon.families.family import Part, Role

Flow = Literal["opt_deus", "vanilla_output", "vanilla_mlp", "vanilla"]
Heads = Literal["free", "blocks"]

# Modules that solve a transport problem of their own, in the order of the layer; the rest (norms) borrow a map.
_SOLVED: tuple[Role, ...] = ("query", "key", "value", "output", "gate", "up", "down")
_OF_HEADS: tuple[Role, ...] = ("query", "key", "value")


def fuse_layers(
    draft: Draft,
    *,
    below: int,
    label: str,
    flow: Flow,
    heads: Heads,
    settings: Mapping[str, object],
    skip: frozenset[str],
    support: TextSupport | None = None,
) -> dict[str, Recipe]:
    """Recipes, by suffix, of the layer fused from layers `below` and `below + 1` of the draft.

    With `heads` "blocks" query, key and value are aligned by whole heads, and the attention output takes the query
    heads' map as its T_in in every flow: its columns are those heads. With `support` rows are compared by activations,
    which only layers of the base have: BadInput for others.

    Adds the couplings they share to the draft, named `{label}.{role}`. Tensors in `skip` are zeroed afterwards:
    a map that nothing but them needs is not computed (down_proj's, in families without post-norms); o_proj's is,
    since gate and up take it as their T_in.
    """
    if support is not None:
        _check_of_base(draft, below)
    lower, upper = draft.layers[below].tensors, draft.layers[below + 1].tensors
    parts = draft.kind_of(below).parts
    if not any(part.blocks for part in parts):
        raise BadInput(
            f"which tensors of a {draft.anatomy.family.model_type} layer are query, key, value, output, gate, up and"
            " down is not described, so nothing can be aligned; use init average, copy or random"
        )
    if heads == "blocks" and draft.anatomy.derivation is not None:
        raise BadInput(
            f"`heads: blocks` keeps rotary pairs, and how a {draft.anatomy.family.model_type} pairs them is not"
            " described; use `heads: free`"
        )
    flow_of = _Flow(flow, heads, label)
    whole_heads = _whole_heads(draft, lower, upper, label) if heads == "blocks" else None
    wanted = _wanted_roles(parts, flow_of, skip)
    for role in (role for role in _SOLVED if role in wanted):
        part, start, stop = _rows_of(parts, role)
        draft.add_coupling(
            Coupling(
                name=f"{label}.{role}",
                first=lower[part.suffix],
                second=upper[part.suffix],
                start=start,
                stop=stop,
                t_in=flow_of.t_in(role),
                settings=tuple(sorted(settings.items())),
                whole_heads=whole_heads if role in _OF_HEADS else None,
                support=support,
            )
        )
    return _fused_tensors(lower, upper, parts, flow_of, skip)


def _fused_tensors(
    lower: Mapping[str, Recipe],
    upper: Mapping[str, Recipe],
    parts: tuple[Part, ...],
    flow: _Flow,
    skip: frozenset[str],
) -> dict[str, Recipe]:
    known = {part.suffix: part for part in parts}
    tensors: dict[str, Recipe] = {}
    for suffix, recipe in lower.items():
        if suffix not in known:  # an old buffer, the same in every layer
            tensors[suffix] = recipe
        elif suffix in skip:  # a constant takes its place; of this recipe only dtype and shape are used
            tensors[suffix] = upper[suffix]
        else:
            blocks = _blocks(known[suffix], flow, parts)
            plain = all(block.t_in == IDENTITY and block.t_out == IDENTITY for block in blocks)
            tensors[suffix] = Average(recipe, upper[suffix]) if plain else Fused(recipe, upper[suffix], blocks)
    return tensors


def _check_of_base(draft: Draft, below: int) -> None:
    for index in (below, below + 1):
        if draft.layers[index].base is None or draft.layers[index].rewritten:
            raise BadInput(
                f"`support: activations` needs layers of the base on both sides; layer {index} was made by an earlier"
                " operation: put this one first, or use `support: weights`"
            )


@dataclass(frozen=True)
class _Flow:
    """Which map aligns the input side of each matrix of the layer `label`."""

    kind: Flow
    heads: Heads
    label: str

    @property
    def output_follows_query(self) -> bool:
        """Whether the attention output's columns are aligned by the query's map."""
        return self.heads == "blocks" or self.kind in ("vanilla_output", "vanilla")

    def t_in(self, role: Role) -> MapRef:
        """Table 1 (and 7): what aligns a matrix within its layer."""
        if role in ("gate", "up"):
            return MapRef(f"{self.label}.output", half_identity=self.kind in ("vanilla_mlp", "vanilla"))
        if role == "output" and self.output_follows_query:
            return MapRef(f"{self.label}.query")
        return IDENTITY


def _whole_heads(draft: Draft, lower: Mapping[str, Recipe], upper: Mapping[str, Recipe], label: str) -> WholeHeads:
    sizes = draft.anatomy.sizes
    output, _, _ = _rows_of(draft.anatomy.parts, "output")
    return WholeHeads(
        query=f"{label}.query",
        key=f"{label}.key",
        value=f"{label}.value",
        output=(lower[output.suffix], upper[output.suffix]),
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
    )


def _wanted_roles(parts: tuple[Part, ...], flow: _Flow, skip: frozenset[str]) -> set[Role]:
    """Roles whose maps some tensor of the fused layer needs, directly or as another map's T_in."""
    wanted: set[Role] = set()
    for part in parts:
        if part.suffix in skip:
            continue
        for role, _ in part.blocks:
            source = _norm_source(role) if part.kind == "norm" else role
            if source is not None and _fits(parts, part, role):
                wanted.add(source)
    if wanted & {"gate", "up"}:
        wanted.add("output")
    if "output" in wanted and flow.output_follows_query:
        wanted.add("query")
    if flow.heads == "blocks" and wanted & set(_OF_HEADS):
        wanted.update(_OF_HEADS)
    return wanted


def _norm_source(role: Role) -> Role | None:
    """The module whose outputs (or whose residual path) a norm scales; None at the layer's entrance."""
    sources: dict[Role, Role] = {
        "pre_mlp_norm": "output",
        "post_attention_norm": "output",
        "post_mlp_norm": "down",
        "query_norm": "query",
        "key_norm": "key",
    }
    return sources.get(role)


def _fits(parts: tuple[Part, ...], part: Part, role: Role) -> bool:
    """Whether a norm is as wide as the map it would borrow (query norms over one head only are not)."""
    source = _norm_source(role) if part.kind == "norm" else None
    if source is None:
        return True
    _, start, stop = _rows_of(parts, source)
    return part.shape[0] == stop - start


def _t_out(part: Part, role: Role, label: str, parts: tuple[Part, ...]) -> MapRef:
    if part.kind != "norm":
        return MapRef(f"{label}.{role}")
    source = _norm_source(role)
    if source is None or not _fits(parts, part, role):
        return IDENTITY
    # The residual stream before the MLP is the layer's entrance (identity) and the attention's output: ½ (T_O + I).
    return MapRef(f"{label}.{source}", half_identity=role == "pre_mlp_norm")


def _blocks(part: Part, flow: _Flow, parts: tuple[Part, ...]) -> tuple[Block, ...]:
    blocks: list[Block] = []
    start = 0
    for role, rows in part.blocks:
        t_in = flow.t_in(role) if part.kind == "weight" else IDENTITY
        blocks.append(Block(start, start + rows, t_in, _t_out(part, role, flow.label, parts)))
        start += rows
    return tuple(blocks)


def _rows_of(parts: tuple[Part, ...], role: Role) -> tuple[Part, int, int]:
    """The weight that holds a module, and its rows there."""
    for part in parts:
        if part.kind != "weight":
            continue
        start = 0
        for held, rows in part.blocks:
            if held == role:
                return part, start, start + rows
            start += rows
    raise AssertionError(f"no weight holds the module {role}")
