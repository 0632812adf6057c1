"""The config.json fields that widen tensors of a layer, and how, found by building the wider model.

A field's name is not enough: transformers builds a model with a larger value, and the changed shapes show whose width
the field is. Where a class rounds widths, the field gets the value from which the class makes the wanted width.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from surgeon.anatomy.derivation import Derivation, kept
from surgeon.anatomy.family import LARGEST_SIZE, inner_width, with_fields
from surgeon.anatomy.growth import part_of
from surgeon.anatomy.seen import Seen
from surgeon.anatomy.skeleton import build
from surgeon.errors import BadInput, printable

# Fields that may be the width of an FFN, or of an expert; a field in a nested part has the part's name and a dot before
# it.
_INNER = re.compile(r"(.*\.)?.*(intermediate|n_inner|d_inner|ffn_?dim|ff_dim|ffn_hidden|dim_ff|dff|d_ff|mlp_dim).*")
# The growth of one tensor of a layer: the axis in transformers' model, its length before and after.
Growth = tuple[int, int, int]
# For each kind of layers, the tensors that grow, by their suffix on disk.
Growths = tuple[dict[str, Growth], ...]


@kept
def growths(base: Derivation, fields: Mapping[str, int]) -> Growths:
    """Return, for each kind of layers, the tensors that have another shape in a model with these fields.

    Raises BadInput where no such model can be built, or a tensor grows along several axes or is outside the layers.
    """
    return _growths(base.seen, fields)


def _growths(seen: Seen, fields: Mapping[str, int]) -> Growths:
    """Return the same as `growths`; the answer is not cached.

    Raises BadInput where no such model can be built, or a tensor grows along several axes or is outside the layers.
    """
    skeleton = seen.skeleton
    built = build(with_fields(seen.config, skeleton.path, fields))
    changed = skeleton.changes(built)
    words = " and ".join(f"`{key}`" for key in fields)
    if outside := sorted(name for name in changed if not name.startswith(f"{skeleton.stack}.")):
        raise BadInput(
            f"{printable(outside[0])}: its shape depends on {words} too, and it stands outside the layers; widen"
            " something else"
        )
    found: list[dict[str, Growth]] = []
    for index, names in seen.firsts:
        here: dict[str, Growth] = {}
        for suffix, targets in names.items():
            grew = [name for target in targets if (name := f"{skeleton.stack}.{index}.{target}") in changed]
            if not grew:
                continue
            axes = changed[grew[0]]
            if len(targets) > 1 or axes is None or len(axes) != 1:
                one, other = (each.shapes.get(grew[0], ()) for each in (skeleton, built))
                raise BadInput(
                    f"layer {index} ({printable(suffix)}): {words} changes it in a way that surgeon cannot follow"
                    f" ({list(one)}, then {list(other)}); widen something else"
                )
            ((axis, (before, after)),) = axes.items()
            here[suffix] = (axis, before, after)
        found.append(here)
    return tuple(found)


@kept
def inner_fields(base: Derivation, *, by: int = 0, multiple_of: int = 1) -> dict[str, int]:
    """Return the fields, with new values, that make every FFN and every expert of a model wider.

    Args:
        base: The base.
        by: How many neurons to add; an FFN that is `k` times as wide as the field's value gets `k` times as many.
        multiple_of: Instead, the number of which every width must be a multiple.

    Returns:
        New values by field. Empty where nothing has to grow. Raises BadInput where an FFN's width follows from no known
        field, or cannot be as wanted.
    """
    seen = base.seen
    lacking = {
        (kind, part.suffix): inner_width(part)
        for kind, held in enumerate(seen.parts)
        for part in held
        if part.kind == "weight" and any(role == "down" for role, _ in part.blocks)
    }
    found: dict[str, int] = {}
    for field, value in _candidates(seen):
        if not lacking:
            break
        # A class that rounds widths may ignore a small increase.
        mine: dict[tuple[int, str], int] = {}
        for more in (by or multiple_of, 3 * value):
            with contextlib.suppress(BadInput):
                grown = _growths(seen, {field: value + more})
                mine = mine or {place: width for place, width in lacking.items() if place[1] in grown[place[0]]}
        if not mine:
            continue
        lacking = {place: width for place, width in lacking.items() if place not in mine}
        (kind, suffix), width = next(iter(mine.items()))
        # A shared expert may be as wide as several experts.
        times = width // value if width % value == 0 else 1
        more = by or -(width // times) % multiple_of
        if more:
            place, wanted = (kind, suffix, width), width + times * more
            found[field] = _value_for(seen, (field, value), place, wanted, value + more)
    if lacking:
        (kind, suffix), width = next(iter(lacking.items()))
        raise BadInput(
            f"layer {seen.firsts[kind][0]} ({printable(suffix)}): no field of config.json is known by which its {width}"
            " neurons become more; widen something else"
        )
    return found


def _candidates(seen: Seen) -> Iterator[tuple[str, int]]:
    """Yield fields that may be a width, with their values: those in config.json, then those that the class adds."""
    known: set[str] = set()
    for fields in (part_of(seen.config, seen.skeleton.path), seen.skeleton.text.to_dict()):
        for name, value in flat_fields(fields):
            if name not in known and type(value) is int and 1 < value <= LARGEST_SIZE and _INNER.fullmatch(name):
                known.add(name)
                yield name, value


def flat_fields(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a part of a config; a nested part's fields have the part's name and a dot before theirs."""
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value


def _value_for(seen: Seen, field: tuple[str, int], place: tuple[int, str, int], wanted: int, first: int) -> int:
    """Return the value of a field from which the class makes the wanted width: `first`, or the least such value.

    Raises BadInput where no value does.
    """
    (name, value), (kind, suffix, width) = field, place

    def made_of(number: int) -> int:
        """Return the width that the class makes where the field has the value `number`."""
        grew = _growths(seen, {name: number})[kind].get(suffix)
        return width if grew is None else width * grew[2] // grew[1]

    if made_of(first) == wanted:
        return first
    low, high = value, 2 * value
    while made_of(high) < wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if made_of(middle) >= wanted else (middle, high)
    if (found := made_of(high)) != wanted:
        raise BadInput(
            f"config.json: of `{name}` transformers' class makes FFNs of {made_of(high - 1)} or {found} neurons, and"
            f" none of {wanted}; from {width} they become wider `by: {found - width}`"
        )
    return high
