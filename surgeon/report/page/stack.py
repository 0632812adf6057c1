"""The layer stack as a picture: the first base's layers on the left, the output's on the right, top layer on top."""

from __future__ import annotations

from surgeon.common.formatting import show
from surgeon.common.page.charts import WIDTH, drawing
from surgeon.common.page.markup import Markup, el, join
from surgeon.operations import legends
from surgeon.report.history import History, Mark, StackLayer

_ROW, _TALL = 24.0, 20.0
_OLD_WIDTH, _NEW_LEFT = 42.0, 84.0
_HEAD = 20.0
_MARKS_RIGHT = 336.0
# A mark's width, and how much wider each letter after the second makes it.
_PILL, _LETTER = 28.0, 6.0


def stack_figure(history: History) -> Markup:
    """The picture. Every layer is a box; lines lead from a base layer to its present place."""
    layers = history.layers
    rows = max(len(layers), history.base_layers)
    height = _HEAD + _ROW * rows + 4
    old_top = _HEAD + (_ROW * (rows - history.base_layers)) / 2
    # The number of the top row, where the output's layers begin half of the missing rows below it.
    top = (rows + len(layers)) / 2 - 1
    now_at = {layer.base: layer for layer in layers if layer.base is not None}
    parts = [
        el("text", "base", x=_OLD_WIDTH / 2, y=12, class_="head", text_anchor="middle"),
        el("text", "output", x=_NEW_LEFT, y=12, class_="head"),
    ]
    for base in range(history.base_layers):
        y = old_top + _ROW * (history.base_layers - 1 - base)
        if base in now_at:
            there = _top(now_at[base], top) + _TALL / 2
            here, right = y + _TALL / 2, _NEW_LEFT
            bend = f"M{_OLD_WIDTH} {here:g}C{_OLD_WIDTH + 22} {here:g} {right - 22} {there:g} {right} {there:g}"
            parts.append(el("path", d=bend, class_="path"))
        parts += [
            el("rect", x=1, y=y, width=_OLD_WIDTH - 1, height=_TALL, rx=3, class_="layer base"),
            el("text", base, x=_OLD_WIDTH / 2, y=y + 14, class_="label", text_anchor="middle"),
        ]
    parts += [_layer(layer, _top(layer, top)) for layer in layers]
    made = [layer.index for layer in layers if layer.base is None]
    summary = f"{history.base_layers} layers became {len(layers)}"
    summary += f"; new: layers {show(made)}" if made else "; none is new"
    return drawing("The layer stack, old and new", summary, height, *parts, key="stack", class_="chart stack")


def origin_words(layer: StackLayer) -> str:
    """A layer's origin in a few words."""
    if layer.base is not None:
        return layer.init.partition(",")[0] if layer.origin == "changed" else "kept"
    of = f" {'+'.join(map(str, layer.sources))}" if layer.sources else ""
    made = layer.origin if layer.origin in ("fused", "copied") else layer.init.partition(",")[0] or "new"
    return f"{made}{of}"


def legend(history: History) -> Markup:
    """The meaning of the boxes, letters and triangles that occur."""
    origins = {layer.origin for layer in history.layers}
    words = {
        "base": "kept: a layer of the base, unchanged by surgery",
        "changed": "changed: a layer of the base with other weights",
        "fused": "fused: made from the two layers named",
        "copied": "copied: began as a copy of the layer named",
        "made": "new: with another initialisation",
    }
    rows = [
        _legend_row(el("rect", x=1, y=3, width=26, height=14, rx=3, class_=f"layer {origin}"), words[origin])
        for origin in words
        if origin in origins
    ]
    if any(layer.trains for layer in history.layers):
        rows.append(_legend_row(_trains(10, 4), "the layer's own weights train"))
    # A graft that no operation here explains is called as the manifest calls it.
    known = legends()
    signs: dict[str, Mark] = {}
    for layer in history.layers:
        for mark in layer.marks:
            signs.setdefault(mark.sign[:1], mark)
    for letter, mark in signs.items():
        words_of_mark = f"{letter} {known[letter].words}" if letter in known else mark.text
        rows.append(_legend_row(_pill(0, 2, mark.sign[:2], trains=False), words_of_mark))
    if any(mark.trains for layer in history.layers for mark in layer.marks):
        rows.append(
            _legend_row(
                el("rect", x=1, y=2, width=25, height=16, rx=8, class_="pill trains"), "heavy outline: the graft trains"
            )
        )
    return el("ul", *rows, class_="legend")


def _legend_row(sample: Markup, words: str) -> Markup:
    picture = el("svg", sample, viewBox="0 0 30 20", width=30, height=20, aria_hidden="true")
    return el("li", picture, el("span", words))


def _top(layer: StackLayer, top: float) -> float:
    return _HEAD + _ROW * (top - layer.index)


def _layer(layer: StackLayer, y: float) -> Markup:
    words = origin_words(layer)
    pills = _grouped(layer.marks)
    left = _MARKS_RIGHT - sum(_width(sign) for sign, _ in pills)
    room = (left - _NEW_LEFT - 34) / 6.2
    shown = words if len(words) <= room else f"{words[: max(1, int(room) - 1)]}…"
    title = f"layer {layer.index}: {words}" + "".join(f"; {mark.text}" for mark in layer.marks)
    parts = [
        el("title", title + ("; trains" if layer.trains else "")),
        el("rect", x=_NEW_LEFT, y=y, width=WIDTH - _NEW_LEFT - 1, height=_TALL, rx=3, class_=f"layer {layer.origin}"),
        el("text", layer.index, x=_NEW_LEFT + 24, y=y + 14, class_="label number", text_anchor="end"),
        el("text", shown, x=_NEW_LEFT + 32, y=y + 14, class_="label"),
    ]
    for sign, trains in pills:
        parts.append(_pill(left, y + 2, sign, trains=trains))
        left += _width(sign)
    if layer.trains:
        parts.append(_trains(_MARKS_RIGHT + 6, y + 4))
    return el("g", join(*parts), class_="row")


def _grouped(marks: tuple[Mark, ...]) -> list[tuple[str, bool]]:
    """One sign for each kind, slots as a range; heavy where one of them trains."""
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
    legend = legends().get(sign[:1])
    kind = "pill" + (f" c{legend.colour}" if legend else "") + (" trains" if trains else "")
    return join(
        el("rect", x=x + 1, y=y, width=_width(sign) - 3, height=16, rx=8, class_=kind),
        el("text", sign, x=x + _width(sign) / 2 - 0.5, y=y + 11.5, class_="sign", text_anchor="middle"),
    )


def _width(sign: str) -> float:
    return _PILL + _LETTER * max(0, len(sign) - 2)


def _trains(x: float, y: float) -> Markup:
    return el("path", d=f"M{x:g} {y + 11:g}l5.5 -10l5.5 10z", class_="flag")
