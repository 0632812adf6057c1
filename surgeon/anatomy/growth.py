"""A config.json for more layers: every field about layers is rewritten, and the result is checked by building it.

A field may hold an entry for each layer, name layers by number, or count them from one end. Its meaning is not guessed:
the grown model is built on the meta device, and each of its layers must be of the intended kind.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from surgeon.anatomy.kinds import described_kinds, holds_numbers, numbered, period_of
from surgeon.anatomy.shared import shared_in
from surgeon.anatomy.skeleton import Skeleton, build
from surgeon.common.formatting import show
from surgeon.errors import BadInput, printable

# Fields that may count layers from the bottom or the top, or be the number of one.
_COUNTS = re.compile(r"dense|layers?(_|$)|_idx$|_index$|start|shared")
# Fields that may hold an entry for each layer; others may be as long as the stack by chance.
_ENTRIES = re.compile(r"layer|types?(_|$)|pattern|intermediate_size|top_?k|experts?(_|$)")
# A field whose numbered keys are labels, not layers.
_LABELS = "id2label"
_MOST_TRIALS = 48


def layer_axis(before: tuple[int, ...], after: tuple[int, ...], old: int, new: int) -> int | None:
    """Return the axis along which a tensor holds one part per layer; None where its two shapes show no such axis.

    `before` and `after` are its shapes with `old` and with `new` layers.
    """
    if len(before) != len(after):
        return None
    differing = [axis for axis, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    if len(differing) != 1:
        return None
    axis = differing[0]
    fits = before[axis] % old == 0 and after[axis] % new == 0 and before[axis] // old == after[axis] // new
    return axis if fits else None


def part_of(config: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Return the part of a config.json at `path`."""
    found: Any = config
    for key in path:
        found = found.get(key) or {}
    return dict(found)


def _with_part(config: Mapping[str, Any], path: Sequence[str], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config whose part at `path` is replaced by `part`."""
    if not path:
        return copy.deepcopy(dict(part))
    held = copy.deepcopy(dict(config))
    held[path[0]] = _with_part(held.get(path[0]) or {}, path[1:], part)
    return held


def grown(
    config: Mapping[str, Any], skeleton: Skeleton, order: Sequence[int], trunk: int | None = None
) -> dict[str, Any]:
    """Return the config.json of a model whose layer `n` is like layer `order[n]` of the model of `config`.

    `skeleton` is the model of `config`, built. From layer `trunk` on (None: no layer), only the config's entries for a
    layer must be right: what is built there is not used. Raises BadInput naming the first layer that comes out as
    another kind, where no reading of the config's fields is right, or a tensor outside the layers that cannot follow.
    """
    if shared := shared_in(skeleton):
        raise BadInput(
            f"config.json: layers share a block (`{shared[0]}`), which transformers ties, and whose cache it keeps, by"
            " their numbers: none can be added or taken out, or get a branch; use adapters, slots or control states"
        )
    part, kinds = part_of(config, skeleton.path), described_kinds(skeleton)
    wanted = [kinds[source] for source in order]
    worst, found, others = -1, "", list[Any]()
    for trial in itertools.islice(_trials(part, skeleton, order), _MOST_TRIALS):
        made, words = _with_part(config, skeleton.path, trial), ""
        try:
            built = build(made)
            wrong = _first_other(built, wanted, len(order) if trunk is None else trunk)
        except BadInput as error:
            wrong, words = 0, str(error)
        else:
            if wrong is None:
                _check_outside(skeleton, built)
                return made
            made_kinds = described_kinds(built)
            words = _difference(made_kinds[wrong], wanted[wrong]) if wrong < len(made_kinds) else ""
            others = others or made_kinds
        if wrong > worst:
            worst, found = wrong, words
    advice = _advice(kinds, others)
    if trunk is not None and trunk <= worst < len(others):
        like = [index for index, kind in enumerate(kinds) if kind == others[worst]]
        if like:
            advice = f"the highest of `layers` must be one of {show(like)} there, or use `expansion: stack`"
    raise BadInput(
        f"config.json: a model of {len(order)} layers cannot be described: its layer {worst}, which is to be as layer"
        f" {order[worst]} of the base, would be another kind ({printable(found, 200)});"
        f" {advice}"
    )


def _advice(kinds: Sequence[Any], others: Sequence[Any]) -> str:
    """Return advice where layers cannot be at the requested places; `others` are the kinds of the model tried."""
    if others and not set(kinds) & set(others):
        return (
            "its code computes something of every layer from how many there are, so use adapters, slots or control"
            " states, which keep the depth"
        )
    period = period_of(numbered([*kinds]))
    if period is not None and period > 1:
        return (
            f"its kinds of layers repeat every {period} layers, by a rule and not by a list: add whole periods"
            f" (`every_period`), or take out {period} layers that follow each other"
        )
    return "choose other places"


def _check_outside(skeleton: Skeleton, built: Skeleton) -> None:
    """Raise BadInput where a tensor outside the layers depends on their number in a way that surgeon cannot follow.

    These are tensors that exist only for some numbers of layers, and tensors without an axis that has one part per
    layer.
    """
    old, new = len(skeleton.layers), len(built.layers)
    for name in sorted(skeleton.changes(built)):
        one, other = skeleton.shapes.get(name), built.shapes.get(name)
        inside = name.startswith(f"{skeleton.stack}.")
        if inside or (one and other and layer_axis(one, other, old, new) is not None):
            continue
        change = (
            f"there with {old if one else new} layers, not with {new if one else old}"
            if one is None or other is None
            else f"{list(one)} with {old} layers, {list(other)} with {new}"
        )
        raise BadInput(
            f"{printable(name)}: stands outside the layers and depends on their number ({change}), which surgeon cannot"
            " follow; use operations that leave the layers as they are"
        )


def _first_other(built: Skeleton, wanted: Sequence[Any], trunk: int) -> int | None:
    """Return the number of the first layer that is not of the wanted kind; None where all are."""
    made = described_kinds(built)
    # Lists that only one of the two configs has do not make kinds different.
    for index, (one, other) in enumerate(zip(made, wanted, strict=False)):
        common = {key for key, _ in one[1]} & {key for key, _ in other[1]}
        if (index < trunk and one[0] != other[0]) or any(dict(one[1])[key] != dict(other[1])[key] for key in common):
            return index
    return None if len(made) == len(wanted) else min(len(made), len(wanted) - 1)


def _difference(one: Any, other: Any) -> str:
    """Return in words the first difference between the descriptions of two kinds of layers.

    A description is a pair: for each module (name, class, shapes, settings), and the config's own (key, value).
    """
    for (name, kind, shapes, settings), (_, kind2, shapes2, settings2) in zip(one[0], other[0], strict=False):
        if kind != kind2:
            return f"{kind} in place of {kind2}"
        if shapes != shapes2:
            return f"{name or kind}: tensors of other shapes"
        if settings != settings2:
            key, value = next(iter(set(settings) - set(settings2)), ("", ""))
            return f"{name or kind}: `{key}` {value!r}"
    for key, value in dict(one[1]).items():
        if dict(other[1]).get(key) != value:
            return f"`{key}` {value} in place of {dict(other[1]).get(key)}"
    return "other modules"


def _trials(part: Mapping[str, Any], skeleton: Skeleton, order: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield candidates for the grown text config, one per reading of its fields, the likeliest first."""
    count = len(skeleton.layers)
    stated = grown_part(part, count, skeleton.count_key, order)
    full = skeleton.text.to_dict()
    # Lists that the class derives from other fields (a pattern, an interval); it would derive them again, wrongly.
    derived = {
        key: value
        for key, value in full.items()
        if key not in part and isinstance(value, list) and len(value) == count and count > 1 and _ENTRIES.search(key)
    }
    for extra in ({}, derived) if derived else ({},):
        whole = dict(part) | extra
        candidate = grown_part(whole, count, skeleton.count_key, order)
        if not extra or candidate != stated:
            yield candidate
        if not extra:
            yield from (stated | more for more in _by_chance(part, stated, order, count))
        choices = [
            (key, change)
            for key, changes in _counted(whole | {k: full[k] for k in full if k not in whole}, order, count).items()
            for change in changes
        ]
        for picked in (*itertools.combinations(choices, 1), *itertools.combinations(choices, 2)):
            if len({key for key, _ in picked}) == len(picked):
                yield grown_part(whole, count, skeleton.count_key, order, dict(picked))


def _by_chance(
    part: Mapping[str, Any], stated: Mapping[str, Any], order: Sequence[int], count: int
) -> Iterator[dict[str, Any]]:
    """Yield candidates that also treat other lists as long as the stack as lists per layer: one, two, or all of them.

    These lists may have that length only by chance.
    """
    made = {
        key: [value[source] for source in order]
        for key, value in part.items()
        if isinstance(value, list) and len(value) == count > 1 and stated.get(key) == value and "token" not in key
    }
    for size in {*range(1, min(len(made), 2) + 1), len(made)} - {0}:
        yield from ({key: made[key] for key in keys} for keys in itertools.combinations(made, size))


def _counted(fields: Mapping[str, Any], order: Sequence[int], count: int) -> dict[str, list[int]]:
    """Return, for each field that may count layers or be a layer's number, the other values that it may get."""
    found: dict[str, list[int]] = {}
    for key, value in fields.items():
        if type(value) is not int or not 0 < value <= count or not _COUNTS.search(key):
            continue
        below = sum(source < value for source in order)
        above = sum(source >= count - value for source in order)
        at = list(order).index(value) if value in order else value
        found[key] = [other for other in dict.fromkeys((below, above, at)) if other != value]
    return {key: values for key, values in found.items() if values}


def grown_part(
    part: Mapping[str, Any],
    count: int,
    count_key: str | None,
    order: Sequence[int],
    counted: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the fields for other layers by one reading of them; it is not checked here that they give the right model.

    Args:
        part: The fields of the text decoder.
        count: How many layers they are for.
        count_key: The field that holds this number.
        order: Layer `n` of the result is like layer `order[n]`.
        counted: The new values of fields that count layers, or are the number of one.
    """
    made: dict[str, Any] = {}
    for key, value in part.items():
        if key == count_key:
            made[key] = len(order)
        elif key in counted:
            made[key] = counted[key]
        elif isinstance(value, list) and value and holds_numbers(key, value, count):
            made[key] = [index for index, source in enumerate(order) if source in value]
        elif isinstance(value, list) and len(value) == count and count > 1 and _ENTRIES.search(key):
            made[key] = [value[source] for source in order]
        elif isinstance(value, str) and len(value) == count and "pattern" in key:
            made[key] = "".join(value[source] for source in order)
        elif key != _LABELS and isinstance(value, Mapping) and value and all(str(each).isdecimal() for each in value):
            held = {int(number): (len(str(number)), entry) for number, entry in value.items()}
            made[key] = {
                str(index).zfill(held[source][0]): copy.deepcopy(held[source][1])
                for index, source in enumerate(order)
                if source in held
            }
        else:
            made[key] = copy.deepcopy(value)
    return made | {key: value for key, value in counted.items() if key not in made}
