"""Recipes for a layer fused by optimal transport: OpT-DeUS, Algorithm 1, with the flow of Tables 1 and 7.

Plain data: which map aligns which module from which side. The maps are computed in `surgeon.transport`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from surgeon.anatomy.anatomy import LayerKind
from surgeon.anatomy.family import Part, Role
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import (
    IDENTITY,
    Block,
    Coupling,
    Fused,
    MapRef,
    Recipe,
    WholeHeads,
    average,
)
from surgeon.errors import BadInput, printable
from surgeon.operations.expert_fusion import fuse_experts, is_of_experts, of_experts, router_of

Order = Literal["align_first", "cost_first"]
Flow = Literal["opt_deus", "vanilla_output", "vanilla_mlp", "vanilla"]
Heads = Literal["free", "blocks"]
Unaligned = Literal["refuse", "average"]

# Roles that get a transport problem of their own, in the order of the layer; the rest (norms) borrow a map.
_SOLVED: tuple[Role, ...] = ("query", "key", "value", "output", "gate", "up", "down")
_OF_HEADS: tuple[Role, ...] = ("query", "key", "value")
# Roles that read the residual stream after attention.
_READ_OUTPUT: frozenset[Role] = frozenset({"gate", "up", "router", "shared_gate"})


def fuse_layers(
    draft: Draft,
    *,
    below: int,
    label: str,
    flow: Flow,
    heads: Heads,
    settings: Mapping[str, object],
    skip: frozenset[str],
    unaligned: Unaligned = "refuse",
    order: Order = "align_first",
) -> dict[str, Recipe]:
    """Return recipes, by suffix, of the layer fused from layers `below` and `below + 1` of the draft.

    With `heads` "blocks" query, key and value are aligned by whole heads, and the attention output uses the query
    heads' map as its T_in in every flow: its columns are those heads. Modules without a known role are averaged; where
    `unaligned` is "refuse", BadInput names them. `order` decides whether T_in moves the lower layer's rows before their
    cost is computed. Adds the shared couplings to the draft, named `{label}.{role}`. Tensors in `skip` are zeroed
    afterwards: a map that only they need is not computed (down_proj's, in families without post-norms); o_proj's map
    is, since gate and up use it as their T_in.
    """
    kind = draft.kind_of(below)
    _check_aligned(draft.anatomy.family.model_type, kind, skip, unaligned)
    if heads == "blocks":
        _check_whole_heads(draft, below)
    lower, upper = draft.layers[below].tensors, draft.layers[below + 1].tensors
    parts = tuple(part for part in kind.parts if not is_of_experts(part))
    flow_of = _Flow(flow, heads, label, parts)
    whole_heads = _whole_heads(draft, parts, lower, upper, label) if heads == "blocks" else None
    cost_first = order == "cost_first"
    needed = _needed_roles(parts, flow_of, skip, experts=router_of(kind.parts) is not None)
    for role in (role for role in _SOLVED if role in needed):
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
                cost_first=cost_first,
            )
        )
    t_in = flow_of.t_in("router")
    experts = fuse_experts(draft, below, label=label, t_in=t_in, settings=settings, cost_first=cost_first, skip=skip)
    return _fused_tensors(lower, upper, parts, flow_of, skip, experts)


@dataclass(frozen=True)
class Ways:
    """How a kind of layer is fused: the router by which experts are matched, and the modules that are only averaged."""

    router: str
    averaged: tuple[str, ...]

    def __str__(self) -> str:
        """Describe the ways for a preview; empty where nothing is special."""
        matched = f"experts matched by {self.router}, then fused one by one" if self.router else ""
        averaged = f"averaged as they stand: {', '.join(self.averaged)}" if self.averaged else ""
        return "; ".join(filter(None, (matched, averaged)))


def ways(kind: LayerKind, skip: frozenset[str]) -> Ways:
    """Return how layers of this kind are fused, if the tensors in `skip` become constants."""
    router = router_of(kind.parts)
    return Ways("" if router is None else _module(router.suffix), tuple(_unaligned(kind, skip)))


def _check_aligned(model_type: str, kind: LayerKind, skip: frozenset[str], unaligned: Unaligned) -> None:
    """Raise BadInput where nothing of a layer can be aligned, or a module cannot be and the plan refuses that."""
    if not any(role in _SOLVED for part in kind.parts for role, _ in part.blocks):
        raise BadInput(
            f"which tensors of a {model_type} layer are query, key, value, output, gate, up and down is not described,"
            " so nothing can be aligned; use init average, copy or random"
        )
    left = _unaligned(kind, skip)
    if left and unaligned == "refuse":
        of = f" ({printable(kind.title)})" if kind.title else ""
        raise BadInput(
            f"nobody has described how to align {printable(', '.join(left), 400)} of a {model_type} layer{of};"
            " `unaligned: average` in `init` averages them as they stand and aligns the rest; or use init average, copy"
            " or random"
        )


def _unaligned(kind: LayerKind, skip: frozenset[str]) -> list[str]:
    """Return modules without a known role, each once, all experts as one.

    Left out are tensors that a constant replaces, and single numbers, which have nothing to align.
    """
    left = [part for part in kind.parts if not part.blocks and part.suffix not in skip and math.prod(part.shape) > 1]
    return list(dict.fromkeys(_module(part.suffix) for part in left))


def _module(suffix: str) -> str:
    """Return the module's name in a tensor's suffix, with the expert's number replaced by `*`."""
    return of_experts(suffix).removesuffix(".weight").removesuffix(".bias")


def _fused_tensors(
    lower: Mapping[str, Recipe],
    upper: Mapping[str, Recipe],
    parts: tuple[Part, ...],
    flow: _Flow,
    skip: frozenset[str],
    experts: Mapping[str, Recipe],
) -> dict[str, Recipe]:
    """Return the recipes of the fused layer, by suffix.

    Tensors in `skip` come from the upper layer, `experts` as given, old buffers from the lower layer; all others are
    fused.
    """
    known = {part.suffix: part for part in parts}
    tensors: dict[str, Recipe] = {}
    for suffix, recipe in lower.items():
        if suffix in skip:  # a constant replaces it; only dtype and shape of this recipe are used
            tensors[suffix] = upper[suffix]
        elif suffix in experts:
            tensors[suffix] = experts[suffix]
        elif suffix not in known:  # an old buffer, the same in every layer
            tensors[suffix] = recipe
        else:
            blocks = _blocks(known[suffix], flow, parts)
            plain = all(block.t_in == IDENTITY and block.t_out == IDENTITY for block in blocks)
            tensors[suffix] = average(recipe, upper[suffix]) if plain else Fused(recipe, upper[suffix], blocks)
    return tensors


def _check_whole_heads(draft: Draft, below: int) -> None:
    """Raise BadInput where the heads of a layer cannot change places."""
    if not draft.anatomy.derivation.whole_heads(draft.layers[below].like):
        raise BadInput(
            f"`heads: blocks` aligns whole heads, and on a twin of this {draft.anatomy.family.model_type} those of"
            f" layer {below} cannot change places; use `heads: free`"
        )


@dataclass(frozen=True)
class _Flow:
    """The map for the input side of each matrix of the layer `label`; `parts` are its tensors without experts."""

    kind: Flow
    heads: Heads
    label: str
    parts: tuple[Part, ...]

    @property
    def output_follows_query(self) -> bool:
        """Return whether the query's map aligns the attention output's columns; only where their sizes match."""
        if self.heads == "free" and self.kind not in ("vanilla_output", "vanilla"):
            return False
        query, output = _weight_rows(self.parts, "query"), _weight_rows(self.parts, "output")
        return query is not None and output is not None and output[0].shape[1] == query[2] - query[1]

    def t_in(self, role: Role) -> MapRef:
        """Return the map that aligns a matrix's input side (Tables 1 and 7). A router reads what gate and up read."""
        if role in _READ_OUTPUT and _weight_rows(self.parts, "output") is not None:
            return MapRef(f"{self.label}.output", half_identity=self.kind in ("vanilla_mlp", "vanilla"))
        if role == "output" and self.output_follows_query:
            return MapRef(f"{self.label}.query")
        return IDENTITY


def _whole_heads(
    draft: Draft, parts: tuple[Part, ...], lower: Mapping[str, Recipe], upper: Mapping[str, Recipe], label: str
) -> WholeHeads:
    """Return the query, key and value couplings that are solved together, with the sizes of the heads."""
    sizes = draft.anatomy.sizes
    output, _, _ = _rows_of(parts, "output")
    return WholeHeads(
        query=f"{label}.query",
        key=f"{label}.key",
        value=f"{label}.value",
        output=(lower[output.suffix], upper[output.suffix]),
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
    )


def _needed_roles(parts: tuple[Part, ...], flow: _Flow, skip: frozenset[str], *, experts: bool) -> set[Role]:
    """Return the roles whose maps some tensor of the fused layer needs, directly or as another map's T_in."""
    needed: set[Role] = set()
    for part in parts:
        if part.suffix in skip:
            continue
        for role, _ in part.blocks:
            source = _source(role)
            if source is not None and _fits(parts, part, role):
                needed.add(source)
    if (experts or needed & _READ_OUTPUT) and _weight_rows(parts, "output") is not None:
        needed.add("output")
    if "output" in needed and flow.output_follows_query:
        needed.add("query")
    if flow.heads == "blocks" and needed & set(_OF_HEADS):
        needed.update(_OF_HEADS)
    return needed


def _source(role: Role) -> Role | None:
    """Return the role whose map a role's rows follow: its own, or for a norm, that of the module before it.

    None for norms at the layer's entrance, where nothing was aligned yet, and for single numbers.
    """
    sources: dict[Role, Role | None] = {
        "pre_attention_norm": None,
        "pre_mlp_norm": "output",
        "post_attention_norm": "output",
        "post_mlp_norm": "down",
        "query_norm": "query",
        "key_norm": "key",
        # One number, which scales one vector.
        "shared_gate": None,
    }
    return sources.get(role, role)


def _fits(parts: tuple[Part, ...], part: Part, role: Role) -> bool:
    """Return whether a norm is as wide as the map it would borrow (query norms over one head only are not).

    False where there is no map to borrow: the module is not known, or is one of many experts.
    """
    source = _source(role)
    if source is None or source == role:
        return True
    found = _weight_rows(parts, source)
    return found is not None and part.shape[0] == found[2] - found[1]


def _t_out(part: Part, role: Role, label: str, parts: tuple[Part, ...]) -> MapRef:
    """Return the map that aligns the output side of a role's rows; the identity where none fits."""
    source = _source(role)
    if source is None or not _fits(parts, part, role):
        return IDENTITY
    # The stream before the MLP is the sum of the layer's entrance (identity) and the attention output: ½ (T_O + I).
    return MapRef(f"{label}.{source}", half_identity=role == "pre_mlp_norm")


def _blocks(part: Part, flow: _Flow, parts: tuple[Part, ...]) -> tuple[Block, ...]:
    """Return the blocks that align a tensor; none for a tensor that is averaged."""
    blocks: list[Block] = []
    start = 0
    for role, rows in part.blocks:
        t_in = flow.t_in(role) if part.kind == "weight" else IDENTITY
        blocks.append(Block(start, start + rows, t_in, _t_out(part, role, flow.label, parts)))
        start += rows
    return tuple(blocks)


def _rows_of(parts: tuple[Part, ...], role: Role) -> tuple[Part, int, int]:
    """Return (part, begin, end): the weight that holds the module `role`, and its rows there. One must exist."""
    found = _weight_rows(parts, role)
    assert found is not None, f"no weight holds the module {role}"
    return found


def _weight_rows(parts: tuple[Part, ...], role: Role) -> tuple[Part, int, int] | None:
    """Return (part, begin, end): the weight that holds the module `role`, and its rows there.

    None where none is known.
    """
    for part in parts:
        if part.kind != "weight":
            continue
        start = 0
        for other, rows in part.blocks:
            if other == role:
                return part, start, start + rows
            start += rows
    return None
