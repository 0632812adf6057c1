"""SVG pictures for pages.

Charts are 360 units wide, so that a phone shows them whole. One style sheet, light and dark, sets all colours. A page
follows the reader's colour scheme, and its text stays scalable and searchable. Every picture has a description for
screen readers.
"""

from __future__ import annotations

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
