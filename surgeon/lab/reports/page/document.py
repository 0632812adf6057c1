"""The report as one HTML file that needs no network, made from the template report.html."""

from __future__ import annotations

from pathlib import Path

from surgeon.common.page.document import rendered
from surgeon.common.promises import CONDITION, PROMISE_STYLES
from surgeon.lab.reports.findings import Findings
from surgeon.lab.reports.history import History
from surgeon.lab.reports.page import measured
from surgeon.lab.reports.page.stack import legend, origin_words, stack_figure
from surgeon.operations import papers_of
from surgeon.operations.operation import Paper
from surgeon.verification.verification import Verification

_TEMPLATE = Path(__file__).with_name("report.html")
# Checks that fail only after training, or after an edit of new tensors.
_AT_BIRTH = frozenset({"silent at birth", "constants", "new tensors"})


def render(findings: Findings) -> str:
    """Return the page as HTML."""
    history, verification = findings.history, findings.verification
    return rendered(
        _TEMPLATE,
        found=findings,
        promises={promise: words.plain for promise, words in PROMISE_STYLES.items()},
        condition=CONDITION,
        proof_state=_state(verification),
        changed_since_birth=verification is not None and _changed_since_birth(verification),
        stack_figure=stack_figure(history, findings.ends),
        legend=legend(history, findings.ends),
        origin_words=origin_words,
        papers=_papers(history),
        draw=measured,
        zip=zip,
    )


def _state(verification: Verification | None) -> tuple[str, str]:
    """Return (a short text about what was proven, its tone: good, warn or bad)."""
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
    """Return whether only checks of the state at birth fail, and no logits were compared."""
    failed = {check.name for check in verification.checks if not check.holds}
    return bool(failed) and failed <= _AT_BIRTH and not verification.comparisons


def _papers(history: History) -> list[Paper]:
    """Return the papers of all operations, given the inits of the layers that each operation made."""
    return papers_of(
        (entry.op, [layer.init for layer in m.layers if layer.base is None and layer.operation == number])
        for m in history.surgeries.values()
        for number, entry in enumerate(m.operations)
    )
