"""HTML built from escaped pieces, and heat maps as embedded pictures."""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib

from surgeon.errors import printable
from surgeon.report.findings import HeatMap

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
    return Markup("".join(_child(child) for child in children if child is not None))


def raw(ours: str) -> Markup:
    """A style sheet or an encoded picture of this package, unescaped."""
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


# From no mass to most, dark to light: readable on either background, and in grey.
_STOPS = ((20, 20, 60), (60, 60, 140), (40, 130, 140), (90, 190, 110), (250, 230, 60))


def heat_image(heat: HeatMap) -> Markup:
    """The map on a logarithmic scale, from its smallest cell (at least a millionth of the largest) to its largest."""
    low, high = heat_range(heat)
    pixels = b"".join(b"\0" + b"".join(_colour(value, low, high) for value in row) for row in heat.cells)
    width = len(heat.cells[0]) if heat.cells else 1
    encoded = base64.b64encode(_png(pixels, width, max(1, len(heat.cells)))).decode("ascii")
    words = f"transport map {heat.name}, {heat.rows} by {heat.columns}, shares from {low:.3g} to {high:.3g}"
    return el(
        "img", src=raw(f"data:image/png;base64,{encoded}"), alt=words, class_="map", width=width, height=len(heat.cells)
    )


def heat_range(heat: HeatMap) -> tuple[float, float]:
    """The shares of the darkest and the lightest colour."""
    values = [value for row in heat.cells for value in row if value > 0]
    high = max(values, default=1.0)
    return max(min(values, default=high), high * 1e-6), high


def _colour(value: float, low: float, high: float) -> bytes:
    share = 0.0 if value <= low else 1.0 if value >= high else math.log(value / low) / math.log(high / low)
    at = min(share, 1.0) * (len(_STOPS) - 1)
    low = min(int(at), len(_STOPS) - 2)
    return bytes(round(a + (b - a) * (at - low)) for a, b in zip(_STOPS[low], _STOPS[low + 1], strict=True))


def _png(pixels: bytes, width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(pixels, 9)) + chunk(b"IEND", b"")
