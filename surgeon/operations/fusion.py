"""Recipes for a layer fused by optimal transport: OpT-DeUS, Algorithm 1, with the flow of Tables 1 and 7.

Plain data: which map aligns which module from which side. The maps are computed in `surgeon.transport`.

Spaces inside a layer (anatomy/inner_spaces.py) are sets of interchangeable units; one map for each space aligns them,
wherever they occur. The lower layer's units are matched with the upper layer's by everything that the tensors hold for
them, and moved everywhere: the layer computes a sum over units, in any order. Rows that belong to no space are averaged
without alignment.
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
    Units,
    average,
)
from surgeon.errors import BadInput, printable
from surgeon.operations.expert_fusion import fuse_experts, is_of_experts, of_experts, router_of

_ROWS, _COLUMNS = 0, 1


def spaces_of(anatomy: Anatomy, layer: int, kind: LayerKind) -> tuple[Space, ...]:
    """Return the spaces of base layer `layer` that align modules without a known role; not searched if all have roles.

    A space whose units are rows of a module that has a role, and so a map of its own, is left out.
    """
    if all(part.blocks for part in kind.parts):
        return ()
    known = {part.suffix for part in kind.parts if part.blocks}
    found = anatomy.derivation.spaces(layer)
    return tuple(s for s in found if not any(slot.axis == _ROWS and slot.suffix in known for slot in s.slots))


def of_spaces(spaces: Iterable[Space]) -> set[str]:
    """Return the suffixes of tensors that spaces align, including biases of modules that read a space."""
    found = {slot.suffix for space in spaces for slot in space.slots}
    return found | {f"{suffix.removesuffix('.weight')}.bias" for suffix in found}


def columns_of(spaces: Iterable[Space], suffix: str, label: str) -> MapRef:
    """Return the map that aligns a tensor's columns; the identity where they belong to no space."""
    found = (_map(space, slot, label) for space, slot in _slots(spaces, suffix, _COLUMNS))
    return next(found, IDENTITY)


def blocks_of(spaces: Collection[Space], part: Part, label: str) -> tuple[Block, ...]:
    """Return the blocks that align a tensor without a role, from its first row to its last."""
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
    """Add to the draft a coupling for each space, named `{label}.{space}`: it matches units of `lower` and `upper`.

    With `cost_first` units are compared before the columns that belong to other spaces are moved.
    """
    rows = {slot.suffix for space in spaces for slot in space.slots if slot.axis == _ROWS}
    for space in spaces:
        # Tensors whose rows belong to another space are compared there.
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
    """Return the recipe of a space's units: a row for each unit, with everything that its slots hold for it."""
    parts = tuple((tensors[s.suffix], t_in.get(s.suffix, IDENTITY), s.axis, s.start, s.each) for s in slots)
    return Units(parts, space.units)


def _map(space: Space, slot: Slot, label: str) -> MapRef:
    """Return the map of a space, for a slot with `each` rows or columns per unit."""
    return MapRef(f"{label}.{space.name}", spread=slot.each)


def _slots(spaces: Iterable[Space], suffix: str, axis: int) -> list[tuple[Space, Slot]]:
    """Return the (space, slot) pairs at one axis of a tensor."""
    return [(space, slot) for space in spaces for slot in space.slots if (slot.suffix, slot.axis) == (suffix, axis)]


Order = Literal["align_first", "cost_first"]
Flow = Literal["opt_deus", "vanilla_output", "vanilla_mlp", "vanilla"]
Unaligned = Literal["refuse", "average"]

# Roles that get a transport problem of their own, in the order of the layer; the rest (norms) borrow a map.
_SOLVED: tuple[Role, ...] = ("query", "key", "value", "output", "gate", "up", "down")
# Roles that read the residual stream after attention.
_READ_OUTPUT: frozenset[Role] = frozenset({"gate", "up", "router", "shared_gate"})


def fuse_layers(
    draft: Draft,
    *,
    below: int,
    label: str,
    flow: Flow,
    settings: Mapping[str, object],
    skip: frozenset[str],
    unaligned: Unaligned = "refuse",
    order: Order = "align_first",
) -> dict[str, Recipe]:
    """Return recipes, by suffix, of the layer fused from layers `below` and `below + 1` of the draft.

    Modules without a known role are averaged; where `unaligned` is "refuse", BadInput names them. `order` decides
    whether T_in moves the lower layer's rows before their cost is computed. Adds the shared couplings to the draft,
    named `{label}.{role}`. Tensors in `skip` are zeroed afterwards: a map that only they need is not computed
    (down_proj's, in families without post-norms); o_proj's map is, since gate and up use it as their T_in.
    """
    kind = draft.kind_of(below)
    spaces = spaces_of(draft.anatomy, draft.layers[below].like, kind)
    _check_aligned(draft.anatomy.family.model_type, kind, skip, unaligned, spaces)
    lower, upper = draft.layers[below].tensors, draft.layers[below + 1].tensors
    parts = tuple(part for part in kind.parts if not is_of_experts(part))
    flow_of = _Flow(flow, label, parts, spaces)
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


def ways(anatomy: Anatomy, layer: int, kind: LayerKind, skip: frozenset[str]) -> Ways:
    """Return how layers like base layer `layer` are fused, if the tensors in `skip` become constants."""
    router = router_of(kind.parts)
    left = tuple(_unaligned(kind, skip, spaces_of(anatomy, layer, kind)))
    return Ways("" if router is None else _module(router.suffix), left)


def _check_aligned(
    model_type: str, kind: LayerKind, skip: frozenset[str], unaligned: Unaligned, spaces: Sequence[Space]
) -> None:
    """Raise BadInput where nothing of a layer can be aligned, or a module cannot be and the plan refuses that."""
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
    """Return modules without a known role and outside every space, each once, all experts as one.

    Left out are tensors that a constant replaces, and single numbers, which have nothing to align.
    """
    known = of_spaces(spaces) | skip
    left = [part for part in kind.parts if not part.blocks and part.suffix not in known and math.prod(part.shape) > 1]
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


@dataclass(frozen=True)
class _Flow:
    """The map for the input side of each matrix of the layer `label`; `parts` are its tensors without experts."""

    kind: Flow
    label: str
    parts: tuple[Part, ...]
    spaces: tuple[Space, ...] = ()

    @property
    def output_follows_query(self) -> bool:
        """Return whether the query's map aligns the attention output's columns; only where their sizes match."""
        if self.kind not in ("vanilla_output", "vanilla"):
            return False
        query, output = _weight_rows(self.parts, "query"), _weight_rows(self.parts, "output")
        return query is not None and output is not None and output[0].shape[1] == query[2] - query[1]

    def t_in(self, role: Role) -> MapRef:
        """Return the map that aligns a matrix's input side (Tables 1 and 7). A router reads what gate and up read.

        A matrix whose columns belong to a space follows that space's units.
        """
        found = _weight_rows(self.parts, role)
        if found is not None and (inner := columns_of(self.spaces, found[0].suffix, self.label)) != IDENTITY:
            return inner
        if role in _READ_OUTPUT and _weight_rows(self.parts, "output") is not None:
            return MapRef(f"{self.label}.output", half_identity=self.kind in ("vanilla_mlp", "vanilla"))
        if role == "output" and self.output_follows_query:
            return MapRef(f"{self.label}.query")
        return IDENTITY


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
