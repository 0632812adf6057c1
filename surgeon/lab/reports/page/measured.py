"""Figures of measurements, with captions, for the template measured.html: maps, routers and gates, learning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from surgeon.common.page.charts import Bar, bars, grid
from surgeon.common.page.markup import Markup
from surgeon.common.page.plots import Axis, Series, lines
from surgeon.lab.reports.curves import Curve, GateActivity
from surgeon.lab.reports.routing_record import RoutingReport
from surgeon.lab.reports.transport import MapFact

Captioned = tuple[Markup, str]

# The number of line styles.
_STYLES = 6
_SHORT = {"attention": "attn"}


def map_bars(maps: Sequence[MapFact]) -> list[Captioned]:
    """Draw the mean entropy and the largest error of transport maps, by module."""
    by_module: dict[str, list[MapFact]] = {}
    for fact in maps:
        by_module.setdefault(fact.module or "map", []).append(fact)
    entropy, error = [], []
    for module, facts in by_module.items():
        mean = sum(m.entropy for m in facts) / len(facts)
        share = sum(m.entropy / m.uniform if m.uniform else 1 for m in facts) / len(facts)
        worst = max(max(m.row_error, m.column_error) for m in facts)
        entropy.append(Bar(module, share, f"{mean:.2f} · {share:.1%}", 2))
        # Errors span decades: the bar's length is log10 between 1e-12 and 1.
        error.append(Bar(module, 12 + math.log10(max(worst, 1e-12)), f"{worst:.1e}", 4))
    stuck = sum(not m.converged for m in maps)
    converged = "all converged" if not stuck else f"{stuck} of {len(maps)} did not converge"
    return [
        (
            bars("Mean entropy by module", entropy, full=1.0, key="entropies", cap="log(n·m)"),
            f"Mean over {_each(by_module)}: nats, and share of the largest possible.",
        ),
        (
            bars("Largest marginal error by module", error, full=12.0, key="errors", cap="1"),
            f"L1 distance of T's rows and columns from uniform, from 1e-12 (left) to 1, logarithmic; {converged}.",
        ),
    ]


def _each(by_module: Mapping[str, Sequence[MapFact]]) -> str:
    """Return how many maps a module has, as text: one number, or the fewest and the most."""
    counts = sorted({len(facts) for facts in by_module.values()})
    # The smallest count, and the largest where it differs.
    return f"{' to '.join(map(str, [*counts[:1], *counts[1:][-1:]]))} maps a module"


def control_states(report: RoutingReport) -> tuple[list[Captioned], float]:
    """Draw the control states that each site takes; return (a grid with caption for each text, the largest weight)."""
    names = [f"{layer}.{_SHORT.get(kind, kind)}" for layer, kind in report.sites]
    largest = _largest(row for text in report.texts.values() for row in text.states)
    drawn = []
    for nth, (name, text) in enumerate(report.texts.items()):
        if text.states:
            most = f"most used: {report.most_used(text, 3)}"
            picture = grid(
                f"Control states chosen on {name}",
                text.states,
                key=f"mixture-{nth}",
                down="site",
                across="control state",
                rows=names,
                columns=names,
                full=largest,
                summary=most,
            )
            drawn.append((picture, f"{name}: {most}."))
    return drawn, largest


def routed_experts(report: RoutingReport) -> tuple[list[Captioned], float]:
    """Draw the experts that tokens take; return (a grid with caption for each text, the largest share)."""
    largest = _largest(found.tokens for text in report.texts.values() for found in text.experts.values())
    drawn = []
    for nth, (name, text) in enumerate(report.texts.items()):
        if text.experts:
            cells = [found.tokens for found in text.experts.values()]
            unused = sum(found.unused for found in text.experts.values())
            words = f"no token takes {unused} of {sum(map(len, cells))} experts" if unused else "every expert is taken"
            picture = grid(
                f"Routed experts taken on {name}",
                cells,
                key=f"experts-{nth}",
                down="layer",
                across="expert",
                rows=list(text.experts),
                columns=[str(expert) for expert in range(max(map(len, cells)))],
                full=largest,
                summary=words,
            )
            drawn.append((picture, f"{name}: {words}."))
    return drawn, largest


def _largest(rows: Iterable[Sequence[float]]) -> float:
    """Return the largest of all numbers; 1 where it is 0 or there are none."""
    return max((value for row in rows for value in row), default=0.0) or 1.0


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


def gate_bars(gate: GateActivity, run: int) -> list[Captioned]:
    """Draw the shares of new and of original tokens for which a run's gate was open, by prefix length and overall."""
    drawn = []
    for role, style, better in (
        ("new", 2, "The higher the more is learned."),
        ("original", 4, "The lower the more is kept."),
    ):
        entries = [
            Bar(name, share, f"{share:.1%}", style)
            for name, shares in (*gate.by_length.items(), ("all", gate.shares))
            if (share := shares.get(role)) is not None
        ]
        picture = bars(f"Open on {role} text", entries, full=1.0, key=f"gate-{run}-{role}", cap="100%")
        drawn.append((picture, better))
    return drawn
