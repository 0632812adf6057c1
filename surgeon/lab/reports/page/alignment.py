"""The page's sections on weights and states: singular values, and how far the branches of control blocks are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

from surgeon.common.page.markup import Markup, el, figure, pair, section, table
from surgeon.common.page.plots import Axis, Series, lines, points
from surgeon.lab.reports.findings import Findings
from surgeon.lab.reports.measurements import Alignment


def alignment_section(findings: Findings) -> Markup | None:
    """Show how far the branches of control blocks are apart (Control LLM, Figures 3 and 8)."""
    probing = findings.probing
    if probing is None:
        return None
    if not probing.layers:
        return section("alignment", "Alignment of branches", el("p", probing.missing))
    layers = probing.layers
    rows = [(a.layer, f"{a.cosine:.6f}", f"{a.distance:.4g}", f"{a.norm:.4g}") for a in layers]
    return section(
        "alignment",
        "Alignment of branches",
        el(
            "p",
            f"States of the last token of {len(probing.sentences)} probe sentences (“{probing.sentences[0]}”, Table 6"
            " of Control LLM) in both branches of every control block.",
        ),
        pair(
            *_alignment_lines(layers),
            _alignment_points(layers[-1]),
            table("Branches by layer", ("layer", "cosine", "distance", "length"), rows, numbers=range(4)),
        ),
    )


def _alignment_lines(layers: Sequence[Alignment]) -> list[Markup]:
    """Draw cosine and distance of the branches over the layers."""
    across = Axis.over("layer", (a.layer for a in layers))
    distance = [
        Series("between branches", [(a.layer, a.distance) for a in layers], 1),
        Series("pre-trained states", [(a.layer, a.norm) for a in layers], 2),
    ]
    lengths = [length for one in distance for _, length in one.points]
    return [
        figure(
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
        figure(
            lines(
                "Euclidean distance by layer",
                distance,
                across,
                Axis.over("length", lengths, low=0.0),
                key="alignment-distance",
            ),
            "Mean over sentences; 0: the branches agree. For scale, the length of the pre-trained states.",
        ),
    ]


def _alignment_points(last: Alignment) -> Markup:
    """Draw the states of the last layer in both branches."""
    flat = points(
        f"Final tokens' states of layer {last.layer}, both branches",
        [
            ("pre-trained", [(x, y) for x, y, _, _ in last.points], 0),
            ("expanded", [(x, y) for _, _, x, y in last.points], 4),
        ],
        key="alignment-points",
        across="first principal component",
        up="second",
        summary=f"{len(last.points)} sentences; a line joins the two states of one; mean distance {last.distance:.3g}",
        links=last.points,
    )
    return figure(flat, f"Layer {last.layer}, both branches on two principal axes of their states.")


def spectra_section(findings: Findings) -> Markup | None:
    """Neutral Residues' Figure 3 for this output."""
    spectra = [s for s in findings.spectra if s.adapter and s.backbone]
    if not spectra:
        return None

    def mean(rows: Sequence[tuple[float, ...]]) -> list[tuple[float, float]]:
        count = min(map(len, rows))
        span = max(1, count - 1)
        step = max(1, count // 64)
        kept = sorted({*range(0, count, step), count - 1})
        return [(k / span, sum(row[k] for row in rows) / len(rows)) for k in kept]

    adapters, backbone = mean([s.adapter for s in spectra]), mean([s.backbone for s in spectra])
    series = [Series("adapters' W_g", adapters, 0), Series("backbone's W_g", backbone, 1)]
    rows = [
        (
            f"{s.layer}{' (branch)' if s.in_branch else ''}",
            len(s.adapter),
            f"{_effective(s.adapter):.1f}",
            len(s.backbone),
            f"{_effective(s.backbone):.1f}",
        )
        for s in spectra
    ]
    head = ("layer", "adapter's values", "of them effective", "backbone's values", "of them effective")
    return section(
        "spectra",
        "Singular values of gating matrices",
        pair(
            figure(
                lines(
                    "Singular values of adapters and backbone",
                    series,
                    Axis("rank, as a share of all", 0.0, 1.0),
                    Axis("σ over the largest", 0.0, 1.0),
                    key="spectra-lines",
                ),
                f"Mean over layers {', '.join(str(s.layer) for s in spectra)}, the backbone's of the same. A"
                " spectrum that falls more steeply than"
                " the backbone's has collapsed on few directions (Neutral Residues, Figure 3).",
            ),
            table("Effective values: exp of the entropy of σ² as shares", head, rows, numbers=range(5)),
        ),
    )


def _effective(values: tuple[float, ...]) -> float:
    squares = [value * value for value in values]
    total = sum(squares)
    return math.exp(-sum(s / total * math.log(s / total) for s in squares if s > 0))
