"""HTML and SVG markup built from escaped pieces, for charts, whose positions are computed; pages use templates."""

from __future__ import annotations

import html
from typing import Any

from markupsafe import Markup as Markup

from surgeon.errors import printable

# The longest text of one piece, longer than any sensible name; `lines` is for texts of several lines.
_LIMIT = 2_000

Child = Markup | str | int | None
Value = Markup | str | int | float | bool | None


def text(words: Any) -> Markup:
    """Return escaped plain text, with invisible and control characters made visible.

    Markup is unchanged; None becomes "".
    """
    if isinstance(words, Markup):
        return words
    return Markup("" if words is None else html.escape(printable(str(words), limit=_LIMIT)))


def lines(words: str) -> Markup:
    """Return escaped text of several lines, with its line ends."""
    return Markup("\n".join(text(line) for line in words.splitlines()))


def el(name: str, /, *children: Child, **attributes: Value) -> Markup:
    """Return an element.

    Attributes: `class_` is class, `_` becomes `-`, None and False are left out, True has no value. Names of elements
    and attributes come from this package, never from data.
    """
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        word = key.rstrip("_").replace("_", "-")
        written.append(f' {word}=""' if value is True else f' {word}="{_value(value)}"')
    return Markup(f"<{name}{''.join(written)}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Return the children's markup, concatenated."""
    return Markup("".join(map(text, children)))


def raw(ours: str) -> Markup:
    """Return a style sheet or an encoded picture of this package as markup, unescaped."""
    assert "<" not in ours and '"' not in ours
    return Markup(ours)


def _value(value: Markup | str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return text(value)
