"""Numbers, names, layers and values formatted for messages and terminal tables, and suggestions for misspelt words."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from surgeon.errors import printable

# A number that rounds up to the next unit is shown in that unit: 999,900 bytes are 1 MB, not 1e+03 kB.
_ROUNDED_UP = 0.9995


def count(number: int) -> str:
    """Return a count of parameters as text: 1,235,814,400 (1.24B)."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= size * _ROUNDED_UP:
            return f"{number:,} ({number / size:.3g}{unit})"
    return f"{number:,}"


def size(number: int) -> str:
    """Return a number of bytes as text in decimal units."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= unit * _ROUNDED_UP:
            return f"{number / unit:.3g} {name}"
    return f"{number} B"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: `1 document`, `2,000 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def windows(length: int) -> str:
    """Return the words for the context of a printed loss, at most `length` tokens."""
    return f"windows of at most {length:,} tokens"


def span(first: int, last: int) -> str:
    """Return a run of numbers as text: `3` or `3-7`."""
    return str(first) if first == last else f"{first}-{last}"


def at_revision(name: str, revision: str | None) -> str:
    """Return a base's name, with its revision where one is known: `org/model@main`."""
    return f"{name}@{revision}" if revision else name


def listed(names: Iterable[str], most: int = 6) -> str:
    """Return the first names, at most `most`, and the number of further ones."""
    names = list(names)
    shown = ", ".join(printable(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def show(indices: list[int]) -> str:
    """Return indices as text with runs joined: `0-3, 7, 9-11`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(span(run[0], run[-1]) for run in runs)


def show_layers(indices: list[int]) -> str:
    """Return indices as text after their noun: `layer 3`, `layers 0-3, 7`."""
    return f"{'layer' if len(indices) == 1 else 'layers'} {show(indices)}"


def layers_have(indices: list[int]) -> str:
    """Return layers and their verb: `layer 3 has`, `layers 0-3, 7 have`."""
    return f"{show_layers(indices)} {'has' if len(indices) == 1 else 'have'}"


def did_you_mean(given: str, options: Sequence[str]) -> str:
    """Return the end of an error about `given`: the nearest option, or all options."""
    if (close := nearest(given, options)) is not None:
        return f"; did you mean `{close}`?"
    return f"; known: {', '.join(options)}" if options else ""


def nearest(given: str, options: Sequence[str]) -> str | None:
    """Return the option nearest to `given`; None where none is near."""
    return next(iter(difflib.get_close_matches(given, options, n=1, cutoff=0.5)), None)


def value_text(value: Any) -> str:
    """Return a value as text for errors: JSON, truncated."""
    return printable(json.dumps(value, ensure_ascii=False), 60)
