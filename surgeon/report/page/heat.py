"""Transport maps as pictures: a PNG of a few hundred bytes in the page itself."""

from __future__ import annotations

import base64
import math
import struct
import zlib

from surgeon.common.page.markup import Markup, el, raw
from surgeon.report.findings import HeatMap

# From no mass to most, dark to light: readable on either background, and in grey.
_STOPS = ((20, 20, 60), (60, 60, 140), (40, 130, 140), (90, 190, 110), (250, 230, 60))


def heat_figure(heat: HeatMap) -> Markup:
    """The map with the names of its sides, and its colours with the shares at both ends."""
    low, high = heat_range(heat)
    colours = ",".join(f"rgb{stop}" for stop in _STOPS)
    scale = el("i", style=f"background:linear-gradient(to right,{colours})")
    return el(
        "div",
        el("span", f"lower layer: {heat.rows:,} neurons", class_="down"),
        heat_image(heat),
        el("span", f"upper layer: {heat.columns:,} neurons", class_="across"),
        el("span", f"{low:.2g}", scale, f"{high:.2g} of a lower neuron's mass", class_="scale"),
        class_="heatmap",
    )


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
