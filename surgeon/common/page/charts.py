"""SVG pictures for pages, and small charts: bars and shaded grids.

Charts are 360 units wide, so that a phone shows them whole. One style sheet, light and dark, sets all colours. A page
follows the reader's colour scheme, and its text stays scalable and searchable. Every picture has a description for
screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from surgeon.common.page.markup import Markup, el

_STYLE = files(__package__) / "picture.css"


def picture_style() -> str:
    """Return the style sheet of all pictures: colours by name, then the drawn elements."""
    return _STYLE.read_text(encoding="utf-8")


def drawing(
    title: str, summary: str, size: tuple[float, float], *parts: Markup, key: str, class_: str = "chart"
) -> Markup:
    """Return an SVG of a given width and height with a title and a description; `key` is unique on the page."""
    width, height = size
    return el(
        "svg",
        el("title", title, id=f"{key}-title"),
        el("desc", summary, id=f"{key}-summary"),
        *parts,
        viewBox=f"0 0 {width:g} {height:g}",
        class_=class_,
        role="img",
        aria_labelledby=f"{key}-title {key}-summary",
    )


WIDTH = 360
_RIGHT = 10


@dataclass(frozen=True)
class Bar:
    """One bar: `value` out of at most `full`, and `words` at its end."""

    name: str
    value: float
    words: str
    style: int = 0


def bars(title: str, entries: Sequence[Bar], *, full: float, key: str, cap: str = "") -> Markup:
    """Draw horizontal bars on a scale to `full`, the right end of the frame; `cap` is its label."""
    row, left, right = 22, 64, 92
    span = WIDTH - left - right
    parts = []
    for number, entry in enumerate(entries):
        y = number * row + 4
        length = span * min(1.0, max(0.0, entry.value / full)) if full > 0 else 0.0
        parts += [
            el("text", entry.name, x=left - 6, y=y + 12, class_="tick", text_anchor="end"),
            el("rect", x=left, y=y, width=span, height=16, class_="trough"),
            el("rect", x=left, y=y, width=max(length, 0.5), height=16, class_=f"bar s{entry.style}"),
            el("text", entry.words, x=left + span + 6, y=y + 12, class_="tick"),
        ]
    height = len(entries) * row + (18 if cap else 4)
    if cap:
        parts.append(el("text", cap, x=left + span, y=height - 3, class_="tick", text_anchor="end"))
    summary = "; ".join(f"{entry.name}: {entry.words}" for entry in entries)
    return drawing(title, summary, (WIDTH, height), *parts, key=key)


def grid(
    title: str,
    cells: Sequence[Sequence[float]],
    *,
    key: str,
    down: str,
    across: str,
    rows: Sequence[str],
    columns: Sequence[str],
    summary: str,
    full: float = 1.0,
) -> Markup:
    """Draw a matrix of shares from 0 to `full` as shaded cells; every few rows and columns have a label."""
    left, top = 64.0, 58.0
    side = (WIDTH - left - _RIGHT) / max(1, len(columns))
    tall = min(side, 24.0)
    parts = [
        el("text", across, x=left, y=10, class_="tick"),
        el("text", down, x=left - 6, y=top - 6, class_="tick", text_anchor="end"),
    ]
    for column in range(0, len(columns), _stride(side)):
        x = left + (column + 0.5) * side + 3
        parts.append(
            el("text", columns[column], class_="tick small", transform=f"translate({x:.1f} {top - 4}) rotate(-60)")
        )
    for number, row in enumerate(cells):
        y = top + number * tall
        if number % _stride(tall) == 0:
            parts.append(
                el("text", rows[number], x=left - 4, y=y + tall / 2 + 3, class_="tick small", text_anchor="end")
            )
        for column, value in enumerate(row):
            if value > 0.004 * full:
                shade = f"{min(1.0, value / full):.2f}"
                parts.append(
                    el("rect", x=left + column * side, y=y, width=side, height=tall, class_="heat", fill_opacity=shade)
                )
    height = top + len(cells) * tall
    parts.append(el("rect", x=left, y=top, width=WIDTH - left - _RIGHT, height=height - top, class_="frame"))
    return drawing(title, summary, (WIDTH, height + 4), *parts, key=key)


def _stride(side: float) -> int:
    return max(1, math.ceil(10 / side)) if side > 0 else 1
