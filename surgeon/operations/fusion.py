"""Recipes for a layer fused by optimal transport: OpT-DeUS, Algorithm 1, with the flow of Tables 1 and 7.

Pure data: which map aligns which module from which side. The maps are computed in `surgeon.transport`.

Spaces inside a layer (families/inner_spaces.py) are fused by one map for the units of each, wherever they occur. The
lower layer's units are matched with the upper one's by all that both hold of them, and moved everywhere: what the layer
computes is a sum over units, whose order is nobody's. Rows of a tensor that no space has are averaged as they stand.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from surgeon.anatomy.anatomy import Anatomy, LayerKind
from surgeon.anatomy.family import Part, Role, Slot, Space
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import (
    IDENTITY,
    Block,
    Coupling,
    Fused,
    MapRef,
    Recipe,
    TextSupport,
    Units,
    WholeHeads,
    average,
)
from surgeon.errors import BadInput, printable
from surgeon.operations.expert_fusion import fuse_experts, is_of_experts, of_experts, router_of

_ROWS, _COLUMNS = 0, 1


def spaces_of(anatomy: Anatomy, layer: int, kind: LayerKind) -> tuple[Space, ...]:
    """The spaces of base layer `layer` by which modules of no known role are aligned; they are not looked for in vain.

    A space whose units are rows of a module that has a role, and so a map of its own, is none.
    """
    if all(part.blocks for part in kind.parts):
        return ()
    known = {part.suffix for part in kind.parts if part.blocks}
    found = anatomy.derivation.spaces(layer)
    return tuple(s for s in found if not any(slot.axis == _ROWS and slot.suffix in known for slot in s.slots))


def of_spaces(spaces: Iterable[Space]) -> set[str]:
    """The suffixes of tensors that are aligned by spaces, biases of what reads one and writes the stream among them."""
    found = {slot.suffix for space in spaces for slot in space.slots}
    return found | {f"{suffix.removesuffix('.weight')}.bias" for suffix in found}


def columns_of(spaces: Iterable[Space], suffix: str, label: str) -> MapRef:
    """The map of a tensor's columns."""
    found = (_map(space, slot, label) for space, slot in _slots(spaces, suffix, _COLUMNS))
    return next(found, IDENTITY)


def blocks_of(spaces: Collection[Space], part: Part, label: str) -> tuple[Block, ...]:
    """How a tensor without a role is aligned: its rows from the top down."""
    t_in = columns_of(spaces, part.suffix, label)
    blocks: list[Block] = []
    begin = 0
    for space, slot in sorted(_slots(spaces, part.suffix, _ROWS), key=lambda each: each[1].start):
        if slot.start > begin:
            blocks.append(Block(begin, slot.start, t_in, IDENTITY))
        begin = slot.start + space.units * slot.each
        blocks.append(Block(slot.start, begin, t_in, _map(space, slot, label), own=False))
    if begin < part.shape[0]:
        blocks.append(Block(begin, part.shape[0], t_in, IDENTITY))
    return tuple(blocks)


def add_spaces(
    draft: Draft,
    spaces: Sequence[Space],
    lower: Mapping[str, Recipe],
    upper: Mapping[str, Recipe],
    *,
    label: str,
    settings: Mapping[str, object],
    cost_first: bool,
) -> None:
    """Add the map of each space to the draft, named `{label}.{space}`.

    With `cost_first` units are compared before those of other spaces, which are columns there, are moved.
    """
    rows = {slot.suffix for space in spaces for slot in space.slots if slot.axis == _ROWS}
    for space in spaces:
        # What is rows of another space is compared there.
        own = [slot for slot in space.slots if slot.axis == _ROWS or slot.suffix not in rows]
        t_in = {
            slot.suffix: IDENTITY if cost_first or slot.axis == _COLUMNS else columns_of(spaces, slot.suffix, label)
            for slot in own
        }
        draft.add_coupling(
            Coupling(
                name=f"{label}.{space.name}",
                first=_units(space, own, lower, t_in),
                second=_units(space, own, upper, {}),
                start=0,
                stop=space.units,
                t_in=IDENTITY,
                settings=tuple(sorted(settings.items())),
                cost_first=cost_first,
            )
        )


def _units(space: Space, slots: Sequence[Slot], tensors: Mapping[str, Recipe], t_in: Mapping[str, MapRef]) -> Units:
    parts = tuple((tensors[s.suffix], t_in.get(s.suffix, IDENTITY), s.axis, s.start, s.each) for s in slots)
    return Units(parts, space.units)


def _map(space: Space, slot: Slot, label: str) -> MapRef:
    return MapRef(f"{label}.{space.name}", spread=slot.each)


def _slots(spaces: Iterable[Space], suffix: str, axis: int) -> list[tuple[Space, Slot]]:
    return [(space, slot) for space in spaces for slot in space.slots if (slot.suffix, slot.axis) == (suffix, axis)]


Order = Literal["align_first", "cost_first"]
Flow = Literal["opt_deus", "vanilla_output", "vanilla_mlp", "vanilla"]
Heads = Literal["free", "blocks"]
Unaligned = Literal["refuse", "average"]

# Modules that solve a transport problem of their own, in the order of the layer; the rest (norms) borrow a map.
_SOLVED: tuple[Role, ...] = ("query", "key", "value", "output", "gate", "up", "down")
_OF_HEADS: tuple[Role, ...] = ("query", "key", "value")
# What reads the residual stream behind attention.
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
    support: TextSupport | None = None,
    unaligned: Unaligned = "refuse",
    order: Order = "align_first",
) -> dict[str, Recipe]:
    """Recipes, by suffix, of the layer fused from layers `below` and `below + 1` of the draft.

    With `heads` "blocks" query, key and value are aligned by whole heads, and the attention output takes the query
    heads' map as its T_in in every flow: its columns are those heads. With `support` rows are compared by activations,
    which only layers of the base have: BadInput for others. Modules of no known role are averaged; BadInput names them
    where `unaligned` says refuse. `order` says whether T_in moves the lower layer's rows before their cost is taken.

    Adds the couplings they share to the draft, named `{label}.{role}`. Tensors in `skip` are zeroed afterwards:
    a map that nothing but them needs is not computed (down_proj's, in families without post-norms); o_proj's is,
    since gate and up take it as their T_in.
    """
    kind = draft.kind_of(below)
    if support is not None:
        _check_support(draft, below, kind)
    spaces = spaces_of(draft.anatomy, draft.layers[below].like, kind)
    _check_aligned(draft.anatomy.family.model_type, kind, skip, unaligned, spaces)
    if support is not None and spaces:
        raise BadInput(
            f"`support: activations` compares what modules put out, and {spaces[0].name} of layer {below} are compared"
            " by all that they are; use `support: weights`"
        )
    if heads == "blocks":
        _check_whole_heads(draft, below)
    lower, upper = draft.layers[below].tensors, draft.layers[below + 1].tensors
    parts = tuple(part for part in kind.parts if not is_of_experts(part))
    flow_of = _Flow(flow, heads, label, parts, spaces)
    whole_heads = _whole_heads(draft, parts, lower, upper, label) if heads == "blocks" else None
    cost_first = order == "cost_first"
    add_spaces(draft, spaces, lower, upper, label=label, settings=settings, cost_first=cost_first)
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
                support=support,
                cost_first=cost_first,
            )
        )
    t_in = flow_of.t_in("router")
    experts = fuse_experts(draft, below, label=label, t_in=t_in, settings=settings, cost_first=cost_first, skip=skip)
    return _fused_tensors(lower, upper, parts, flow_of, skip, experts)


@dataclass(frozen=True)
class Ways:
    """How a kind of layer is fused: by which router experts are matched, and what is averaged for want of a role."""

    router: str
    averaged: tuple[str, ...]

    def __str__(self) -> str:
        matched = f"experts matched by {self.router}, then fused one by one" if self.router else ""
        averaged = f"averaged as they stand: {', '.join(self.averaged)}" if self.averaged else ""
        return "; ".join(filter(None, (matched, averaged)))


def ways(anatomy: Anatomy, layer: int, kind: LayerKind, skip: frozenset[str]) -> Ways:
    """How layers of a kind, as base layer `layer` is, would be fused, whose tensors in `skip` become constants."""
    router = router_of(kind.parts)
    left = tuple(_unaligned(kind, skip, spaces_of(anatomy, layer, kind)))
    return Ways("" if router is None else _module(router.suffix), left)


def _check_aligned(
    model_type: str, kind: LayerKind, skip: frozenset[str], unaligned: Unaligned, spaces: Sequence[Space]
) -> None:
    """Raise BadInput where nothing of a layer can be aligned, or something cannot be and the plan refuses that."""
    if not spaces and not any(role in _SOLVED for part in kind.parts for role, _ in part.blocks):
        raise BadInput(
            f"which tensors of a {model_type} layer are query, key, value, output, gate, up and down is not described,"
            " so nothing can be aligned; use init average, copy or random"
        )
    left = _unaligned(kind, skip, spaces)
    if left and unaligned == "refuse":
        of = f" ({printable(kind.title)})" if kind.title else ""
        raise BadInput(
            f"nobody has described how to align {printable(', '.join(left), 400)} of a {model_type} layer{of};"
            " `unaligned: average` in `init` averages them as they stand and aligns the rest; or use init average, copy"
            " or random"
        )


def _unaligned(kind: LayerKind, skip: frozenset[str], spaces: Sequence[Space]) -> list[str]:
    """Modules of no known role and in no space, each once, experts as one.

    Those whose tensors a constant replaces need none, and one number has nothing to align.
    """
    known = of_spaces(spaces) | skip
    left = [part for part in kind.parts if not part.blocks and part.suffix not in known and math.prod(part.shape) > 1]
    return list(dict.fromkeys(_module(part.suffix) for part in left))


def _module(suffix: str) -> str:
    return of_experts(suffix).removesuffix(".weight").removesuffix(".bias")


def _fused_tensors(
    lower: Mapping[str, Recipe],
    upper: Mapping[str, Recipe],
    parts: tuple[Part, ...],
    flow: _Flow,
    skip: frozenset[str],
    experts: Mapping[str, Recipe],
) -> dict[str, Recipe]:
    known = {part.suffix: part for part in parts}
    tensors: dict[str, Recipe] = {}
    for suffix, recipe in lower.items():
        if suffix in skip:  # a constant takes its place; of this recipe only dtype and shape are used
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


def _check_support(draft: Draft, below: int, kind: LayerKind) -> None:
    """Raise BadInput where two layers cannot be compared by activations: not of the base, or with experts."""
    for index in (below, below + 1):
        if draft.layers[index].base is None or draft.layers[index].rewritten:
            raise BadInput(
                f"`support: activations` needs layers of the base on both sides; layer {index} was made by an earlier"
                " operation: put this one first, or use `support: weights`"
            )
    if router_of(kind.parts) is not None:
        raise BadInput(
            "`support: activations` compares what linear modules put out, and the experts of a layer are not such"
            " modules; use `support: weights`"
        )


@dataclass(frozen=True)
class _Flow:
    """Which map aligns the input side of each matrix of the layer `label`, whose parts but experts are given."""

    kind: Flow
    heads: Heads
    label: str
    parts: tuple[Part, ...]
    spaces: tuple[Space, ...] = ()

    @property
    def output_follows_query(self) -> bool:
        """Whether the attention output's columns are aligned by the query's map: of layers that are described so."""
        if self.heads == "free" and self.kind not in ("vanilla_output", "vanilla"):
            return False
        query, output = _weight_rows(self.parts, "query"), _weight_rows(self.parts, "output")
        return query is not None and output is not None and output[0].shape[1] == query[2] - query[1]

    def t_in(self, role: Role) -> MapRef:
        """Table 1 (and 7): what aligns a matrix within its layer. A router reads what gate and up read.

        What reads a space follows its units.
        """
        found = _weight_rows(self.parts, role)
        if found is not None and (inner := columns_of(self.spaces, found[0].suffix, self.label)) != IDENTITY:
            return inner
        if role in _READ_OUTPUT and _weight_rows(self.parts, "output") is not None:
            return MapRef(f"{self.label}.output", half_identity=self.kind in ("vanilla_mlp", "vanilla"))
        if role == "output" and self.output_follows_query:
            return MapRef(f"{self.label}.query")
        return IDENTITY


def _whole_heads(
    draft: Draft, parts: tuple[Part, ...], lower: Mapping[str, Recipe], upper: Mapping[str, Recipe], label: str
) -> WholeHeads:
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
    """Roles whose maps some tensor of the fused layer needs, directly or as another map's T_in."""
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
    """The module whose outputs (or whose residual path) a part belongs to: a norm's; None at the layer's entrance."""
    sources: dict[Role, Role | None] = {
        "pre_attention_norm": None,
        "pre_mlp_norm": "output",
        "post_attention_norm": "output",
        "post_mlp_norm": "down",
        "query_norm": "query",
        "key_norm": "key",
        # One number: what it scales is one vector.
        "shared_gate": None,
    }
    return sources.get(role, role)


def _fits(parts: tuple[Part, ...], part: Part, role: Role) -> bool:
    """Whether a norm is as wide as the map it would borrow (query norms over one head only are not).

    There is none to borrow where the module is not known, or is one of many experts.
    """
    source = _source(role)
    if source is None or source == role:
        return True
    found = _weight_rows(parts, source)
    return found is not None and part.shape[0] == found[2] - found[1]


def _t_out(part: Part, role: Role, label: str, parts: tuple[Part, ...]) -> MapRef:
    source = _source(role)
    if source is None or not _fits(parts, part, role):
        return IDENTITY
    # The residual stream before the MLP is the layer's entrance (identity) and the attention's output: ½ (T_O + I).
    return MapRef(f"{label}.{source}", half_identity=role == "pre_mlp_norm")


def _blocks(part: Part, flow: _Flow, parts: tuple[Part, ...]) -> tuple[Block, ...]:
    if not part.blocks:
        return blocks_of(flow.spaces, part, flow.label) if part.suffix in of_spaces(flow.spaces) else ()
    blocks: list[Block] = []
    start = 0
    for role, rows in part.blocks:
        t_in = flow.t_in(role) if part.kind == "weight" else IDENTITY
        blocks.append(Block(start, start + rows, t_in, _t_out(part, role, flow.label, parts)))
        start += rows
    return tuple(blocks)


def _rows_of(parts: tuple[Part, ...], role: Role) -> tuple[Part, int, int]:
    """The weight that holds a module, and its rows there."""
    found = _weight_rows(parts, role)
    assert found is not None, f"no weight holds the module {role}"
    return found


def _weight_rows(parts: tuple[Part, ...], role: Role) -> tuple[Part, int, int] | None:
    """Return what `_rows_of` does; None where no weight is known to hold the module."""
    for part in parts:
        if part.kind != "weight":
            continue
        start = 0
        for other, rows in part.blocks:
            if other == role:
                return part, start, start + rows
            start += rows
    return None
