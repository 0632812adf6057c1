"""The page's section on how far the branches of control blocks are apart."""

from __future__ import annotations

from collections.abc import Sequence

from surgeon.common.page.markup import Markup, el, figure, pair, section, table
from surgeon.common.page.plots import Axis, Series, lines, points
from surgeon.report.findings import Findings
from surgeon.report.measurements import Alignment


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
