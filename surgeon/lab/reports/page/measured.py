"""Figures of measurements for the template measured.html: maps, routers and gates, weights, states, learning.

Each figure has a caption. Transport maps are PNGs of a few hundred bytes, embedded in the page.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence

from surgeon.common.page.charts import Bar, bars, grid
from surgeon.common.page.markup import Markup, raw
from surgeon.common.page.plots import Axis, Series, lines, points
from surgeon.lab.reports.curves import Curve, GateActivity
from surgeon.lab.reports.findings import HeatMap
from surgeon.lab.reports.measurements import Alignment, Spectrum
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


def complete(spectra: Iterable[Spectrum]) -> list[Spectrum]:
    """Return the spectra for which both matrices have singular values."""
    return [s for s in spectra if s.adapter and s.backbone]


def spectra_lines(spectra: Sequence[Spectrum]) -> Markup:
    """Draw the singular values of adapters and backbone, averaged over layers (Neutral Residues, Figure 3)."""
    return lines(
        "Singular values of adapters and backbone",
        [
            Series("adapters' W_g", _mean([s.adapter for s in spectra]), 0),
            Series("backbone's W_g", _mean([s.backbone for s in spectra]), 1),
        ],
        Axis("rank, as a share of all", 0.0, 1.0),
        Axis("σ over the largest", 0.0, 1.0),
        key="spectra-lines",
    )


def _mean(rows: Sequence[tuple[float, ...]]) -> list[tuple[float, float]]:
    """Return (rank as a share of all ranks, mean value) of spectra; about 64 points of long spectra."""
    count = min(map(len, rows))
    span = max(1, count - 1)
    kept = sorted({*range(0, count, max(1, count // 64)), count - 1})
    return [(k / span, sum(row[k] for row in rows) / len(rows)) for k in kept]


def effective(values: tuple[float, ...]) -> float:
    """Return the effective number of singular values: exp of the entropy of the normalised σ²."""
    squares = [value * value for value in values]
    total = sum(squares)
    return math.exp(-sum(s / total * math.log(s / total) for s in squares if s > 0))


def alignment(layers: Sequence[Alignment]) -> list[Captioned]:
    """Draw the distances between the branches of control blocks (Control LLM, Figures 3 and 8)."""
    across = Axis.over("layer", (a.layer for a in layers))
    last = layers[-1]
    return [
        (
            lines(
                "Cosine similarity by layer",
                [Series("", [(a.layer, a.cosine) for a in layers], 0)],
                across,
                Axis.over("cosine", (a.cosine for a in layers), high=1.0),
                key="alignment-cosine",
                summary="; ".join(f"layer {a.layer}: {a.cosine:.6f}" for a in layers),
            ),
            "Mean over sentences; 1: the same direction.",
        ),
        (
            lines(
                "Euclidean distance by layer",
                [
                    Series("between branches", [(a.layer, a.distance) for a in layers], 1),
                    Series("pre-trained states", [(a.layer, a.norm) for a in layers], 2),
                ],
                across,
                Axis.over("length", [length for a in layers for length in (a.distance, a.norm)], low=0.0),
                key="alignment-distance",
            ),
            "Mean over sentences; 0: the branches agree. For scale, the length of the pre-trained states.",
        ),
        (
            points(
                f"Final tokens' states of layer {last.layer}, both branches",
                [
                    ("pre-trained", [(x, y) for x, y, _, _ in last.points], 0),
                    ("expanded", [(x, y) for _, _, x, y in last.points], 4),
                ],
                key="alignment-points",
                across="first principal component",
                up="second",
                summary=f"{len(last.points)} sentences; a line joins the two states of one; mean distance"
                f" {last.distance:.3g}",
                links=last.points,
            ),
            f"Layer {last.layer}, both branches on two principal axes of their states.",
        ),
    ]


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


# Colours from the least mass (dark) to the most (light): readable on dark and light backgrounds, and in grey.
_STOPS = ((20, 20, 60), (60, 60, 140), (40, 130, 140), (90, 190, 110), (250, 230, 60))
COLOURS = ",".join(f"rgb{stop}" for stop in _STOPS)


def heat_png(heat: HeatMap) -> Markup:
    """Encode a map as a PNG with logarithmic colours, from `heat_range`'s lower to its upper value."""
    low, high = heat_range(heat)
    pixels = b"".join(b"\0" + b"".join(_colour(value, low, high) for value in row) for row in heat.cells)
    width = len(heat.cells[0]) if heat.cells else 1
    return raw(base64.b64encode(_png(pixels, width, max(1, len(heat.cells)))).decode("ascii"))


def heat_range(heat: HeatMap) -> tuple[float, float]:
    """Return (value of the darkest colour, value of the lightest): the smallest positive cell and the largest cell.

    The darkest is at least a millionth of the lightest.
    """
    values = [value for row in heat.cells for value in row if value > 0]
    high = max(values, default=1.0)
    return max(min(values, default=high), high * 1e-6), high


def _colour(value: float, low: float, high: float) -> bytes:
    """Return the RGB bytes of a value between `low` (dark) and `high` (light), on a logarithmic scale."""
    share = 0.0 if value <= low else 1.0 if value >= high else math.log(value / low) / math.log(high / low)
    at = min(share, 1.0) * (len(_STOPS) - 1)
    low = min(int(at), len(_STOPS) - 2)
    return bytes(round(a + (b - a) * (at - low)) for a, b in zip(_STOPS[low], _STOPS[low + 1], strict=True))


def _png(pixels: bytes, width: int, height: int) -> bytes:
    """Encode RGB rows, each with a filter byte before it, as a PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        """Return a PNG chunk: length, kind, data and checksum."""
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(pixels, 9)) + chunk(b"IEND", b"")
