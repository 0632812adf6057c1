"""Tables of gates and the figure of losses for the template measured.html."""

from __future__ import annotations

from collections.abc import Sequence

from surgeon.common.page.markup import Markup
from surgeon.common.page.plots import Axis, Series, lines
from surgeon.lab.reports.curves import Curve
from surgeon.lab.reports.routing_record import RoutingReport

# The number of line styles.
_STYLES = 6


# A shaded table of numbers: its caption, its named rows, and the number that gets the strongest shade.
_Shaded = tuple[str, list[tuple[str, list[float | None]]], float]


def gate_tables(report: RoutingReport) -> list[_Shaded]:
    """Return tables of the gates' numbers by text: three for adapters, one for interpolators."""
    by_text = [text.gates for text in report.texts.values()]
    adapters = [gate for gate in report.gates if any(g.get(gate) and g[gate].loudness is not None for g in by_text)]
    shares = [gate for gate in report.gates if gate not in adapters]

    def table(caption: str, chosen: Sequence[str], field: str, full: float | None) -> _Shaded:
        """Return the table of a field of the gates `chosen`; `full` has the strongest shade (None: the largest)."""
        rows = [(gate, [getattr(gates_of.get(gate), field, None) for gates_of in by_text]) for gate in chosen]
        largest = max((value for _, values in rows for value in values if value is not None), default=1.0)
        return caption, rows, full or largest

    found = []
    if adapters:
        found += [
            table("Adapters: mean of the gate", adapters, "mean", None),
            table("Adapters: share of tokens with a closed gate", adapters, "closed", 1.0),
            table("Adapters: mean ‖output‖₁ over the width", adapters, "loudness", None),
        ]
    if shares:
        found.append(table("Interpolators: mean α, the expanded branch's share", shares, "mean", 1.0))
    return found


def curve_lines(curves: Sequence[Curve]) -> Markup:
    """Draw losses by source over the steps of training."""
    return lines(
        "Loss by source",
        [Series(curve.source, curve.points, nth % _STYLES) for nth, curve in enumerate(curves)],
        Axis.over("step", (step for curve in curves for step, _ in curve.points)),
        Axis.over("loss, nats a token", (loss for curve in curves for _, loss in curve.points)),
        key="curves-lines",
        height=max(206.0, 12.0 * len(curves) + 70),
    )
