"""A matrix as a small PNG inside the page."""

from __future__ import annotations

import base64
import math
import struct
import zlib

from surgeon.findings.gathering import HeatMap
from surgeon.report.page.markup import Markup, el

# From no mass to most, dark to light: legible on either background, and in grey.
_STOPS = ((20, 20, 60), (60, 60, 140), (40, 130, 140), (90, 190, 110), (250, 230, 60))


def heat_image(heat: HeatMap) -> Markup:
    """The map on a logarithmic scale over six decades."""
    largest = max((max(row) for row in heat.cells), default=0.0)
    pixels = b"".join(b"\0" + b"".join(_colour(value, largest) for value in row) for row in heat.cells)
    width = len(heat.cells[0]) if heat.cells else 1
    encoded = base64.b64encode(_png(pixels, width, max(1, len(heat.cells)))).decode("ascii")
    told = f"transport map {heat.name}, {heat.rows} by {heat.columns}, largest share {largest:.3g}"
    return el(
        "img", src=f"data:image/png;base64,{encoded}", alt=told, class_="map", width=width, height=len(heat.cells)
    )


def _colour(value: float, largest: float) -> bytes:
    share = 0.0 if value <= 0 or largest <= 0 else max(0.0, 1 + math.log10(value / largest) / 6)
    at = min(share, 1.0) * (len(_STOPS) - 1)
    low = min(int(at), len(_STOPS) - 2)
    return bytes(round(a + (b - a) * (at - low)) for a, b in zip(_STOPS[low], _STOPS[low + 1], strict=True))


def _png(pixels: bytes, width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(pixels, 9)) + chunk(b"IEND", b"")
