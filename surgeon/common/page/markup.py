"""Markup of escaped pieces: what charts are built of, whose places are worked out; pages have templates."""

from __future__ import annotations

import html
from typing import Any

from markupsafe import Markup as Markup

from surgeon.errors import printable

# Longer than any sensible name; `lines` is for texts of several lines.
_LIMIT = 2_000

Child = Markup | str | int | None
Value = Markup | str | int | float | bool | None


def text(words: Any) -> Markup:
    """Escaped plain text, with invisible and control characters made visible; markup as it is, nothing for None."""
    if isinstance(words, Markup):
        return words
    return Markup("" if words is None else html.escape(printable(str(words), limit=_LIMIT)))


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
    return Markup(f"<{name}{''.join(written)}>{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Markup one after the other."""
    return Markup("".join(map(text, children)))


def raw(ours: str) -> Markup:
    """A style sheet or an encoded picture of this package, unescaped."""
    assert "<" not in ours and '"' not in ours
    return Markup(ours)


def _value(value: Markup | str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return text(value)
