"""What routers and gates chose, as tables."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from surgeon.errors import printable
from surgeon.results import RoutingReport

_SHOWN = 8


def routing_view(report: RoutingReport) -> RenderableType:
    """Slots by text; the control states each text uses most; gates by text."""
    parts: list[RenderableType] = []
    if report.router_layer is not None:
        parts += [Text(f"router above {report.router_layer} layers: mean weight of each slot"), _slots(report)]
    if report.sites:
        parts += [Text("control states: where each text's weight goes, mean over sites"), _states(report)]
    gates = dict.fromkeys(gate for text in report.texts.values() for gate in text.gates)
    if gates:
        parts += [Text("gates: mean, and for adapters the share of tokens they are closed for"), _gates(report, gates)]
    return Group(*parts)


def _slots(report: RoutingReport) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("text")
    for slot in range(report.slots):
        table.add_column(f"slot {slot}", justify="right")
    for name, text in report.texts.items():
        if text.router is not None:
            table.add_row(printable(name), *(f"{mean:.3f}" for mean in text.router.mean))
    return table


def _states(report: RoutingReport) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("text")
    table.add_column("control states, most used first")
    for name, text in report.texts.items():
        sums = [sum(row[state] for row in text.states) for state in range(len(report.sites))]
        total = sum(sums) or 1.0
        order = sorted(range(len(sums)), key=lambda state: -sums[state])[:_SHOWN]
        told = [f"{report.sites[s][0]}.{report.sites[s][1]} {sums[s] / total:.0%}" for s in order if sums[s]]
        table.add_row(printable(name), ", ".join(told))
    return table


def _gates(report: RoutingReport, gates: dict[str, None]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("gate")
    for name in report.texts:
        table.add_column(printable(name), justify="right")
    for gate in gates:
        cells = []
        for text in report.texts.values():
            told = text.gates[gate]
            cells.append(f"{told.mean:.4f}" + (f" ({told.closed:.0%})" if told.loudness is not None else ""))
        table.add_row(gate, *cells)
    return table
