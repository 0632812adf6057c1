"""The report's figures as PNG files, drawn with matplotlib (the extra `report`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surgeon.common.page.picture import light_colours
from surgeon.errors import printable
from surgeon.report.curves import Curve
from surgeon.report.files import save_picture
from surgeon.report.findings import Findings
from surgeon.report.history import History
from surgeon.report.page.stack import origin_words
from surgeon.report.routing_record import RouterPlace, RoutingReport, TextChoices


def draw_pictures(findings: Findings, folder: Path) -> tuple[Path, ...]:
    """Draw the stack, and routing and gates where they were recorded; returns the files.

    Raises BadInput where the folder cannot be written.
    """
    drawn = {"stack": _stack(findings.history)}
    routing = findings.routing
    if routing is not None and routing.router is not None:
        drawn["router"] = _router(routing, routing.router)
    if routing is not None and routing.sites:
        for nth, name in enumerate(routing.texts):
            drawn[f"control-states-{nth}"] = _states(routing, name)
    for nth, (name, text) in enumerate(routing.texts.items() if routing is not None else ()):
        if text.experts:
            drawn[f"experts-{nth}"] = _experts(name, text)
    if routing is not None and routing.gates:
        drawn["gates"] = _gates(routing)
    if findings.curves:
        drawn["losses"] = _losses(findings.curves)
    return tuple(save_picture(figure, folder / f"{name}.png") for name, figure in drawn.items())


def _empty(width: float, height: float) -> tuple[Any, Any]:
    """A figure, its sides in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    return figure, figure.add_subplot()


def _plain(words: str, limit: int = 40) -> str:
    """Text of the data as a label: matplotlib would read dollar signs as mathematics."""
    return printable(words, limit).replace("$", r"\$")


def _stack(history: History) -> Any:
    colours = light_colours()
    colours["widened"] = colours["base"]
    figure, axes = _empty(7, 1 + 0.3 * max(len(history.layers), history.base_layers))
    offset = (len(history.layers) - history.base_layers) / 2
    for base in range(history.base_layers):
        axes.barh(base + offset, 0.8, height=0.8, color=colours["base"], edgecolor=colours["soft"])
        axes.text(0.4, base + offset, str(base), ha="center", va="center", fontsize=8)
    for layer in history.layers:
        axes.barh(layer.index, 4.5, left=1.6, height=0.8, color=colours[layer.origin], edgecolor=colours["soft"])
        marks = " ".join(mark.sign + ("*" if mark.trains else "") for mark in layer.marks)
        words = f"{layer.index}  {_plain(origin_words(layer))}"
        axes.text(1.7, layer.index, words, va="center", fontsize=8)
        axes.text(6.0, layer.index, marks + ("  trains" if layer.trains else ""), ha="right", va="center", fontsize=8)
        if layer.base is not None:
            axes.plot([0.8, 1.6], [layer.base + offset, layer.index], color=colours["soft"], linewidth=0.7)
    axes.set_title("base (left), output (right); letters: grafts, * trains", fontsize=9)
    axes.set_axis_off()
    return figure


def _router(routing: RoutingReport, place: RouterPlace) -> Any:
    means = {name: text.router.mean for name, text in routing.texts.items() if text.router is not None}
    title = f"PMoE's router above {place.layer} layers: mean weight"
    return _matrix(title, list(means), [f"slot {s}" for s in range(place.slots)], list(means.values()))


def _states(routing: RoutingReport, name: str) -> Any:
    names = [f"{layer}.{kind}" for layer, kind in routing.sites]
    rows = [list(row) for row in routing.texts[name].states]
    return _matrix(f"control states chosen on {_plain(name)}", names, names, rows)


def _experts(name: str, text: TextChoices) -> Any:
    count = max(len(found.tokens) for found in text.experts.values())
    rows = [[*found.tokens, *[float("nan")] * (count - len(found.tokens))] for found in text.experts.values()]
    title = f"routed experts: share of tokens of {_plain(name)}"
    return _matrix(title, list(text.experts), [str(expert) for expert in range(count)], rows)


def _gates(routing: RoutingReport) -> Any:
    rows = [
        [text.gates[gate].mean if gate in text.gates else float("nan") for text in routing.texts.values()]
        for gate in routing.gates
    ]
    return _matrix("gates: mean value", routing.gates, list(routing.texts), rows, most=None)


def _matrix(title: str, rows: list[str], columns: list[str], cells: Any, *, most: float | None = 1.0) -> Any:
    figure, axes = _empty(min(16, 2.5 + 0.5 * max(4, len(columns))), min(16, 1.5 + 0.3 * max(3, len(rows))))
    image = axes.imshow(cells, vmin=0, vmax=most, aspect="auto", interpolation="nearest", cmap="viridis")
    axes.set_xticks(range(len(columns)), [_plain(name, 20) for name in columns], fontsize=7, rotation=60, ha="right")
    axes.set_yticks(range(len(rows)), [_plain(name, 20) for name in rows], fontsize=7)
    axes.set_title(title, fontsize=9)
    figure.colorbar(image)
    return figure


def _losses(curves: Sequence[Curve]) -> Any:
    figure, axes = _empty(7, 4)
    colours = light_colours()
    for nth, curve in enumerate(curves):
        points = zip(*curve.points, strict=True)
        axes.plot(*points, marker=".", color=colours[f"c{nth % 6}"], label=_plain(curve.source))
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.legend(fontsize=8)
    return figure
