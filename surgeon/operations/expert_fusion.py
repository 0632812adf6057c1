"""Recipes for the experts of a layer fused by optimal transport: matched first, then each pair fused like an MLP.

The routers decide which experts match: a linear assignment matches the rows of both layers' routers, after T_in like
any module that reads the stream after attention. The neurons of each pair are then aligned by their own maps, as in a
dense layer (OpT-DeUS, Algorithm 1). All router entries of an expert follow the assignment.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from surgeon.anatomy.family import Part, Role
from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import (
    IDENTITY,
    Block,
    Coupling,
    ExpertLayout,
    Fused,
    MapRef,
    Matched,
    Recipe,
    one_expert,
    stacked_experts,
)


def of_experts(suffix: str) -> str:
    """Return a tensor's suffix with the expert's number replaced by `*`: `mlp.experts.*.down_proj.weight`."""
    return re.sub(r"\.\d+\.", ".*.", suffix)


def is_of_experts(part: Part) -> bool:
    """Return whether a part belongs to experts or their router, where these are known."""
    return part.expert is not None or any(role == "router" for role, _ in part.blocks)


def router_of(parts: Iterable[Part]) -> Part | None:
    """Return the router's matrix, a row for each expert; None in a layer without experts that can be aligned."""
    return next((part for part in parts if part.kind == "weight" and part.expert is None and is_of_experts(part)), None)


def fuse_experts(
    draft: Draft,
    below: int,
    *,
    label: str,
    t_in: MapRef,
    settings: Mapping[str, object],
    cost_first: bool,
    skip: frozenset[str],
) -> dict[str, Recipe]:
    """Return recipes, by suffix, of experts and router fused from layers `below` and `below + 1`.

    Tensors in `skip` are left out. Adds to the draft the matching `{label}.experts` and, for expert `e` of the upper
    layer, the maps `{label}.experts.{e}.{role}`. `t_in` is the map for modules that read the stream after attention;
    with `cost_first` rows are compared before they are moved by it. Empty where a layer has no experts, or none that
    can be aligned.
    """
    kind = draft.kind_of(below)
    router = router_of(kind.parts)
    if router is None:
        return {}
    lower, upper = draft.layers[below].tensors, draft.layers[below + 1].tensors
    matching = f"{label}.experts"
    kept = tuple(sorted(settings.items()))
    draft.add_coupling(
        Coupling(
            name=matching,
            first=lower[router.suffix],
            second=upper[router.suffix],
            start=0,
            stop=router.shape[0],
            t_in=t_in,
            settings=kept,
            groups=kind.expert_groups,
            cost_first=cost_first,
        )
    )
    tensors: dict[str, Recipe] = {}
    for part in kind.parts:
        if part.expert is None and is_of_experts(part) and part.suffix not in skip:
            moved = _router_block(part, matching, t_in)
            tensors[part.suffix] = Fused(lower[part.suffix], upper[part.suffix], (moved,))
    experts = [part for part in kind.parts if part.expert is not None]
    needed = {role for part in experts if part.suffix not in skip for role, _ in part.blocks}
    for bank in _banks(experts):
        first, second = _shares(bank, lower), _shares(bank, upper)
        pairs = [(Matched(first, number, matching), own) for number, own in enumerate(second)]
        blocks = [_neuron_blocks(bank[0], f"{matching}.{number}", t_in) for number in range(len(pairs))]
        if bank[0].kind == "weight":
            _add_maps(draft, pairs, blocks, needed, kept, cost_first)
        fused = tuple(Fused(*pair, moved) for pair, moved in zip(pairs, blocks, strict=True))
        stored = bank[0].expert
        assert stored is not None
        if stored.number is None:
            layout = ExpertLayout(stored.transposed, stored.interleaved)
            tensors[bank[0].suffix] = stacked_experts(fused, layout)
        else:
            tensors |= {part.suffix: recipe for part, recipe in zip(bank, fused, strict=True)}
    return {suffix: recipe for suffix, recipe in tensors.items() if suffix not in skip}


def _add_maps(
    draft: Draft,
    pairs: Sequence[tuple[Recipe, Recipe]],
    blocks: Sequence[tuple[Block, ...]],
    needed: Collection[Role],
    settings: tuple[tuple[str, object], ...],
    cost_first: bool,
) -> None:
    """Add to the draft a map between the neurons of each pair of experts, for each role in `needed`.

    `pairs` are the tensors of lower and upper expert, `blocks` each pair's blocks; their `t_out` names the map.
    """
    for (lower, upper), moved in zip(pairs, blocks, strict=True):
        for block in moved:
            name = block.t_out.coupling
            assert name is not None
            if name.rpartition(".")[2] in needed:
                coupling = Coupling(
                    name, lower, upper, block.start, block.stop, block.t_in, settings, cost_first=cost_first
                )
                draft.add_coupling(coupling)


def _router_block(part: Part, matching: str, t_in: MapRef) -> Block:
    """Return the block that moves a router's matrix, its bias, or another per-expert tensor by the assignment."""
    rows = part.shape[0]
    if part.kind == "weight":
        return Block(0, rows, t_in, MapRef(matching))
    if len(part.shape) == 1:
        return Block(0, rows, IDENTITY, MapRef(matching))
    # Experts along the second axis: the columns move.
    return Block(0, rows, MapRef(matching), IDENTITY)


def _neuron_blocks(part: Part, expert: str, t_in: MapRef) -> tuple[Block, ...]:
    """Return the blocks of one expert's tensor, each aligned by its own map."""
    blocks: list[Block] = []
    start = 0
    for role, rows in part.blocks:
        reads = part.kind == "weight" and role != "down"
        blocks.append(Block(start, start + rows, t_in if reads else IDENTITY, MapRef(f"{expert}.{role}")))
        start += rows
    return tuple(blocks)


def _banks(parts: Iterable[Part]) -> list[list[Part]]:
    """Group the tensors of the same module of all experts, by the experts' numbers.

    A tensor that holds all experts is a group of its own. Groups of weights come first.
    """
    found: dict[object, list[Part]] = {}
    for part in parts:
        assert part.expert is not None
        key = part.suffix if part.expert.number is None else (part.kind, part.blocks)
        found.setdefault(key, []).append(part)
    banks = [sorted(bank, key=_number) for bank in found.values()]
    return sorted(banks, key=lambda bank: bank[0].kind != "weight")


def _number(part: Part) -> int:
    """Return an expert's number; 0 for a tensor of all experts."""
    assert part.expert is not None
    return part.expert.number or 0


def _shares(bank: list[Part], tensors: Mapping[str, Recipe]) -> tuple[Recipe, ...]:
    """Return each expert's share of a group of tensors, as it is used."""
    stored = bank[0].expert
    assert stored is not None
    if stored.number is not None:
        return tuple(tensors[part.suffix] for part in bank)
    whole = tensors[bank[0].suffix]
    layout = ExpertLayout(stored.transposed, stored.interleaved)
    return tuple(one_expert(whole, number, layout) for number in range(whole.shape[0]))
