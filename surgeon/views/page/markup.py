"""HTML and SVG as values: what is not already markup is escaped, so no name or token can become any."""

from __future__ import annotations

import html

from surgeon.errors import printable

_VOID = frozenset({"br", "col", "hr", "img", "link", "meta"})
# Longer than any name has reason to be; texts of several lines go through `lines`.
_LIMIT = 2_000


class Markup(str):
    """Text that is markup already; only this module makes it."""

    __slots__ = ()


Child = Markup | str | int | None
Value = Markup | str | int | float | bool | None


def text(words: str) -> Markup:
    """Plain words: invisible and control characters made visible, the rest escaped."""
    return Markup(html.escape(printable(words, limit=_LIMIT)))


def lines(words: str) -> Markup:
    """The same for a text whose line ends count."""
    return Markup("\n".join(text(line) for line in words.splitlines()))


def el(name: str, /, *children: Child, **attributes: Value) -> Markup:
    """An element. Attributes: `class_` is class, `_` becomes `-`, None and False are left out, True stands bare.

    Names of elements and attributes are this package's own words, never data.
    """
    told = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        word = key.rstrip("_").replace("_", "-")
        told.append(f' {word}=""' if value is True else f' {word}="{_value(value)}"')
    head = f"<{name}{''.join(told)}>"
    return Markup(head if name in _VOID else f"{head}{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Markup one after the other."""
    return Markup("".join(_child(child) for child in children if child is not None))


def raw(ours: str) -> Markup:
    """A style sheet or an encoded picture of ours, as it is."""
    assert "<" not in ours and '"' not in ours
    return Markup(ours)


def _child(child: Markup | str | int) -> str:
    return child if isinstance(child, Markup) else text(str(child))


def _value(value: Markup | str | int | float) -> str:
    if isinstance(value, Markup):
        return value
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return text(str(value))
