"""Checks of a `config.surgery`. Outputs ship without them, because no plan makes an invalid one."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from surgeon.runtime.rules import Surgery, by_layer, known_keys, read_surgery
from surgeon.runtime.spread import for_each_layer

# The activations of a graft next to an FFN whose own activation no config field names.
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")


def check_surgery(config: Any) -> Surgery:
    """Return the result of `read_surgery`, all of it checked. Raises ValueError.

    Besides `surgery`, the config object has `grafts`, all grafts that may occur, `layer_types`, those of the text
    decoder or None, and `encoder`, whether it belongs to an encoder.
    """
    raw = for_each_layer(config.surgery)
    for kind in (kind for rules in config.grafts for kind in rules.kinds if kind.fields):
        entries = raw.get(kind.key) or ()
        for entry in entries:
            known_keys(entry, kind.fields, kind.key)
        by_layer([SimpleNamespace(**entry) for entry in entries], kind.key)
    surgery = read_surgery(config)
    check_layers(surgery.new_layers, surgery.trunk_layers, "new_layers")
    check_layers(surgery.older_layers, surgery.trunk_layers, "older_layers")
    for rules in surgery.rules:
        rules.check(surgery, config)
    types = config.layer_types
    for branch, home in surgery.homes.items() if types else ():
        if types[branch : branch + 1] != types[home : home + 1]:
            raise ValueError(
                f"config.layer_types: layer {branch} is the branch of layer {home} and must "
                f"have its type, `{types[home]}`, not {types[branch : branch + 1]}"
            )
    return surgery


def one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise ValueError where `value` is not in `allowed`."""
    if value not in allowed:
        raise ValueError(f"config.surgery: {name} is `{value}`; it must be one of {', '.join(allowed)}")


def fraction(name: str, value: float) -> None:
    """Raise ValueError where `value` is not between 0 and 1, inclusive."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"config.surgery: {name} is {value}; it must lie between 0 and 1")


def loss_weight(name: str, value: float) -> None:
    """Raise ValueError where `value` is not a finite number of at least 0, as the weight of a loss must be."""
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"config.surgery: {name} is {value}; it must be a finite number, at least 0")


def check_layers(named: Iterable[int], bound: int, name: str) -> None:
    """Raise ValueError where a layer number is not from 0 up to `bound`, exclusive."""
    outside = [layer for layer in named if not 0 <= layer < bound]
    if outside:
        raise ValueError(f"config.surgery: {name} names layers {outside}; there are {bound}")
