"""Entries of `config.surgery` that stand for several layers: {"layers": "0-3,6", …} for one each with its "layer"."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from .present import CHECKED, INSERTED, TWINS


def numbers_in(text: str, bound: int) -> list[int]:
    """`0-3,6` as numbers, none above `bound`."""
    parts = [part.partition("-") for part in text.split(",")]
    if CHECKED and any(int(after) <= int(last or first) for (first, _, last), (after, *_) in pairwise(parts)):
        raise ValueError(f"config.surgery: the layers `{text}` do not ascend")
    return [n for first, _, last in parts for n in range(int(first), min(int(last or first), bound) + 1)]


def for_each_layer(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.surgery` with an entry for each layer, those of a key in order; those of a single "layer" stay."""
    bound = 2 * raw["trunk_layers"]
    spread = dict(raw)
    for key, value in raw.items():
        if INSERTED and isinstance(value, str):
            spread[key] = numbers_in(value, bound)
        if isinstance(value, list) and any(isinstance(entry, Mapping) and "layers" in entry for entry in value):
            entries = [one for entry in value for one in _one_each(entry, bound)]
            spread[key] = sorted(entries, key=lambda entry: entry["layer"])
    return spread


def _one_each(entry: Mapping[str, Any], bound: int) -> list[dict[str, Any]]:
    layers = entry["layers"] if "layers" in entry else str(entry["layer"])
    made = [{"layer": layer} for layer in numbers_in(layers, bound)]
    if TWINS and "branches" in entry:
        for one, branch in zip(made, numbers_in(entry["branches"], bound), strict=True):
            one["branch"] = branch
    return [one | {key: entry[key] for key in entry if key not in ("layers", "branches")} for one in made]


def by_ranges(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.surgery` in which entries that say the same of several layers are one: what planners write."""
    made: dict[str, Any] = {}
    for key, value in for_each_layer(raw).items():
        if isinstance(value, list) and value and all(type(number) is int for number in value):
            made[key] = _as_text(value)
        elif isinstance(value, list):
            made[key] = _merged(value)
        else:
            made[key] = value
    return made


def _merged(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries that are equal but for their numbers as one; as they are where a layer's would change their order."""
    groups: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for entry in sorted(entries, key=lambda entry: entry["layer"]):
        said = {key: value for key, value in entry.items() if key not in ("layer", "branch")}
        members = next((found for other, found in groups if other == said), None)
        if members is None:
            members = []
            groups.append((said, members))
        members.append(entry)
    made = []
    for said, members in groups:
        numbers = {"layers": _as_text([each["layer"] for each in members])}
        if "branch" in members[0]:
            numbers["branches"] = _as_text([each["branch"] for each in members])
        made.append(numbers | said)
    try:
        spread = sorted((one for each in made for one in _one_each(each, _NO_BOUND)), key=lambda entry: entry["layer"])
    except ValueError:
        return entries
    return made if spread == sorted(entries, key=lambda entry: entry["layer"]) else entries


_NO_BOUND = 10**9


def _as_text(numbers: list[int]) -> str:
    """Numbers as text: `0-3,6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
