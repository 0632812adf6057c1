"""Spaces inside a layer fused: one map for the units of each, wherever they occur (families/inner_spaces.py).

The lower layer's units are matched with the upper one's by all that both hold of them, and moved everywhere: what the
layer computes is a sum over units, whose order is nobody's. Rows of a tensor that no space has are averaged as they
stand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from surgeon.blueprint.draft import Draft
from surgeon.blueprint.recipes import IDENTITY, Block, Coupling, MapRef, Recipe, Units
from surgeon.families.anatomy import Anatomy, LayerKind
from surgeon.families.family import Part, Slot, Space

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
