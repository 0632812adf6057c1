"""Promises styled for terminal tables; a separate module, since rich's styles take time to import."""

from __future__ import annotations

from rich.text import Text

# The condition of `exact`: new parts end in zeros or equal shares, and zero times NaN or infinity is not zero.
CONDITION = "wherever what is new stays finite"

PROMISE_STYLES = {
    "exact": Text("exact", style="bold green"),
    "rounding": Text("rounding only", style="bold green"),
    "none": Text("not preserving", style="bold yellow"),
}


def promise_of(promise: str, *, trained: bool) -> Text:
    """Return a promise as it holds now: for a model that was trained since, it holds at birth."""
    shown = PROMISE_STYLES[promise]
    return Text(f"{shown.plain} at birth", style=shown.style) if trained and promise != "none" else shown
