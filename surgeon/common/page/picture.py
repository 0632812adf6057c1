"""Pictures as SVG, for pages and as files of their own: one style for both, light and dark.

A page follows the reader's colour scheme, and its words stay text that scales and can be searched.
"""

from __future__ import annotations

from importlib.resources import files

from surgeon.common.page.markup import Markup, el, raw

_STYLE = files(__package__) / "picture.css"
_MARGIN = 10


def picture_style() -> str:
    """Return the style sheet of all pictures: colours by name, then what is drawn with them."""
    return _STYLE.read_text(encoding="utf-8")


def drawing(
    title: str, summary: str, size: tuple[float, float], *parts: Markup, key: str, class_: str = "chart"
) -> Markup:
    """Return an SVG of a width and height with a name and a description; `key` is unique on the page."""
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


def placed(x: float, y: float, *parts: Markup) -> Markup:
    """Return parts moved right and down."""
    return el("g", *parts, transform=f"translate({x:g} {y:g})")


def standalone(title: str, summary: str, size: tuple[float, float], *parts: Markup, scale: float) -> str:
    """Return a file's content: the picture with its style, on paper of its own.

    A browser shows it in the colours that its reader prefers. The paper is drawn too, as the page around it may have
    another colour scheme. `scale` is the pixels a unit where the page does not say how wide it is.
    """
    width, height = size[0] + 2 * _MARGIN, size[1] + 2 * _MARGIN
    drawn = el(
        "svg",
        el("title", title, id="title"),
        el("desc", summary, id="summary"),
        el("style", raw("\n" + picture_style())),
        el("rect", width=width, height=height, rx=6, class_="paper"),
        placed(_MARGIN, _MARGIN, *parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=width * scale,
        height=height * scale,
        role="img",
        aria_labelledby="title summary",
    )
    return drawn + "\n"
