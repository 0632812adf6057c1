"""Merging entries of `config.surgery` that are equal for several layers: {"layers": "0-3,6", …}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgeon.runtime.spread import for_each_layer, one_each

_NO_BOUND = 10**9


def by_ranges(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.surgery` with equal entries of several layers merged into one, the form that planners write."""
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
    """Merge entries that differ only in their numbers; return them unchanged where a layer's order would change."""
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
        spread = sorted((one for each in made for one in one_each(each, _NO_BOUND)), key=lambda entry: entry["layer"])
    except ValueError:
        return entries
    return made if spread == sorted(entries, key=lambda entry: entry["layer"]) else entries


def _as_text(numbers: list[int]) -> str:
    """Return numbers as text: `0-3,6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
