"""The page's figures of domain gates: where each was open on held-out text when it was fitted."""

from __future__ import annotations

from collections.abc import Sequence

from surgeon.common.page.charts import Bar, bars
from surgeon.common.page.markup import Child, el, figure, pair
from surgeon.report.curves import GateActivity, TrainingRun

_STYLES = {"new": 2, "original": 4}


def gate_figures(runs: Sequence[TrainingRun]) -> list[Child]:
    """Draw the shares of new and of original tokens on which a gate was open, for each run that fitted one."""
    parts: list[Child] = []
    for nth, run in enumerate(runs, 1):
        if run.gate is None:
            continue
        drawn = [_of_text(run.gate, role, nth) for role in _STYLES]
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
        Bar(name, share, f"{share:.1%}", _STYLES[role])
        for name, shares in (*gate.by_length.items(), ("all", gate.shares))
        if (share := shares.get(role)) is not None
    ]
    better = "The higher the more is learned." if role == "new" else "The lower the more is kept."
    return figure(bars(f"Open on {role} text", entries, full=1.0, key=f"gate-{nth}-{role}", cap="100%"), better)
