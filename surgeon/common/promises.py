"""Promises as tables of the terminal have them. Apart from numbers, as what styles them takes time to import."""

from __future__ import annotations

from rich.text import Text

PROMISE_STYLES = {
    "exact": Text("exact", style="bold green"),
    "rounding": Text("rounding only", style="bold green"),
    "none": Text("not preserving", style="bold yellow"),
}


def promise_of(promise: str, *, trained: bool) -> Text:
    """A promise as it holds now: of a model that was trained since, it is about its birth."""
    shown = PROMISE_STYLES[promise]
    return Text(f"{shown.plain} at birth", style=shown.style) if trained and promise != "none" else shown
