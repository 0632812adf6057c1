"""The report as one HTML file that needs no network: its sections in order, and those on what surgeries did."""

from __future__ import annotations

from surgeon.common.formatting import at_revision, count, size
from surgeon.common.page.charts import Bar, bars
from surgeon.common.page.document import document, facts
from surgeon.common.page.markup import Child, Markup, el, figure, folded, join, pair, section, table
from surgeon.common.page.markup import lines as text_lines
from surgeon.common.promises import CONDITION, PROMISE_STYLES
from surgeon.lab.reports.findings import Findings
from surgeon.lab.reports.history import Budget
from surgeon.lab.reports.page.alignment import alignment_section, spectra_section
from surgeon.lab.reports.page.measured import (
    curves_section,
    losses_section,
    routing_section,
    transport_section,
)
from surgeon.lab.reports.page.stack import legend, origin_words, stack_figure
from surgeon.operations import papers_of
from surgeon.operations.operation import Paper
from surgeon.verification.verification import Verification

_PROMISES = {promise: words.plain for promise, words in PROMISE_STYLES.items()}
_BF16_BYTES = 2
# Checks that only training, or an edit of new tensors, makes fail.
_AT_BIRTH = frozenset({"silent at birth", "constants", "new tensors"})


def render(findings: Findings) -> str:
    """The page as HTML."""
    sections = {
        "stack": ("Layers", stack_section(findings)),
        "budget": ("Memory", budget_section(findings)),
        "operations": ("Operations", operations_section(findings)),
        "proof": ("Preservation", proof_section(findings)),
        "transport": ("Transport", transport_section(findings)),
        "routing": ("Routing and gates", routing_section(findings.routing)),
        "losses": ("Losses", losses_section(findings.losses)),
        "spectra": ("Singular values", spectra_section(findings)),
        "alignment": ("Alignment", alignment_section(findings)),
        "curves": ("Learning", curves_section(findings)),
        "lineage": ("Lineage", lineage_section(findings)),
    }
    surgeries = len(findings.manifest.lineage) + 1
    top = (
        el("h1", findings.name),
        el(
            "p",
            f"{findings.model_type}, after {surgeries} {'surgery' if surgeries == 1 else 'surgeries'} by surgeon",
            class_="soft",
        ),
        headline(findings),
        *(el("p", note, class_="warn") for note in findings.notes),
    )
    return document(f"{findings.name}: surgeon's report", "report", top, sections)


def headline(findings: Findings) -> Markup:
    """The most important facts, at the top."""
    manifest, history, budget = findings.manifest, findings.history, findings.budget
    oldest = history.lineage.surgeries[0].base
    state, tone = _state(findings)
    shown: list[tuple[str, Child, str | None]] = [
        ("base", at_revision(oldest.id, oldest.revision), None),
        ("layers", f"{history.base_layers} → {len(history.layers)}", None),
        ("parameters", count(budget.total), None),
        ("new in the last surgery", f"{count(budget.new)}, {budget.new / max(1, budget.total):.1%}", None),
        ("trainable", count(budget.trainable), None),
        (
            "the base's function at birth",
            _PROMISES[manifest.promise],
            "warn" if manifest.promise == "none" else "good",
        ),
        ("proof", state, tone),
        ("loads", "with its own code" if manifest.code else "without custom code", None),
    ]
    return facts(shown)


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
    if verification.promise == "rounding" and not verification.trained:
        return "logits differ by rounding alone", "good"
    return "logits differ, as training made them" if verification.trained else "logits differ, as promised", "warn"


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
        pair(
            figure(
                stack_figure(history, findings.ends),
                "Left the first base, right this output; the input enters at the bottom.",
            ),
            legend(history, findings.ends),
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
        ("base", count(budget.base), size(_BF16_BYTES * budget.base)),
        *([("earlier surgeries", count(budget.earlier), size(_BF16_BYTES * budget.earlier))] if budget.earlier else []),
        ("new in the last surgery", count(budget.new), size(_BF16_BYTES * budget.new)),
        ("all", count(budget.total), size(_BF16_BYTES * budget.total)),
        ("trainable", count(budget.trainable), size(_BF16_BYTES * budget.trainable)),
    ]
    saved = f" ({size(budget.optimizer_bytes_of_all)} if everything trained)" if budget.trainable < budget.total else ""
    return section(
        "budget",
        "Parameters and memory",
        pair(
            figure(
                bars("Parameters by origin", parts, full=budget.total, key="budget-bars"),
                "Shares of all parameters; trainable ones are counted again.",
            ),
            el(
                "div",
                table("Parameters, and bytes in bf16", ("part", "parameters", "bf16"), rows, numbers=(1, 2)),
                el(
                    "p",
                    f"Training as stored: {size(budget.gradient_bytes)} of gradients and"
                    f" {size(budget.optimizer_bytes)} of AdamW's state{saved}: two moments in float32, and a float32"
                    " master of what is narrower."
                    f" Stored as {', '.join(findings.dtypes)}: {size(budget.stored_bytes)}."
                    " Activations are not counted.",
                ),
            ),
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
        for number, manifest in history.surgeries.items()
        for entry in manifest.operations
    ]
    papers = papers_of(
        (entry.op, [layer.init for layer in m.layers if layer.base is None and layer.operation == number])
        for m in history.surgeries.values()
        for number, entry in enumerate(m.operations)
    )
    plans = [
        folded(f"Plan of surgery {number}", el("pre", text_lines(manifest.plan), tabindex=0))
        for number, manifest in history.surgeries.items()
    ]
    return section(
        "operations",
        "Operations",
        table(
            "Operations in order",
            ("surgery", "operation", "matched", "base's function at birth", "why", "trains"),
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
            "exact": f"promises that at birth this output computes what its base computes, bit for bit, {CONDITION}",
            "rounding": "promises that at birth this output computes what its base computes, up to rounding",
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
            el(
                "strong",
                "note" if check.note else "holds" if check.holds else "FAILS",
                class_="warn" if check.note else "good" if check.holds else "bad",
            ),
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


def lineage_section(findings: Findings) -> Markup:
    """All surgeries so far, and the version of surgeon that carried out each."""
    manifest = findings.manifest
    rows: list[tuple[Child, ...]] = [
        (
            nth,
            ", ".join(entry.op for entry in surgery.operations) or "training",
            at_revision(surgery.base.id, surgery.base.revision),
            surgery.tool.version,
            surgery.sha256[:16],
        )
        for nth, surgery in enumerate((*manifest.lineage, manifest), 1)
    ]
    return section(
        "lineage",
        "Lineage",
        table(
            "Surgeries, oldest first",
            ("surgery", "operations", "on", "surgeon", "manifest's sha256"),
            rows,
            numbers=(0,),
        ),
        el("p", f"The digest of the last surgery's base: {manifest.base_digest}", class_="soft"),
    )
