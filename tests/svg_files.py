"""Pictures that are files of their own: what the docs and the pages of benchmarks show."""

from __future__ import annotations

from surgeon.common.page.charts import picture_style
from surgeon.common.page.markup import Markup, el, raw

_MARGIN = 10


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
