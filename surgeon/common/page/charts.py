"""SVG pictures for pages, and small charts of bars.

Charts are 360 units wide, so that a phone shows them whole. One style sheet, light and dark, sets all colours. A page
follows the reader's colour scheme, and its text stays scalable and searchable. Every picture has a description for
screen readers.
"""

from __future__ import annotations

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
