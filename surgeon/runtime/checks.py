"""How entries of `config.surgery` are read and checked; every ValueError says what was found and what must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """ValueError where `value` is none of `allowed`."""
    if value not in allowed:
        raise ValueError(f"config.surgery: {name} is `{value}`; it must be one of {', '.join(allowed)}")


def fraction(name: str, value: float) -> None:
    """ValueError where `value` is not from 0 to 1."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"config.surgery: {name} is {value}; it must lie between 0 and 1")


def weight(name: str, value: float) -> None:
    """ValueError where `value` is no weight of a loss."""
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"config.surgery: {name} is {value}; it must be a finite number, at least 0")


def known_keys(entry: Iterable[str], keys: Iterable[str], name: str) -> None:
    """ValueError where an entry has a key that is none of `keys`."""
    unknown = sorted(set(entry) - set(keys))
    if unknown:
        raise ValueError(f"config.surgery: {name} has unknown keys {unknown}; known are {', '.join(keys)}")


def built(kind: Any, entry: Mapping[str, Any], name: str) -> Any:
    """The dataclass `kind` made of an entry; ValueError for a key that is no field of it."""
    known_keys(entry, tuple(kind.__dataclass_fields__), name)
    return kind(**entry)


def by_layer(specs: Iterable[Any], name: str) -> dict[int, Any]:
    """Specs by their `layer`; ValueError where two name the same."""
    found: dict[int, Any] = {}
    for spec in specs:
        if spec.layer in found:
            raise ValueError(f"config.surgery: two {name} entries name the same layer")
        found[spec.layer] = spec
    return found


def check_layers(named: Iterable[int], bound: int, name: str) -> None:
    """ValueError where a layer is none of the `bound` first."""
    outside = [layer for layer in named if not 0 <= layer < bound]
    if outside:
        raise ValueError(f"config.surgery: {name} names layers {outside}; there are {bound}")
