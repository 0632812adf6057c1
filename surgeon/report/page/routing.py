"""The choices of routers and gates, text by text: matrices, and tokens coloured by their slot."""

from __future__ import annotations

from collections.abc import Sequence

from surgeon.report.page.charts import grid
from surgeon.report.page.markup import Child, Markup, el
from surgeon.report.page.sections import figure, folded, section
from surgeon.report.routing_record import RoutingReport, TextChoices

_COLOURS = 6


_SHORT = {"attention": "attn"}


def routing_section(report: RoutingReport | None) -> Markup | None:
    """PMoE's router, Mixture-of-Control's sites and the gates, from the record; None without one."""
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
    routers = [(name, text.router) for name, text in report.texts.items() if text.router is not None]
    slots = [f"slot {slot}" for slot in range(report.slots)]
    parts = [
        el("h3", f"PMoE's router, above {report.router_layer} layers"),
        el(
            "div",
            shaded_table("Mean weight of each slot", "text", slots, [(name, list(r.mean)) for name, r in routers]),
            shaded_table(
                "Share of tokens by slot of most weight",
                "text",
                slots,
                [(name, list(r.largest)) for name, r in routers],
            ),
            class_="pair",
        ),
    ]
    for name, router in routers:
        spans = [
            el("span", _token(token), el("sub", slot), class_=f"t{slot % _COLOURS}") for token, slot in router.examples
        ]
        parts.append(folded(f"Tokens of {name} by their slot of most weight", el("p", *spans, class_="tokens")))
    return parts


def _token(token: str) -> str:
    return token.replace("\n", "⏎") or "∅"


def _mixture(report: RoutingReport) -> list[Markup]:
    names = [f"{layer}.{_SHORT.get(kind, kind)}" for layer, kind in report.sites]
    every = [value for text in report.texts.values() for row in text.states for value in row]
    largest = max(every, default=0.0) or 1.0
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
                        across="control state",
                        rows=names,
                        columns=names,
                        full=largest,
                        summary=_most_used(report, text),
                    ),
                    f"{name}: {_most_used(report, text)}.",
                )
            )
    words = (
        "Rows: the site that chooses; columns: the control state. A fuller cell is more of the site's"
        f" weight; a full cell is {largest:.0%}, the largest here."
    )
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
    adapters = [gate for gate in gates if any(g.get(gate) and g[gate].loudness is not None for g in held)]
    shares = [gate for gate in gates if gate not in adapters]

    def matrix(caption: str, chosen: Sequence[str], field: str, full: float | None) -> Markup:
        rows = [(gate, [_of(gates_of.get(gate), field) for gates_of in held]) for gate in chosen]
        largest = max((value for _, values in rows for value in values if value is not None), default=1.0)
        return shaded_table(caption, "gate", names, rows, full=full or largest)

    parts = []
    if adapters:
        parts += [
            matrix("Adapters: mean of the gate", adapters, "mean", None),
            matrix("Adapters: share of tokens with a closed gate", adapters, "closed", 1.0),
            matrix("Adapters: mean ‖output‖₁ over the width", adapters, "loudness", None),
        ]
    if shares:
        parts.append(matrix("Interpolators: mean α, the expanded branch's share", shares, "mean", 1.0))
    return [el("h3", "Gates by layer and text"), el("div", *parts, class_="pair")]


def _of(record: object, field: str) -> float | None:
    value = None if record is None else getattr(record, field)
    return None if value is None else float(value)


def shaded_table(
    caption: str,
    corner: str,
    columns: Sequence[str],
    rows: Sequence[tuple[str, Sequence[float | None]]],
    *,
    full: float = 1.0,
) -> Markup:
    """A matrix as a table of numbers, each shaded by its share of `full`."""
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
