"""The pictures of docs/pictures that the report's own code draws, written by `python -m tests.drawings`.

It draws the pages of the committed studies anew as well.

operations/<op>.svg is the stack before and after an operation, which a shipped plan did to a tiny model. growth.svg is
such a stack; learned.svg, of its size, is what the demo's ways to learn gained and moved, from README's table. They are
two files, so that they stand side by side on a wide page, and one below the other, legible, on a phone.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import surgeon
from benchmarks import claims
from surgeon.anatomy.dissect import dissect
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.page.markup import Markup, el
from surgeon.common.page.plots import Axis, Series, drawn_lines
from surgeon.lab.reports.history import History, WiderEnd, layer_history, wider_ends
from surgeon.lab.reports.page.stack import drawn_stack, legend_rows
from surgeon.lab.studies.page import render
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
# The size of each of README's two pictures, its scale there, and the height of its heading.
HALF, HALF_SCALE, TOP = (312.0, 330.0), 1.2, 24.0
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


# The plan that is drawn in growth.svg, and README's ways to learn beside it, with their names there.
GROWN = "opt-deus"
WAYS = {
    claims.FULL: "full",
    claims.FULL_KEPT: "full, replay + KL",
    claims.LAYERS_KEPT: "layers, replay + KL",
    claims.GATE: "layers, gated",
}


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
    """The README's first picture: a stack before and after."""
    of = operated(GROWN)
    stack, rows = drawn_stack(of.history, of.ends, width=HALF[0]), legend_rows(of.history, of.ends)
    parts = [
        _heading("Before and after", 0),
        placed(0, TOP, *stack.parts),
        placed(0, TOP + stack.height + 6, drawn_legend(rows)),
    ]
    return standalone("A model grown by new layers", stack.summary, HALF, *parts, scale=HALF_SCALE)


def of_learned() -> str:
    """The README's second picture, beside it: what the demo's ways to learn gained and moved."""
    found = claims.of_demo()
    compared = [
        Series(name, [(-found[words][0], found[words][1])], style, muted=words == claims.FULL)
        for style, (words, name) in enumerate(WAYS.items())
    ]
    across = Axis("French learned, nats a token", 0.28, 0.5)
    up = Axis("KL from the base on its answers", 0.0, 0.05)
    below = HALF[1] - 2 * LEGEND_ROW
    beside = ["SmolLM2-135M-Instruct, one seed;", "lower right is better"]
    parts = [
        _heading("What the demo learned and moved", 0),
        placed(0, TOP, drawn_lines(compared, across, up, size=(HALF[0], below - TOP - 8))),
        *(el("text", line, x=0, y=below + 14 + LEGEND_ROW * nth, class_="label") for nth, line in enumerate(beside)),
    ]
    words = "; ".join(f"{one.name}: learned {x:.3f}, KL {y:.4f}" for one in compared for x, y in one.points)
    summary = f"Of four ways to teach SmolLM2-135M-Instruct French (nats a token), one seed: {words}"
    return standalone("What ways of learning gain and keep", summary, HALF, *parts, scale=HALF_SCALE)


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
    return {"growth.svg": of_growth(), "learned.svg": of_learned()} | {
        f"operations/{op}.svg": of_operation(op) for op in PLANS
    }


if __name__ == "__main__":
    for name, content in drawings().items():
        file = PICTURES / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content, encoding="utf-8")
    for name in STUDIES:
        (RESULTS / name / "comparison.html").write_text(render(findings_of(name)), encoding="utf-8")
