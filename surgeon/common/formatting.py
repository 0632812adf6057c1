"""Numbers, names, layers and values as messages and tables of the terminal have them, and what was probably meant."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from surgeon.errors import printable

# What three digits round to a whole unit is shown in it: 999,900 bytes are 1 MB, not 1e+03 kB.
_ROUNDED_UP = 0.9995


def count(number: int) -> str:
    """A count of parameters: 1,235,814,400 (1.24B)."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= size * _ROUNDED_UP:
            return f"{number:,} ({number / size:.3g}{unit})"
    return f"{number:,}"


def size(number: int) -> str:
    """A number of bytes in decimal units."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= unit * _ROUNDED_UP:
            return f"{number / unit:.3g} {name}"
    return f"{number} B"


def counted(number: int, noun: str) -> str:
    """A number and what it counts: `1 document`, `2,000 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def span(first: int, last: int) -> str:
    """A run of numbers: `3` or `3-7`."""
    return str(first) if first == last else f"{first}-{last}"


def at_revision(name: str, revision: str | None) -> str:
    """A base's name, with its revision where one is known: `org/model@main`."""
    return f"{name}@{revision}" if revision else name


def listed(names: Iterable[str]) -> str:
    """The first six names, and how many more there are."""
    names = list(names)
    shown = ", ".join(printable(name) for name in names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


def show(indices: list[int]) -> str:
    """Indices as text, runs joined: `0-3, 7, 9-11`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def show_layers(indices: list[int]) -> str:
    """Indices as text after their noun: `layer 3`, `layers 0-3, 7`."""
    return f"{'layer' if len(indices) == 1 else 'layers'} {show(indices)}"


def layers_have(indices: list[int]) -> str:
    """Layers and their verb: `layer 3 has`, `layers 0-3, 7 have`."""
    return f"{show_layers(indices)} {'has' if len(indices) == 1 else 'have'}"


def did_you_mean(given: str, options: Sequence[str]) -> str:
    """Return what to add to an error about `given`: the option that is nearest, or all of them."""
    if (close := nearest(given, options)) is not None:
        return f"; did you mean `{close}`?"
    return f"; known: {', '.join(options)}" if options else ""


def nearest(given: str, options: Sequence[str]) -> str | None:
    """Return the option that is nearest to what was given; None where none is near."""
    return next(iter(difflib.get_close_matches(given, options, n=1, cutoff=0.5)), None)


def value_text(value: Any) -> str:
    """Return a value as errors show it: JSON, cut short."""
    return printable(json.dumps(value, ensure_ascii=False), 60)
