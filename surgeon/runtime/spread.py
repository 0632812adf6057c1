"""Entries of `config.surgery` for several layers: {"layers": "0-3,6", …} means one entry with "layer" for each."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any


def numbers_in(text: str, bound: int) -> list[int]:
    """Return the numbers in a text such as `0-3,6`, without those above `bound`; ValueError if they do not ascend."""
    parts = [part.partition("-") for part in text.split(",")]
    if any(int(after) <= int(last or first) for (first, _, last), (after, *_) in pairwise(parts)):
        raise ValueError(f"config.surgery: the layers `{text}` do not ascend")
    return [n for first, _, last in parts for n in range(int(first), min(int(last or first), bound) + 1)]


def for_each_layer(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.surgery` with one entry for each layer, sorted by layer within each key.

    Lists in which every entry names a single "layer" stay as they are; texts such as `0-3,6` become lists of numbers.
    """
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
    """Return one entry for each layer that `entry` names, and its branch where it names branches.

    Layers and branches above `bound` are left out.
    """
    layers = entry["layers"] if "layers" in entry else str(entry["layer"])
    made = [{"layer": layer} for layer in numbers_in(layers, bound)]
    if "branches" in entry:
        for one, branch in zip(made, numbers_in(entry["branches"], bound), strict=True):
            one["branch"] = branch
    return [one | {key: entry[key] for key in entry if key not in ("layers", "branches")} for one in made]
