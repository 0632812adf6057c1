"""What routers and gates chose, text by text: matrices, and tokens coloured by their slot."""

from __future__ import annotations

from collections.abc import Sequence

from surgeon.report.page.charts import grid
from surgeon.report.page.markup import Child, Markup, el
from surgeon.report.page.sections import figure, folded, section
from surgeon.results import RoutingReport, TextChoices

_COLOURS = 6


def routing_section(report: RoutingReport | None) -> Markup | None:
    """PMoE's router, Mixture-of-Control's sites and the gates, as recorded; None where nothing was."""
    if report is None or not report.texts:
        return None
    parts: list[Child] = [
        el("p", "Recorded on " + ", ".join(f"{name} ({text.tokens:,} tokens)" for name, text in report.texts.items()))
    ]
    if report.router_layer is not None:
        parts += _router(report)
    if report.sites:
        parts += _mixture(report)
    gates = list(dict.fromkeys(gate for text in report.texts.values() for gate in text.gates))
    if gates:
        parts += _gates(report, gates)
    return section("routing", "What routers and gates choose", *parts)


def _router(report: RoutingReport) -> list[Markup]:
    told = [(name, text.router) for name, text in report.texts.items() if text.router is not None]
    slots = [f"slot {slot}" for slot in range(report.slots)]
    parts = [
        el("h3", f"PMoE's router, above {report.router_layer} layers"),
        heated("Mean weight of each slot", "text", slots, [(name, list(router.mean)) for name, router in told]),
        heated("Share of tokens a slot weighs most for", "text", slots, [(name, list(r.largest)) for name, r in told]),
    ]
    for name, router in told:
        spans = [
            el("span", _token(token), el("sub", slot), class_=f"t{slot % _COLOURS}") for token, slot in router.examples
        ]
        parts.append(folded(f"Tokens of {name} by the slot they weigh most", el("p", *spans, class_="tokens")))
    return parts


def _token(token: str) -> str:
    return token.replace("\n", "⏎") or "∅"


def _mixture(report: RoutingReport) -> list[Markup]:
    names = [f"{layer}.{kind[:4]}" for layer, kind in report.sites]
    figures = []
    for nth, (name, text) in enumerate(report.texts.items()):
        if text.states:
            figures.append(
                figure(
                    grid(
                        f"Control states chosen on {name}",
                        text.states,
                        key=f"mixture-{nth}",
                        down="site",
                        across=f"control state ({name})",
                        rows=names,
                        columns=names,
                        told=_most_used(report, text),
                    ),
                    f"{name}: {_most_used(report, text)}.",
                )
            )
    words = "Rows: the site that chooses; columns: whose control state; darker: more weight (1: all of it)."
    return [el("h3", "Control states (Mixture-of-Control)"), el("p", words), el("div", *figures, class_="pair")]


def _most_used(report: RoutingReport, text: TextChoices) -> str:
    sums = [sum(row[state] for row in text.states) for state in range(len(report.sites))]
    total = sum(sums) or 1.0
    order = sorted(range(len(sums)), key=lambda state: -sums[state])[:3]
    return "most used: " + ", ".join(
        f"{report.sites[s][0]}.{report.sites[s][1]} {sums[s] / total:.0%}" for s in order if sums[s]
    )


def _gates(report: RoutingReport, gates: Sequence[str]) -> list[Markup]:
    names = list(report.texts)
    held = [text.gates for text in report.texts.values()]
    largest = max((told.mean for gates_of in held for told in gates_of.values()), default=1.0)
    loud = max((told.loudness or 0 for gates_of in held for told in gates_of.values()), default=0.0)
    parts = [
        el("h3", "Gates by layer and text"),
        heated(
            "Mean value (of an interpolator: its α)",
            "gate",
            names,
            [(gate, [_of(gates_of.get(gate), "mean") for gates_of in held]) for gate in gates],
            full=largest,
        ),
    ]
    adapters = [gate for gate in gates if any(g.get(gate) and g[gate].loudness is not None for g in held)]
    if adapters:
        rows = [(gate, [_of(gates_of.get(gate), "closed") for gates_of in held]) for gate in adapters]
        parts.append(heated("Adapters: share of tokens the gate is closed for", "gate", names, rows))
        rows = [(gate, [_of(gates_of.get(gate), "loudness") for gates_of in held]) for gate in adapters]
        parts.append(heated("Adapters: mean ‖output‖₁ over the width", "gate", names, rows, full=loud or 1.0))
    return parts


def _of(told: object, field: str) -> float | None:
    value = None if told is None else getattr(told, field)
    return None if value is None else float(value)


def heated(
    caption: str,
    corner: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[float | None]]],
    *,
    full: float = 1.0,
) -> Markup:
    """A matrix as a table: every number stands there, shaded by its share of `full`."""
    body = []
    for name, values in rows:
        cells = [
            el(
                "td",
                "" if value is None else f"{value:.3g}",
                class_="number",
                style=f"--v:{0.0 if value is None or full <= 0 else min(1.0, max(0.0, value / full)):.3f}",
            )
            for value in values
        ]
        body.append(el("tr", el("th", name, scope="row"), *cells))
    head = el("tr", el("th", corner, scope="col"), *(el("th", name, scope="col", class_="number") for name in columns))
    held = el("table", el("caption", caption), el("thead", head), el("tbody", *body), class_="heated")
    return el("div", held, class_="box", tabindex=0, role="region", aria_label=caption)
