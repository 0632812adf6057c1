"""The layer stack as a picture: the first base's layers on the left, the output's layers on the right, top layer first.

Embeddings and output head have their own rows where they grew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surgeon.blueprint.grafts import grafts_of
from surgeon.common.formatting import show
from surgeon.common.page.charts import WIDTH, drawing
from surgeon.common.page.markup import Markup, el, join
from surgeon.lab.reports.history import History, Mark, StackLayer, WiderEnd
from surgeon.operations import legends

_ROW, _TALL = 24.0, 20.0
_OLD_WIDTH, _NEW_LEFT = 42.0, 84.0
_HEAD = 20.0
# Free space at the right end of a box, for the triangle.
_FLAG = 24.0
# A mark's width, and the additional width for each letter after the second.
_PILL, _LETTER = 28.0, 6.0

_WORDS = {
    "base": "kept: a layer of the base, unchanged by surgery",
    "widened": "widened: the base's weights, and new ones beside",
    "changed": "changed: a layer of the base with other weights",
    "fused": "fused: made from the two layers named",
    "copied": "copied: began as a copy of the layer named",
    "made": "new: with another initialisation",
}


@dataclass(frozen=True)
class Drawn:
    """A drawn stack: its parts, its height, and a sentence that describes it."""

    parts: tuple[Markup, ...]
    height: float
    summary: str


def stack_figure(history: History, ends: Sequence[WiderEnd] = ()) -> Markup:
    """Return the stack as SVG. Every layer is a box; lines connect a base layer to its present place."""
    drawn = drawn_stack(history, ends, width=WIDTH)
    size = (WIDTH, drawn.height)
    return drawing("The layer stack, old and new", drawn.summary, size, *drawn.parts, key="stack", class_="chart stack")


def drawn_stack(history: History, ends: Sequence[WiderEnd] = (), *, width: float) -> Drawn:
    """Return the stack drawn `width` units wide."""
    layers = history.layers
    rows = max(len(layers), history.base_layers)
    below, above = [end for end in ends if end.below], [end for end in ends if not end.below]
    lowest = _HEAD + _ROW * (rows + len(above) - 1)
    # The shorter stack is centred: half of its missing rows are below it.
    old, new = ((rows - count) / 2 for count in (history.base_layers, len(layers)))
    carried = grafts_of(history.lineage.surgeries[0].base.config)
    parts = [
        el("text", "base", x=_OLD_WIDTH / 2, y=12, class_="head", text_anchor="middle"),
        el("text", "output", x=_NEW_LEFT, y=12, class_="head"),
    ]
    now_at = {layer.base: layer for layer in layers if layer.base is not None}
    for base in range(history.base_layers):
        y = lowest - _ROW * (base + old)
        there = now_at.get(base)
        if there is not None:
            parts.append(_way(y, lowest - _ROW * (there.index + new)))
        signs = "".join(dict.fromkeys(graft.sign[:1] for graft in carried.get(base, ())))
        kind = "layer base" if there is not None else "layer gone"
        parts += _old_box(f"{base} {signs}".strip(), y, kind)
    parts += [_layer(layer, lowest - _ROW * (layer.index + new), width) for layer in layers]
    for nth, end in enumerate(above, 1):
        parts.append(_end(end, lowest - _ROW * (rows - 1 + nth), width))
    for nth, end in enumerate(below, 1):
        parts.append(_end(end, lowest + _ROW * nth, width))
    made = [layer.index for layer in layers if layer.base is None]
    summary = f"{history.base_layers} layers became {len(layers)}"
    summary += f"; new: layers {show(made)}" if made else "; none is new"
    summary += "".join(f"; {end.name} {_grown(end)}" for end in ends)
    return Drawn(tuple(parts), lowest + _ROW * (1 + len(below)) + 4, summary)


def _way(old: float, new: float) -> Markup:
    """Return the line from a base layer to its present place; `old` and `new` are the tops of the boxes."""
    here, there, right = old + _TALL / 2, new + _TALL / 2, _NEW_LEFT
    bend = f"M{_OLD_WIDTH} {here:g}C{_OLD_WIDTH + 22} {here:g} {right - 22} {there:g} {right} {there:g}"
    return el("path", d=bend, class_="path")


def _old_box(words: str, y: float, kind: str) -> list[Markup]:
    """Return a box in the column of the first base, with `words` in it; `kind` is its CSS class."""
    return [
        el("rect", x=1, y=y, width=_OLD_WIDTH - 1, height=_TALL, rx=3, class_=kind),
        el("text", words, x=_OLD_WIDTH / 2, y=y + 14, class_="label", text_anchor="middle"),
    ]


def _end(end: WiderEnd, y: float, width: float) -> Markup:
    """Return the row of the embeddings or the output head: a box with the base's part and the new part."""
    name = "embeddings" if end.below else "output head"
    box = width - _NEW_LEFT - 1
    return el(
        "g",
        el("title", f"{end.name}: {_grown(end)}"),
        *_old_box("", y, "layer base"),
        _way(y, y),
        el("rect", x=_NEW_LEFT, y=y, width=box, height=_TALL, rx=3, class_="layer widened"),
        _beside(end.share, y, width),
        el("text", f"{name}: {_grown(end)}", x=_NEW_LEFT + 8, y=y + 14, class_="label"),
        _trains(width - _FLAG + 6, y + 4),
    )


def _grown(end: WiderEnd) -> str:
    """Return the old and new sizes of the sides that grew, as text."""
    sides = zip(("rows", "columns"), end.before, end.after, strict=True)
    return ", ".join(f"{before:,} → {after:,} {side}" for side, before, after in sides if before != after)


def _beside(share: float, y: float, width: float) -> Markup:
    """Return the new part of a box: its right end, as wide as `share` of the box."""
    long = (width - _NEW_LEFT - 1) * share
    return el("rect", x=width - 1 - long, y=y + 0.5, width=long, height=_TALL - 1, rx=3, class_="beside")


def origin_words(layer: StackLayer) -> str:
    """Return a layer's origin in a few words."""
    if layer.origin == "widened":
        return f"{layer.init}, {layer.share:.0%} new"
    if layer.base is not None:
        return layer.init.partition(",")[0] if layer.origin == "changed" else "kept"
    of = f" {'+'.join(map(str, layer.sources))}" if layer.sources else ""
    made = layer.origin if layer.origin in ("fused", "copied") else layer.init.partition(",")[0] or "new"
    return f"{made}{of}"


def legend_rows(history: History, ends: Sequence[WiderEnd] = ()) -> list[tuple[Markup, str]]:
    """Return (sample, meaning) for each kind of box, letter and triangle in the picture.

    A sample is 30 units wide and 20 units tall.
    """
    origins = {layer.origin for layer in history.layers} | ({"widened"} if ends else set())
    rows = [(_sample(origin), _WORDS[origin]) for origin in _WORDS if origin in origins]
    if len({layer.base for layer in history.layers} - {None}) < history.base_layers:
        rows.append((_sample("gone"), "taken out"))
    if ends or any(layer.trains for layer in history.layers):
        widened = "widened" in origins
        rows.append((_trains(10, 4), "what is new in it trains" if widened else "the layer's own weights train"))
    # A graft that is unknown to all operations gets its name in the manifest.
    known = legends()
    signs: dict[str, Mark] = {}
    for layer in history.layers:
        for mark in layer.marks:
            signs.setdefault(mark.sign[:1], mark)
    for letter, mark in signs.items():
        words_of_mark = f"{letter} {known[letter].words}" if letter in known else mark.text
        rows.append((_pill(0, 2, mark.sign[:2], trains=False), words_of_mark))
    if any(mark.trains for layer in history.layers for mark in layer.marks):
        sample = el("rect", x=1, y=2, width=25, height=16, rx=8, class_="pill trains")
        rows.append((sample, "heavy outline: the graft trains"))
    return rows


def _sample(origin: str) -> Markup:
    """Return a small box for the legend, drawn like the layers of an origin."""
    box = el("rect", x=1, y=3, width=26, height=14, rx=3, class_=f"layer {origin}")
    return join(box, el("rect", x=19, y=3.5, width=8, height=13, rx=3, class_="beside")) if origin == "widened" else box


def legend(history: History, ends: Sequence[WiderEnd] = ()) -> Markup:
    """Return the legend as a list."""
    return el("ul", *(_legend_row(sample, words) for sample, words in legend_rows(history, ends)), class_="legend")


def _legend_row(sample: Markup, words: str) -> Markup:
    """Return a row of the legend: a sample and its meaning."""
    picture = el("svg", sample, viewBox="0 0 30 20", width=30, height=20, aria_hidden="true")
    return el("li", picture, el("span", words))


def _layer(layer: StackLayer, y: float, width: float) -> Markup:
    """Return the row of one layer of the output: its box, number, origin, grafts, and a triangle where it trains."""
    words = origin_words(layer)
    pills = _grouped(layer.marks)
    left = width - _FLAG - sum(_width(sign) for sign, _ in pills)
    room = (left - _NEW_LEFT - 34) / 6.2
    shown = words if len(words) <= room else f"{words[: max(1, int(room) - 1)]}…"
    title = f"layer {layer.index}: {words}" + "".join(f"; {mark.text}" for mark in layer.marks)
    parts: list[Markup | None] = [
        el("title", title + ("; trains" if layer.trains else "")),
        el("rect", x=_NEW_LEFT, y=y, width=width - _NEW_LEFT - 1, height=_TALL, rx=3, class_=f"layer {layer.origin}"),
        _beside(layer.share, y, width) if layer.share else None,
        el("text", layer.index, x=_NEW_LEFT + 24, y=y + 14, class_="label number", text_anchor="end"),
        el("text", shown, x=_NEW_LEFT + 32, y=y + 14, class_="label"),
    ]
    for sign, trains in pills:
        parts.append(_pill(left, y + 2, sign, trains=trains))
        left += _width(sign)
    if layer.trains:
        parts.append(_trains(width - _FLAG + 6, y + 4))
    return el("g", join(*parts), class_="row")


def _grouped(marks: tuple[Mark, ...]) -> list[tuple[str, bool]]:
    """Return (sign, whether some graft of the kind trains) for each kind; numbered grafts are combined into a range."""
    order = list(legends())
    groups: dict[str, list[Mark]] = {}
    for mark in sorted(marks, key=lambda mark: order.index(mark.sign[:1]) if mark.sign[:1] in order else len(order)):
        groups.setdefault(mark.sign[:1], []).append(mark)
    shown = []
    for letter, alike in groups.items():
        first, last = alike[0].sign[1:].partition("–")[0], alike[-1].sign[1:].rpartition("–")[2]
        sign = alike[0].sign if len(alike) == 1 or first == last else f"{letter}{first}–{last}"
        shown.append((sign, any(mark.trains for mark in alike)))
    return shown


def _pill(x: float, y: float, sign: str, *, trains: bool) -> Markup:
    """Return the mark of a graft, at the place (x, y)."""
    legend = legends().get(sign[:1])
    kind = "pill" + (f" c{legend.colour}" if legend else "") + (" trains" if trains else "")
    return join(
        el("rect", x=x + 1, y=y, width=_width(sign) - 3, height=16, rx=8, class_=kind),
        el("text", sign, x=x + _width(sign) / 2 - 0.5, y=y + 11.5, class_="sign", text_anchor="middle"),
    )


def _width(sign: str) -> float:
    """Return the width of a graft's mark."""
    return _PILL + _LETTER * max(0, len(sign) - 2)


def _trains(x: float, y: float) -> Markup:
    """Return the triangle that marks what trains."""
    return el("path", d=f"M{x:g} {y + 11:g}l5.5 -10l5.5 10z", class_="flag")
