"""HTML built from escaped pieces: elements, and the blocks that all sections are made of.

jinja2 was weighed: templates of the sections with prose are a third shorter, those with figures as long. Charts would
still need elements, unquoted attributes are not escaped there, and no type checker reads a template.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from surgeon.errors import printable

_VOID = frozenset({"br", "col", "hr", "img", "link", "meta"})
# Longer than any sensible name; `lines` is for texts of several lines.
_LIMIT = 2_000


class Markup(str):
    """Text that is HTML already; only this module makes it."""

    __slots__ = ()


Child = Markup | str | int | None
Value = Markup | str | int | float | bool | None


def text(words: str) -> Markup:
    """Escaped plain text, with invisible and control characters made visible."""
    return Markup(html.escape(printable(words, limit=_LIMIT)))


def lines(words: str) -> Markup:
    """The same for a text of several lines, whose line ends are kept."""
    return Markup("\n".join(text(line) for line in words.splitlines()))


def el(name: str, /, *children: Child, **attributes: Value) -> Markup:
    """An element. Attributes: `class_` is class, `_` becomes `-`, None and False are left out, True has no value.

    Names of elements and attributes come from this package, never from data.
    """
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        word = key.rstrip("_").replace("_", "-")
        written.append(f' {word}=""' if value is True else f' {word}="{_value(value)}"')
    head = f"<{name}{''.join(written)}>"
    return Markup(head if name in _VOID else f"{head}{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Markup one after the other."""
    shown = (child if isinstance(child, Markup) else text(str(child)) for child in children if child is not None)
    return Markup("".join(shown))


def raw(ours: str) -> Markup:
    """A style sheet or an encoded picture of this package, unescaped."""
    assert "<" not in ours and '"' not in ours
    return Markup(ours)


def section(key: str, title: str, *children: Child) -> Markup:
    """One section with its heading; the table of contents links to it."""
    return el("section", el("h2", title, id=f"{key}-head"), *children, id=key, aria_labelledby=f"{key}-head")


def figure(drawn: Markup, caption: Child) -> Markup:
    """A picture with its caption."""
    return el("figure", drawn, el("figcaption", caption))


def pair(*children: Child) -> Markup:
    """Pictures and tables side by side, where the page is wide enough."""
    return el("div", *children, class_="pair")


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[Child]],
    *,
    numbers: Sequence[int] = (),
    words: Sequence[int] = (),
) -> Markup:
    """A table in a box that scrolls, by keyboard too; columns in `numbers` are right-aligned."""

    def kind(column: int) -> str | None:
        return "number" if column in numbers else "words" if column in words else None

    body = [el("tr", *(el("td", cell, class_=kind(nth)) for nth, cell in enumerate(row))) for row in rows]
    heads = [el("th", name, scope="col", class_=kind(nth)) for nth, name in enumerate(head)]
    return _box(caption, el("tr", *heads), body)


def shaded_table(
    caption: str,
    corner: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[float | None]]],
    *,
    full: float = 1.0,
) -> Markup:
    """A matrix as a table of numbers, each shaded by its share of `full`."""
    body = []
    for name, values in rows:
        cells = [
            el(
                "td",
                "" if value is None else f"{value:.3g}",
                class_="number",
                style=f"--v:{0.0 if value is None or full <= 0 else min(1.0, max(0.0, value / full)):.3f}",
            )
            for value in values
        ]
        body.append(el("tr", el("th", name, scope="row"), *cells))
    head = el("tr", el("th", corner, scope="col"), *(el("th", name, scope="col", class_="number") for name in columns))
    return _box(caption, head, body, "heated")


def folded(summary: str, *children: Child) -> Markup:
    """Content that opens on a click."""
    return el("details", el("summary", summary), *children)


def _value(value: Markup | str | int | float) -> str:
    if isinstance(value, Markup):
        return value
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return text(str(value))


def _box(caption: str, head: Markup, body: Iterable[Markup], class_: str | None = None) -> Markup:
    made = el("table", el("caption", caption), el("thead", head), el("tbody", *body), class_=class_)
    return el("div", made, class_="box", tabindex=0, role="region", aria_label=caption)
