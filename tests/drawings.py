"""The pictures of docs/pictures that the report's own code draws, written by `python -m tests.drawings`.

It draws the pages of the committed studies anew as well.

operations/<op>.svg is the stack before and after an operation, which a shipped plan did to a tiny model. growth.svg is
such a stack beside what the grown model learns and forgets, from the results of a study.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import surgeon
from surgeon.anatomy.dissect import dissect
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.page.markup import Markup, el
from surgeon.common.page.plots import drawn_lines
from surgeon.lab.reports.history import History, WiderEnd, layer_history, wider_ends
from surgeon.lab.reports.page.stack import drawn_stack, legend_rows
from surgeon.lab.studies.page import frontiers, render
from surgeon.manifest.manifest import OperationEntry
from surgeon.manifest.reading import manifest_of
from tests import tiny
from tests.studies import RESULTS, STUDIES, findings_of
from tests.svg_files import placed, standalone

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"

# The shipped plan that shows each operation.
PLANS = {
    "control_llm": "control-llm",
    "dequantise": "dequantise",
    "domain_gate": "domain-gate",
    "drop_experts": "drop-experts",
    "add_experts": "add-experts",
    "drop_layers": "drop-layers",
    "extract_text": "extract-text",
    "fold_adapters": "fold-adapters",
    "gated_adapters": "neutral-residues",
    "grow_vocabulary": "grow-vocabulary",
    "insert_layers": "opt-deus",
    "merge_adapter": "merge-adapter",
    "merge_branches": "control-llm/merge",
    "mixture_of_control": "mixture-of-control",
    "pad_to": "pad-to",
    "pmoe_experts": "pmoe",
    "stack_layers": "solar",
    "trim_vocabulary": "trim-vocabulary",
    "untie_embeddings": "untie-embeddings",
    "upcycle_experts": "upcycle-experts",
    "widen_attention": "widen-attention",
    "widen_ffn": "widen-ffn",
    "widen_hidden": "widen-hidden",
}
WIDTH = 360.0
# Pixels a unit, where the page has room.
SCALE = 1.3
# The height of a legend's row, and where its words begin.
LEGEND_ROW, LEGEND_WORDS = 20.0, 36.0

PROMISES = {
    "exact": "exact: at birth every logit is the base's, bit for bit",
    "rounding": "rounding: at birth logits are the base's up to rounding",
    "none": "none: the base's function changes",
}
TRAINS = {
    "new": "trains: what is new",
    "all": "trains: every layer",
    "fitted": "trains: what is new; the gate is fitted once, before",
}


# The study of growth.svg, the method whose plan is drawn beside it, and the remedy of what is compared.
STUDY, METHOD = "frontier_en-llama-8m", ("copy", "copied layers, zero-init", "recalled")


@dataclass(frozen=True)
class Operated:
    """The last surgery of a shipped plan on a tiny model."""

    history: History
    ends: tuple[WiderEnd, ...]
    done: OperationEntry


def operated(plan: str) -> Operated:
    """Carry a shipped plan out."""
    with tempfile.TemporaryDirectory() as folder:
        base = tiny.base_for(plan, Path(folder))
        surgeon.apply(plan, str(base), Path(folder) / "out")
        out = CheckpointFolder.open(Path(folder) / "out")
        # This surgery alone: left of it stands its own base, which may be an output itself.
        manifest = manifest_of(out).model_copy(update={"lineage": []})
        history = layer_history(out, manifest)
        ends = wider_ends(out, history, dissect(out.config, out.tensors, out.own))
    return Operated(history, ends, manifest.operations[-1])


@functools.cache
def of_operation(op: str) -> str:
    """The picture of an operation: the stack before and after, what its marks mean, what is exact, what trains."""
    plan = PLANS[op]
    of = operated(plan)
    history, ends, done = of.history, of.ends, of.done
    assert done.op == op
    stack, rows = drawn_stack(history, ends, width=WIDTH), legend_rows(history, ends)
    below = stack.height + 8
    words = [PROMISES[done.promise], TRAINS[done.trains]]
    parts: list[Markup] = [*stack.parts, placed(0, below, drawn_legend(rows))]
    below += LEGEND_ROW * len(rows) + 8
    parts += [
        el("text", line, x=0, y=below + 14 + LEGEND_ROW * nth, class_="label number") for nth, line in enumerate(words)
    ]
    height = below + LEGEND_ROW * len(words)
    title = f"{op}: the stack before and after, by the plan {plan} on a tiny model"
    return standalone(title, f"{stack.summary}; {'; '.join(words)}", (WIDTH, height), *parts, scale=SCALE)


def of_growth() -> str:
    """The README's picture: a stack before and after, beside what it and full fine-tuning learn and forget."""
    plan, method, remedy = METHOD
    of = operated(plan)
    found = findings_of(STUDY)
    # One remedy for both, so that they differ in what trains.
    labels = [f"full fine-tuning, {remedy}", f"{method}, {remedy}"]
    rows = [next(row for row in found.rows if row.label == label) for label in labels]
    (full, own), across, up = frontiers(found, rows)
    # Turned round, the shorter line has its name where the other one is not.
    turned = replace(own, points=own.points[::-1], spread=own.spread[::-1], name="copied layers", style=0)
    compared = [replace(full, name="full fine-tuning", style=0), turned]
    stack, rows = drawn_stack(of.history, of.ends, width=230), legend_rows(of.history, of.ends)
    top, left = 24.0, 256.0
    below = top + stack.height + 6
    beside = [
        f"{found.base}, an English model, learns French;",
        "both replay text that the base wrote, with",
        "the base as teacher; points: learning rates that",
        "no other beats; lines: 95 % over three seeds",
    ]
    size = (575.0, below + LEGEND_ROW * max(len(rows), len(beside)))
    parts = [
        _heading("Before and after", 0),
        placed(0, top, *stack.parts),
        placed(0, below, drawn_legend(rows)),
        _heading("Forgetting against learning: lower right is better", left),
        placed(left, top, drawn_lines(compared, across, up, size=(size[0] - left, stack.height))),
        *(
            el("text", line, x=left + 64, y=below + 14 + LEGEND_ROW * nth, class_="label")
            for nth, line in enumerate(beside)
        ),
    ]
    words = "; ".join(
        f"{one.name}: learned {' '.join(f'{x:.2f}' for x, _ in one.points)}"
        f" and forgot {' '.join(f'{y:.2f}' for _, y in one.points)} nats a token"
        for one in compared
    )
    summary = (
        f"{stack.summary}. On {found.base}, {remedy}, a point for each learning rate that no other beats on both,"
        f" with 95 % intervals over three seeds, lower right is better: {words}"
    )
    return standalone("A model grown by new layers, and what it learns and forgets", summary, size, *parts, scale=SCALE)


def drawn_legend(rows: Sequence[tuple[Markup, str]]) -> Markup:
    """The legend as a part of a picture, `LEGEND_ROW` units a row."""
    drawn = [
        placed(0, LEGEND_ROW * nth, sample, el("text", words, x=LEGEND_WORDS, y=14, class_="label"))
        for nth, (sample, words) in enumerate(rows)
    ]
    return el("g", *drawn, class_="legend")


def _heading(words: str, x: float) -> Markup:
    return el("text", words, x=x, y=14, class_="label number")


def drawings() -> dict[str, str]:
    """Every picture, by its file's name in docs/pictures."""
    return {"growth.svg": of_growth()} | {f"operations/{op}.svg": of_operation(op) for op in PLANS}


if __name__ == "__main__":
    for name, content in drawings().items():
        file = PICTURES / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content, encoding="utf-8")
    for name in STUDIES:
        (RESULTS / name / "comparison.html").write_text(render(findings_of(name)), encoding="utf-8")
