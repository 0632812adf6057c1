"""Promises as tables of the terminal have them. Apart from numbers, as what styles them takes time to import."""

from __future__ import annotations

from rich.text import Text

# Where `exact` holds: what is new ends in zeros or at equal shares, and no number times zero is none.
CONDITION = "wherever what is new stays finite"

PROMISE_STYLES = {
    "exact": Text("exact", style="bold green"),
    "rounding": Text("rounding only", style="bold green"),
    "none": Text("not preserving", style="bold yellow"),
}


def promise_of(promise: str, *, trained: bool) -> Text:
    """A promise as it holds now: of a model that was trained since, it is about its birth."""
    shown = PROMISE_STYLES[promise]
    return Text(f"{shown.plain} at birth", style=shown.style) if trained and promise != "none" else shown
