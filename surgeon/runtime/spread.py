"""Entries of `config.surgery` that stand for several layers: {"layers": "0-3,6", …} for one each with its "layer"."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any


def numbers_in(text: str, bound: int) -> list[int]:
    """`0-3,6` as numbers, none above `bound`."""
    parts = [part.partition("-") for part in text.split(",")]
    if any(int(after) <= int(last or first) for (first, _, last), (after, *_) in pairwise(parts)):
        raise ValueError(f"config.surgery: the layers `{text}` do not ascend")
    return [n for first, _, last in parts for n in range(int(first), min(int(last or first), bound) + 1)]


def for_each_layer(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.surgery` with an entry for each layer, those of a key in order; those of a single "layer" stay."""
    bound = 2 * raw["trunk_layers"]
    spread = dict(raw)
    for key, value in raw.items():
        if isinstance(value, str):
            spread[key] = numbers_in(value, bound)
        if isinstance(value, list) and any(isinstance(entry, Mapping) and "layers" in entry for entry in value):
            entries = [one for entry in value for one in one_each(entry, bound)]
            spread[key] = sorted(entries, key=lambda entry: entry["layer"])
    return spread


def one_each(entry: Mapping[str, Any], bound: int) -> list[dict[str, Any]]:
    """An entry for each layer that one names, none above `bound`."""
    layers = entry["layers"] if "layers" in entry else str(entry["layer"])
    made = [{"layer": layer} for layer in numbers_in(layers, bound)]
    if "branches" in entry:
        for one, branch in zip(made, numbers_in(entry["branches"], bound), strict=True):
            one["branch"] = branch
    return [one | {key: entry[key] for key in entry if key not in ("layers", "branches")} for one in made]
