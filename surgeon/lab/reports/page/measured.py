"""The page's sections on what was measured: transport maps, routers and gates, losses, learning and forgetting.

Transport maps are pictures too: a PNG of a few hundred bytes in the page itself.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence

from surgeon.common.page.charts import Bar, bars, grid
from surgeon.common.page.markup import Child, Markup, el, figure, folded, pair, raw, section, shaded_table, table
from surgeon.common.page.plots import Axis, Series, lines
from surgeon.lab.evaluation.results import SourceScores
from surgeon.lab.reports.curves import GateActivity, TrainingRun, curves_of
from surgeon.lab.reports.findings import Findings, HeatMap, TextLoss
from surgeon.lab.reports.routing_record import RouterPlace, RoutingReport
from surgeon.lab.reports.transport import MapFact

# How many styles there are of lines, and colours of slots.
_STYLES = 6
# How many names one line shows; the table below it has them all.
_MOST_NAMED = 5
_SHORT = {"attention": "attn"}


def transport_section(findings: Findings) -> Markup | None:
    """Entropies and marginal errors of transport maps, and the requested heat maps."""
    maps = findings.maps
    if not maps and not findings.heat_maps:
        return None
    parts: list[Child] = [
        el(
            "p",
            "New layers were fused from their neighbours along transport maps T. The entropy of T, in nats, shows how"
            " widely neurons correspond: at most log(n·m), where every neuron corresponds to every other equally.",
        )
    ]
    if maps:
        parts.append(pair(*_map_bars(maps)))
        rows = [
            (
                m.layer,
                m.module,
                f"{m.entropy:.3f}",
                f"{m.uniform:.3f}",
                f"{m.row_error:.1e}",
                f"{m.column_error:.1e}",
                m.iterations,
                "yes" if m.converged else "NO",
            )
            for m in maps
        ]
        head = ("layer", "module", "entropy", "at most", "row error", "column error", "iterations", "converged")
        parts.append(folded("Every map", table("Transport maps", head, rows, numbers=range(2, 7))))
    if findings.heat_maps:
        images = [figure(heat_figure(m), _map_words(m)) for m in findings.heat_maps]
        parts += [el("h3", "Heat maps"), pair(*images)]
    return section("transport", "Transport maps", *parts)


def _map_words(heat: HeatMap) -> str:
    each = "" if heat.block == 1 else f" A dot is the largest of {heat.block} × {heat.block}."
    return f"{heat.name}. A row shows where a lower neuron's mass goes; colours are logarithmic.{each}"


def _map_bars(maps: Sequence[MapFact]) -> list[Markup]:
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
        figure(
            bars("Mean entropy by module", entropy, full=1.0, key="entropies", cap="log(n·m)"),
            f"Mean over {_each(by_module)}: nats, and share of the largest possible.",
        ),
        figure(
            bars("Largest marginal error by module", error, full=12.0, key="errors", cap="1"),
            f"L1 distance of T's rows and columns from uniform, from 1e-12 (left) to 1, logarithmic; {converged}.",
        ),
    ]


def _each(by_module: Mapping[str, Sequence[MapFact]]) -> str:
    counts = sorted({len(facts) for facts in by_module.values()})
    return f"{' to '.join(map(str, [*counts[:1], *counts[1:][-1:]]))} maps a module"


def routing_section(report: RoutingReport | None) -> Markup | None:
    """PMoE's router, Mixture-of-Control's sites, routed experts and the gates, from the record; None without one."""
    if report is None or not report.texts:
        return None
    parts: list[Child] = [
        el("p", "Recorded on " + ", ".join(f"{name} ({text.tokens:,} tokens)" for name, text in report.texts.items()))
    ]
    if report.router is not None:
        parts += _router(report, report.router)
    if report.sites:
        parts += _mixture(report)
    if report.routed:
        parts += _experts(report)
    if report.gates:
        parts += _gates(report)
    return section("routing", "What routers and gates choose", *parts)


def _router(report: RoutingReport, place: RouterPlace) -> list[Markup]:
    routers = [(name, text.router) for name, text in report.texts.items() if text.router is not None]
    slots = [f"slot {slot}" for slot in range(place.slots)]
    parts = [
        el("h3", f"PMoE's router, above {place.layer} layers"),
        pair(
            shaded_table("Mean weight of each slot", "text", slots, [(name, list(r.mean)) for name, r in routers]),
            shaded_table(
                "Share of tokens by slot of most weight",
                "text",
                slots,
                [(name, list(r.largest)) for name, r in routers],
            ),
        ),
    ]
    for name, router in routers:
        spans = [
            el("span", token.replace("\n", "⏎") or "∅", el("sub", slot), class_=f"t{slot % _STYLES}")
            for token, slot in router.examples
        ]
        parts.append(folded(f"Tokens of {name} by their slot of most weight", el("p", *spans, class_="tokens")))
    return parts


def _mixture(report: RoutingReport) -> list[Markup]:
    names = [f"{layer}.{_SHORT.get(kind, kind)}" for layer, kind in report.sites]
    every = [value for text in report.texts.values() for row in text.states for value in row]
    largest = max(every, default=0.0) or 1.0
    figures = []
    for nth, (name, text) in enumerate(report.texts.items()):
        if text.states:
            most = f"most used: {report.most_used(text, 3)}"
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
                        summary=most,
                    ),
                    f"{name}: {most}.",
                )
            )
    words = (
        "Rows: the site that chooses; columns: the control state. A fuller cell is more of the site's"
        f" weight; a full cell is {largest:.0%}, the largest here."
    )
    return [el("h3", "Control states (Mixture-of-Control)"), el("p", words), pair(*figures)]


def _experts(report: RoutingReport) -> list[Markup]:
    every = [share for text in report.texts.values() for found in text.experts.values() for share in found.tokens]
    largest = max(every, default=0.0) or 1.0
    figures = []
    for nth, (name, text) in enumerate(report.texts.items()):
        if text.experts:
            cells = [found.tokens for found in text.experts.values()]
            unused = sum(found.unused for found in text.experts.values())
            words = f"no token takes {unused} of {sum(map(len, cells))} experts" if unused else "every expert is taken"
            figures.append(
                figure(
                    grid(
                        f"Routed experts taken on {name}",
                        cells,
                        key=f"experts-{nth}",
                        down="layer",
                        across="expert",
                        rows=list(text.experts),
                        columns=[str(expert) for expert in range(max(map(len, cells)))],
                        full=largest,
                        summary=words,
                    ),
                    f"{name}: {words}.",
                )
            )
    words = (
        "Rows: layers; columns: the experts beside its MLP. A fuller cell is an expert that more tokens take; a full"
        f" cell is {largest:.0%} of them, the largest share here."
    )
    return [el("h3", "Routed experts by layer"), el("p", words), pair(*figures)]


def _gates(report: RoutingReport) -> list[Markup]:
    names = list(report.texts)
    by_text = [text.gates for text in report.texts.values()]
    adapters = [gate for gate in report.gates if any(g.get(gate) and g[gate].loudness is not None for g in by_text)]
    shares = [gate for gate in report.gates if gate not in adapters]

    def matrix(caption: str, chosen: Sequence[str], field: str, full: float | None) -> Markup:
        rows = [(gate, [getattr(gates_of.get(gate), field, None) for gates_of in by_text]) for gate in chosen]
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
    return [el("h3", "Gates by layer and text"), pair(*parts)]


def losses_section(losses: Sequence[TextLoss]) -> Markup | None:
    """Show the losses of base and output on the given texts; None where none were measured."""
    if not losses:
        return None
    rows = [
        (
            loss.text,
            "base" if loss.of_base else "output",
            f"{loss.scores.documents:,}",
            f"{loss.scores.tokens:,}",
            *(cell.plain for cell in loss.scores.figures()),
            loss.scores.difference_cell().plain,
        )
        for loss in losses
    ]
    head = ("text", "model", "documents", "tokens", *SourceScores.columns, SourceScores.difference)
    words = (
        "Nothing in this output chooses, so the texts show what it has learned: loss in nats a token, 95 % confidence"
        " over documents in brackets, Δ to the base. As `surgeon evaluate` measures it."
    )
    return section(
        "losses",
        "Losses on texts",
        el("p", words),
        table("Losses of the models on each text", head, rows, numbers=range(2, len(head))),
    )


def curves_section(findings: Findings) -> Markup | None:
    """Losses by source over training, from the given log, else from the manifests: learning and forgetting."""
    curves = findings.curves or curves_of(findings.runs)
    if not curves and not findings.runs:
        return None
    parts: list[Child] = []
    if findings.runs:
        head = ("surgery", "steps", "tokens", "tensors", "held-out losses, before → after")
        rows = [
            (run.surgery, f"{run.steps:,}", f"{run.tokens:,}", len(run.changes), _losses(run)) for run in findings.runs
        ]
        parts.append(table("Training, from the manifests", head, rows, numbers=range(4), words=(4,)))
        parts += [*_changes(findings.runs), *gate_figures(findings.runs)]
    if curves:
        series = [Series(c.source, c.points, nth % _STYLES) for nth, c in enumerate(curves)]
        source = (
            "From the given log."
            if findings.curves
            else "Held-out losses each time that training measured them, one run after the other."
        )
        changes = [
            (c.source, c.points[0][0], f"{first:.4f}", c.points[-1][0], f"{last:.4f}", f"{last - first:+.4f}")
            for c in curves
            for first, last in [(c.points[0][1], c.points[-1][1])]
        ]
        columns = ("source", "first step", "loss", "last step", "loss", "change")
        parts.append(
            pair(
                figure(
                    lines(
                        "Loss by source",
                        series,
                        Axis.over("step", (step for c in curves for step, _ in c.points)),
                        Axis.over("loss, nats a token", (loss for c in curves for _, loss in c.points)),
                        key="curves-lines",
                        height=max(206.0, 12.0 * len(curves) + 70),
                    ),
                    f"{source} Rising: forgetting.",
                ),
                table("First and last losses", columns, changes, numbers=range(1, 6)),
            )
        )
    return section("curves", "Learning and forgetting", *parts)


def _changes(runs: Sequence[TrainingRun]) -> list[Child]:
    """List each run's change of each tensor, and the trained tensors that did not change."""
    parts: list[Child] = []
    for nth, run in enumerate(runs, 1):
        if run.unchanged:
            names = ", ".join(run.unchanged[:_MOST_NAMED])
            more = f" and {len(run.unchanged) - _MOST_NAMED} more" if len(run.unchanged) > _MOST_NAMED else ""
            parts.append(
                el("p", f"Run {nth} trained these tensors without changing them: {names}{more}.", class_="warn")
            )
        rows = [
            (name, f"{largest:.3g}", "was zero" if relative is None else f"{relative:.3g}")
            for name, (largest, relative) in run.changes.items()
        ]
        parts.append(
            folded(
                f"Changes by run {nth}, tensor by tensor",
                table(
                    f"Tensors that trained in run {nth}",
                    ("tensor", "max |Δ|", "‖Δ‖ ÷ ‖before‖"),
                    rows,
                    numbers=(1, 2),
                    words=(0,),
                ),
            )
        )
    return parts


def _losses(run: TrainingRun) -> str:
    return ", ".join(f"{name} {before:.3f} → {after:.3f}" for name, (before, after) in run.losses.items()) or "none"


_OF_ROLES = {"new": 2, "original": 4}


def gate_figures(runs: Sequence[TrainingRun]) -> list[Child]:
    """Draw the shares of new and of original tokens on which a gate was open, for each run that fitted one."""
    parts: list[Child] = []
    for nth, run in enumerate(runs, 1):
        if run.gate is None:
            continue
        drawn = [_of_text(run.gate, role, nth) for role in _OF_ROLES]
        words = (
            f"Run {nth} fitted a domain gate before its first step. Below: the share of held-out tokens on which it was"
            " open, by the number of tokens of the document up to them. Where it is closed from a document's beginning"
            " on, logits are the base's, bit for bit."
        )
        parts += [el("h3", "Domain gate"), el("p", words), pair(*drawn)]
    return parts


def _of_text(gate: GateActivity, role: str, nth: int) -> Child:
    """Bars by length of prefixes on text of one role, and below them all of it."""
    entries = [
        Bar(name, share, f"{share:.1%}", _OF_ROLES[role])
        for name, shares in (*gate.by_length.items(), ("all", gate.shares))
        if (share := shares.get(role)) is not None
    ]
    better = "The higher the more is learned." if role == "new" else "The lower the more is kept."
    return figure(bars(f"Open on {role} text", entries, full=1.0, key=f"gate-{nth}-{role}", cap="100%"), better)


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
