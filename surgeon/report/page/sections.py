"""The page's sections, one for each question of a reader. Empty sections are left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from surgeon.common.formatting import count, size
from surgeon.manifest.manifest import Manifest
from surgeon.operations import papers_of
from surgeon.operations.operation import Paper
from surgeon.report.budget import Budget
from surgeon.report.curves import TrainingRun, curves_of
from surgeon.report.findings import Findings, HeatMap
from surgeon.report.maps import MapFact
from surgeon.report.page.charts import Bar, Series, bars, lines, points
from surgeon.report.page.markup import Child, Markup, el, heat_image, heat_range, join
from surgeon.report.page.markup import lines as text_lines
from surgeon.report.page.stack import legend, origin_words, stack_figure
from surgeon.verify.verify import Verification

_PROMISES = {"exact": "exact", "none": "not preserving"}


_SERIES_STYLES = 6


# How many names one line shows; the table below it has them all.
_MOST_NAMED = 5


def section(key: str, title: str, *children: Child) -> Markup:
    """One section with its heading; the table of contents links to it."""
    return el("section", el("h2", title, id=f"{key}-head"), *children, id=key, aria_labelledby=f"{key}-head")


def figure(drawn: Markup, caption: str) -> Markup:
    """A picture with its caption."""
    return el("figure", drawn, el("figcaption", caption))


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[Child]],
    *,
    numbers: Sequence[int] = (),
    words: Sequence[int] = (),
) -> Markup:
    """A table in a box that scrolls, by keyboard too; columns in `numbers` are right-aligned."""

    def kind(column: int) -> str | None:
        return "number" if column in numbers else "words" if column in words else None

    body = [el("tr", *(el("td", cell, class_=kind(nth)) for nth, cell in enumerate(row))) for row in rows]
    heads = [el("th", name, scope="col", class_=kind(nth)) for nth, name in enumerate(head)]
    held = el("table", el("caption", caption), el("thead", el("tr", *heads)), el("tbody", *body))
    return el("div", held, class_="box", tabindex=0, role="region", aria_label=caption)


def folded(summary: str, *children: Child) -> Markup:
    """Content that opens on a click."""
    return el("details", el("summary", summary), *children)


def headline(findings: Findings) -> Markup:
    """The most important facts, at the top."""
    manifest, history, budget = findings.manifest, findings.history, findings.budget
    state, tone = _state(findings)
    facts: list[tuple[str, Child, str | None]] = [
        ("base", _base_name(manifest, history.surgeries[0]), None),
        ("layers", f"{history.base_layers} → {len(history.layers)}", None),
        ("parameters", count(budget.total), None),
        ("new in the last surgery", f"{count(budget.new)}, {budget.new / max(1, budget.total):.1%}", None),
        ("trainable", count(budget.trainable), None),
        (
            "the base's function at birth",
            _PROMISES[manifest.promise],
            "good" if manifest.promise == "exact" else "warn",
        ),
        ("proof", state, tone),
        ("loads", "without custom code" if manifest.native else "with its own code", None),
    ]
    return el(
        "dl", *(el("div", el("dt", name), el("dd", value, class_=tone)) for name, value, tone in facts), class_="facts"
    )


def _base_name(manifest: Manifest, oldest: Manifest) -> str:
    base = oldest.base if oldest is not manifest else manifest.base
    return base.id + (f"@{base.revision}" if base.revision else "")


def _state(findings: Findings) -> tuple[str, str]:
    verification = findings.verification
    if verification is None:
        return "not run for this report", "warn"
    if not verification.holds:
        if _changed_since_birth(verification):
            return "the base is kept; new tensors changed since birth", "warn"
        return "a promise does not hold", "bad"
    if verification.identical is None:
        trained = ", also after training" if verification.trained else ""
        return f"every static promise holds{trained}", "good"
    if verification.identical:
        return "every logit is bit-identical", "good"
    return "logits differ, as training made them" if verification.trained else "logits differ, as promised", "warn"


# Checks that only training, or an edit of new tensors, makes fail.
_AT_BIRTH = frozenset({"silent at birth", "constants", "new tensors"})


def _changed_since_birth(verification: Verification) -> bool:
    failed = {check.name for check in verification.checks if not check.holds}
    return bool(failed) and failed <= _AT_BIRTH and not verification.comparisons


def stack_section(findings: Findings) -> Markup:
    """Old and new layers, as a picture and as a table."""
    history = findings.history
    rows = [
        (
            layer.index,
            "" if layer.base is None else layer.base,
            origin_words(layer),
            "" if layer.surgery is None else layer.surgery,
            ", ".join(
                f"{mark.text} (surgery {mark.surgery or '?'}{', trains' if mark.trains else ''})"
                for mark in layer.marks
            )
            or "none",
            "yes" if layer.trains else "",
        )
        for layer in reversed(history.layers)
    ]
    return section(
        "stack",
        "The layer stack",
        el(
            "div",
            figure(stack_figure(history), "Left the first base, right this output; the input enters at the bottom."),
            legend(history),
            class_="pair",
        ),
        folded(
            "The stack as a table",
            table(
                "Layers of the output, from the top down",
                ("layer", "base layer", "origin", "made by surgery", "grafts", "own weights train"),
                rows,
                numbers=(0, 1, 3),
                words=(4,),
            ),
        ),
    )


def budget_section(findings: Findings) -> Markup:
    """Parameters by their origin, and the memory that training takes."""
    budget = findings.budget
    parts = [
        Bar("base", budget.base, _share(budget.base, budget), 5),
        *([Bar("earlier", budget.earlier, _share(budget.earlier, budget), 2)] if budget.earlier else []),
        Bar("new", budget.new, _share(budget.new, budget), 0),
        Bar("trainable", budget.trainable, _share(budget.trainable, budget), 1),
    ]
    rows = [
        ("base", count(budget.base), size(2 * budget.base)),
        *([("earlier surgeries", count(budget.earlier), size(2 * budget.earlier))] if budget.earlier else []),
        ("new in the last surgery", count(budget.new), size(2 * budget.new)),
        ("all", count(budget.total), size(budget.weight_bytes)),
        ("trainable", count(budget.trainable), size(2 * budget.trainable)),
    ]
    saved = f"; if everything trained: {size(budget.full_optimiser_bytes)}" if budget.trainable < budget.total else ""
    return section(
        "budget",
        "Parameters and memory",
        el(
            "div",
            figure(
                bars("Parameters by origin", parts, full=budget.total, key="budget-bars"),
                "Shares of all parameters; trainable ones are counted again.",
            ),
            el(
                "div",
                table("Parameters, and bytes in bf16", ("part", "parameters", "bf16"), rows, numbers=(1, 2)),
                el(
                    "p",
                    f"Training with AdamW: {size(budget.gradient_bytes)} of gradients in bf16 and"
                    f" {size(budget.optimiser_bytes)} for its two moments in float32{saved}."
                    f" Stored as {', '.join(findings.dtypes)}: {size(budget.stored_bytes)}."
                    " Activations are not counted.",
                ),
            ),
            class_="pair",
        ),
    )


def _share(number: int, budget: Budget) -> str:
    return (
        f"{number / 1e9:.3g}B" * (number >= 10**9)
        or (f"{number / 1e6:.3g}M" if number >= 10**6 else f"{number:,}") + f" · {number / max(1, budget.total):.1%}"
    )


def operations_section(findings: Findings) -> Markup:
    """The operations of each surgery, their papers, and the plans."""
    history = findings.history
    rows: list[tuple[Child, ...]] = [
        (number, entry.op, entry.matched, _PROMISES[entry.promise], entry.reason, entry.trains)
        for number, manifest in enumerate(history.surgeries, history.first)
        for entry in manifest.operations
    ]
    papers = papers_of(
        (entry.op, [layer.init for layer in m.layers if layer.base is None and layer.operation == number])
        for m in history.surgeries
        for number, entry in enumerate(m.operations)
    )
    plans = [
        folded(f"Plan of surgery {number}", el("pre", text_lines(manifest.plan), tabindex=0))
        for number, manifest in enumerate(history.surgeries, history.first)
    ]
    return section(
        "operations",
        "Operations",
        table(
            "Operations in order",
            ("surgery", "operation", "matched", "base's function", "why", "trains"),
            rows,
            numbers=(0,),
            words=(2, 4),
        ),
        *(
            [el("h3", "Papers"), el("ul", *(el("li", _cited(paper)) for paper in papers), class_="plain")]
            if papers
            else []
        ),
        *plans,
    )


def _cited(paper: Paper) -> Markup:
    first = paper.authors.split(",")[0].split(" and ")[0]
    where = f"arXiv:{paper.arxiv}" if paper.arxiv else paper.venue
    return join(f"{first} et al., ", el("cite", paper.title), f" ({paper.year}). {where}")


def proof_section(findings: Findings) -> Markup:
    """Checks that were run for this page; without a base, the manifest's promise, marked as unchecked."""
    verification, manifest = findings.verification, findings.manifest
    if verification is None:
        promised = {
            "exact": "promises that at birth this output computes what its base computes, bit for bit",
            "none": "says that this output does not keep its base's function",
        }[manifest.promise]
        return section(
            "proof",
            "Preservation",
            el(
                "p",
                "Not checked for this page: no base was given (--base DIR; --verify compares logits too). The manifest",
                f" {promised}. It names {len(manifest.base.tensors)} tensors of the base by digest.",
            ),
        )
    return section("proof", "Preservation", *_verified(verification))


def _verified(verification: Verification) -> list[Markup]:
    rows = [
        (
            el("strong", "holds" if check.holds else "FAILS", class_="good" if check.holds else "bad"),
            check.name,
            check.detail,
        )
        for check in verification.checks
    ]
    parts = [table("Checks of bytes, run for this page", ("", "check", "found"), rows, words=(2,))]
    if _changed_since_birth(verification):
        words = (
            "Every tensor of the base is in its place, byte for byte. New tensors changed since birth: they were"
            " trained or edited by hand, so the promises about birth were not checked again."
        )
        return [*parts, el("p", words)]
    if verification.comparisons:
        compared = [
            (
                c.mode,
                c.dtype,
                f"{c.tokens:,}",
                "yes" if c.identical else "no",
                f"{c.max_abs_difference:.3g}",
                *(
                    ("",) * 4
                    if (f := c.next_token) is None
                    else (f"{f[0]:.3g}", f"{f[1]:.2%}", f"{f[2]:.4f}", f"{f[3]:.4f}")
                ),
            )
            for c in verification.comparisons
        ]
        head = ("mode", "dtype", "tokens", "identical", "max |Δ|", "KL (nats)", "top-1", "base loss", "output loss")
        parts.append(table(f"Logits on {verification.tokens}", head, compared, numbers=range(2, 9)))
    else:
        parts.append(el("p", "Logits were not compared (--verify does)."))
    return parts


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
        parts.append(el("div", *_map_bars(maps), class_="pair"))
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
        images = [el("figure", heat_image(m), el("figcaption", _map_words(m))) for m in findings.heat_maps]
        parts += [el("h3", "Heat maps"), el("div", *images, class_="pair")]
    return section("transport", "Transport maps", *parts)


def _map_words(heat: HeatMap) -> str:
    low, high = heat_range(heat)
    each = "" if heat.block == 1 else f"; a dot is the largest of {heat.block} × {heat.block}"
    return (
        f"{heat.name}: {heat.rows} neurons of the lower layer (down) × {heat.columns} of the upper (across); the share"
        f" of a lower neuron's mass, {low:.2g} (dark) to {high:.2g} (light), logarithmic{each}"
    )


def _map_bars(maps: Sequence[MapFact]) -> list[Markup]:
    by_module: dict[str, list[MapFact]] = {}
    for fact in maps:
        by_module.setdefault(fact.module or "map", []).append(fact)
    means = {module: sum(m.entropy for m in held) / len(held) for module, held in by_module.items()}
    share = {
        module: sum(m.entropy / m.uniform if m.uniform else 1 for m in held) / len(held)
        for module, held in by_module.items()
    }
    entropy = [Bar(module, share[module], f"{means[module]:.2f} · {share[module]:.1%}", 2) for module in by_module]
    worst = {module: max(max(m.row_error, m.column_error) for m in held) for module, held in by_module.items()}
    # Errors span decades: the bar's length is log10 between 1e-12 and 1.
    error = [Bar(module, 12 + math.log10(max(value, 1e-12)), f"{value:.1e}", 4) for module, value in worst.items()]
    stuck = sum(not m.converged for m in maps)
    converged = "all converged" if not stuck else f"{stuck} of {len(maps)} did not converge"
    return [
        figure(
            bars("Mean entropy by module", entropy, full=1.0, key="entropies", cap="log(n·m)"),
            f"Mean over {len(maps) // max(1, len(by_module))} maps a module: nats, and share of the largest possible.",
        ),
        figure(
            bars("Largest marginal error by module", error, full=12.0, key="errors", cap="1"),
            f"L1 distance of T's rows and columns from uniform, from 1e-12 (left) to 1, logarithmic; {converged}.",
        ),
    ]


def spectra_section(findings: Findings) -> Markup | None:
    """Neutral Residues' Figure 3 for this output."""
    held = [s for s in findings.spectra if s.adapter and s.backbone]
    if not held:
        return None

    def mean(rows: Sequence[tuple[float, ...]]) -> list[tuple[float, float]]:
        count = min(map(len, rows))
        span = max(1, count - 1)
        step = max(1, count // 64)
        kept = sorted({*range(0, count, step), count - 1})
        return [(k / span, sum(row[k] for row in rows) / len(rows)) for k in kept]

    adapters, backbone = mean([s.adapter for s in held]), mean([s.backbone for s in held])
    series = [Series("adapters' W_g", adapters, 0), Series("the backbone's W_g in the same layers", backbone, 1)]
    rows = [
        (
            f"{s.layer}{' (branch)' if s.in_branch else ''}",
            len(s.adapter),
            f"{_effective(s.adapter):.1f}",
            len(s.backbone),
            f"{_effective(s.backbone):.1f}",
        )
        for s in held
    ]
    head = ("layer", "adapter's values", "of them effective", "backbone's values", "of them effective")
    return section(
        "spectra",
        "Singular values of gating matrices",
        el(
            "div",
            figure(
                lines(
                    "Singular values of adapters and backbone",
                    series,
                    key="spectra-lines",
                    across="rank, as a share of all",
                    up="σ over the largest",
                    low=0.0,
                    high=1.0,
                ),
                f"Mean over layers {', '.join(str(s.layer) for s in held)}. A spectrum that falls more steeply than the"
                " backbone's has collapsed on few directions (Neutral Residues, Figure 3).",
            ),
            table("Effective values: exp of the entropy of σ² as shares", head, rows, numbers=range(5)),
            class_="pair",
        ),
    )


def _effective(values: tuple[float, ...]) -> float:
    squares = [value * value for value in values]
    total = sum(squares)
    return math.exp(-sum(s / total * math.log(s / total) for s in squares if s > 0))


def alignment_section(findings: Findings) -> Markup | None:
    """How far the branches of control blocks are apart (Control LLM, Figures 3 and 8)."""
    probing = findings.probing
    if probing is None:
        return None
    if not probing.layers:
        return section("alignment", "Alignment of branches", el("p", probing.missing))
    layers = probing.layers
    cosine = [Series("pre-trained and expanded branch", [(a.layer, a.cosine) for a in layers], 0)]
    distance = [
        Series("distance of the branches", [(a.layer, a.distance) for a in layers], 1),
        Series("length of the pre-trained states", [(a.layer, a.norm) for a in layers], 2),
    ]
    last = layers[-1]
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
    rows = [(a.layer, f"{a.cosine:.6f}", f"{a.distance:.4g}", f"{a.norm:.4g}") for a in layers]
    return section(
        "alignment",
        "Alignment of branches",
        el(
            "p",
            f"States of the last token of {len(probing.sentences)} probe sentences (“{probing.sentences[0]}”, Table 6"
            " of Control LLM) in both branches of every control block.",
        ),
        el(
            "div",
            figure(
                lines(
                    "Cosine similarity by layer", cosine, key="alignment-cosine", across="layer", up="cosine", high=1.0
                ),
                "Mean over sentences; 1: the same direction.",
            ),
            figure(
                lines(
                    "Euclidean distance by layer",
                    distance,
                    key="alignment-distance",
                    across="layer",
                    up="length",
                    low=0.0,
                ),
                "Mean over sentences; 0: the branches agree.",
            ),
            figure(flat, f"Layer {last.layer}, both branches on two principal axes of their states."),
            table("Branches by layer", ("layer", "cosine", "distance", "length"), rows, numbers=range(4)),
            class_="pair",
        ),
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
        parts += _changes(findings.runs)
    if curves:
        series = [Series(c.source, c.points, nth % _SERIES_STYLES) for nth, c in enumerate(curves)]
        source = (
            "From the given log."
            if findings.curves
            else "Held-out losses where each training run began and ended, one run after the other."
        )
        changes = [
            (c.source, c.points[0][0], f"{first:.4f}", c.points[-1][0], f"{last:.4f}", f"{last - first:+.4f}")
            for c in curves
            for first, last in [(c.points[0][1], c.points[-1][1])]
        ]
        columns = ("source", "first step", "loss", "last step", "loss", "change")
        parts.append(
            el(
                "div",
                figure(
                    lines("Loss by source", series, key="curves-lines", across="step", up="loss, nats a token"),
                    f"{source} Rising: forgetting.",
                ),
                table("First and last losses", columns, changes, numbers=range(1, 6)),
                class_="pair",
            )
        )
    return section("curves", "Learning and forgetting", *parts)


def _changes(runs: Sequence[TrainingRun]) -> list[Child]:
    """How much each run changed each tensor, and a line for trained tensors that did not change."""
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


def lineage_section(findings: Findings) -> Markup:
    """All surgeries so far, and the version of surgeon that carried out each."""
    manifest = findings.manifest
    rows: list[tuple[Child, ...]] = [
        (nth, ", ".join(a.operations), a.base + (f"@{a.revision}" if a.revision else ""), a.tool, a.sha256[:16])
        for nth, a in enumerate(manifest.lineage, 1)
    ]
    rows.append(
        (
            len(manifest.lineage) + 1,
            ", ".join(entry.op for entry in manifest.operations),
            manifest.base.id + (f"@{manifest.base.revision}" if manifest.base.revision else ""),
            manifest.tool.version,
            "this output",
        )
    )
    return section(
        "lineage",
        "Lineage",
        table(
            "Surgeries, oldest first",
            ("surgery", "operations", "on", "surgeon", "manifest's sha256"),
            rows,
            numbers=(0,),
        ),
        el("p", f"The base of the last surgery, all tensors: sha256 {manifest.base.digest[:16]}…", class_="soft"),
    )
