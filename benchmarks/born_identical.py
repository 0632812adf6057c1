"""Every family × every graft × every interpolator or gate, and × every native operation: born identical, as one page.

    python benchmarks/born_identical.py [--families llama …] [--table grafts natives encoders] [--rows NAME …]

Each cell is a real `surgeon apply` of a plan on a tiny checkpoint of the family (biases, sliding windows, query/key
norms, post-norms, fused projections, tied embeddings where the family has them) and a `surgeon verify` of the output:
prefill and cached decode in bfloat16 and float32, bit by bit. Results go to benchmarks/results/born_identical.md, of
which tables and rows that are not asked for stay as they are; the exit code is 1 where a cell is not what was promised.

Of operations whose output is a class of transformers some promise *rounding*: there a cell that is not identical has
the largest difference of logits, in float32 and in bfloat16, and `verify` has checked it against its bound.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import surgeon
from surgeon.errors import BadInput
from tests import tiny, vocabularies

RESULTS = Path(__file__).resolve().parent / "results"
DTYPES = ("bfloat16", "float32")


def control(kind: str, **more: Any) -> list[dict[str, Any]]:
    """Side branches at two layers, α not ½ so that no symmetry helps."""
    return [{"op": "control_llm", "layers": [1, 4], "interpolator": {"kind": kind, "alpha": 0.3} | more}]


def kinds(section: str, key: str) -> list[str]:
    """Every value that the schema of plans lists for a key."""
    values: list[str] = surgeon.json_schema()["$defs"][section]["properties"][key]["enum"]
    return values


def grafts() -> dict[str, list[dict[str, Any]]]:
    """Operations by the name of their row."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for kind in kinds("Interpolator", "kind"):
        rows[f"concat, {kind}"] = control(kind)
        rows[f"concat, {kind}, learnable"] = control(kind, learnable=True)
    rows["concat, lerp α 1 → 0.5"] = control("lerp", alpha=1.0, inference_alpha=0.5)
    rows["stack"] = [{"op": "control_llm", "layers": [1, 4], "expansion": "stack"}]
    rows["hybrid"] = [{"op": "control_llm", "layers": [1, 3, 4, 5], "expansion": "hybrid"}]
    for gate in kinds("GatedAdapters", "gate"):
        for init in kinds("GatedAdapters", "init"):
            rows[f"adapters, {gate}, {init}"] = [{"op": "gated_adapters", "size": 12, "gate": gate, "init": init}]
    rows["inserted + control + adapters"] = [
        {"op": "insert_layers", "where": {"after": [2]}, "init": {"kind": "ot_fusion"}},
        *control("lerp"),
        {"op": "gated_adapters", "size": 12},
    ]
    rows["adapters, then control on them"] = [{"op": "gated_adapters", "size": 12}, *control("dlerp")]
    for threshold in (0, 3):
        rows[f"slots above {threshold} layers, two"] = [{"op": "pmoe_experts", "threshold": threshold, "slots": 2}]
    rows["slots, then control on them"] = [{"op": "pmoe_experts", "threshold": 2, "slots": 2}, *control("lerp")]
    rows |= states()
    rows["inserted + control + adapters, gated"] = [
        *rows["inserted + control + adapters"],
        {"op": "domain_gate"},
    ]
    rows["all in one plan"] = [
        {"op": "insert_layers", "where": {"after": [2]}, "init": {"kind": "ot_fusion"}},
        *control("dlerp"),
        {"op": "gated_adapters", "size": 12},
        {"op": "pmoe_experts", "slots": 2},
        {"op": "pmoe_experts", "rank": 3},
        {"op": "mixture_of_control", "rank": 4, "top_k": 2},
    ]
    return rows


def states() -> dict[str, list[dict[str, Any]]]:
    """Control states: each gate, each way to share it, and none."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for kind in ("linear", "cosine"):
        for shared in ("all", "by_kind", "none"):
            gate = {"kind": kind, "shared": shared}
            rows[f"control states, {kind} gate, {shared}"] = [{"op": "mixture_of_control", "rank": 4, "gate": gate}]
    token = {"inference": "token"}
    rows["control states, by token"] = [{"op": "mixture_of_control", "rank": 4, "top_k": 3, "routing": token}]
    rows["Parallel Control"] = [{"op": "mixture_of_control", "rank": 4, "top_k": 0}]
    return rows


Row = Callable[[str, Path], str]


def row_of(operations: list[dict[str, Any]], prepare: Callable[[str, Path], None] | None = None) -> Row:
    """A row of operations on a tiny checkpoint, or on what `prepare` makes of the family in `base`."""

    def row(family: str, folder: Path) -> str:
        (prepare or plain)(family, folder)
        return compared(operations, folder)

    return row


def plain(family: str, folder: Path) -> None:
    """A tiny checkpoint."""
    tiny.checkpoint(folder / "base", family)


def tied(family: str, folder: Path) -> None:
    """A checkpoint with tied embeddings."""
    tiny.checkpoint(folder / "base", family, tie_word_embeddings=True)


def grown_by(*operations: dict[str, Any], trained: bool = False) -> Callable[[str, Path], None]:
    """The output of a plan as the base; `trained`: its new tensors have other values."""

    def prepare(family: str, folder: Path) -> None:
        from tests.rework.test_revert import train

        base = tiny.checkpoint(folder / "first", family)
        surgeon.apply(plan_in(folder / "first.yaml", list(operations)), str(base), folder / "base")
        if trained:
            train(folder / "base", seed=1)

    return prepare


def with_tokenizer(family: str, folder: Path) -> None:
    """A checkpoint with a tokenizer, and the texts beside it."""
    vocabularies.byte_level(tiny.checkpoint(folder / "base", family, vocab_size=320))
    vocabularies.write_text(folder / "fr.jsonl", vocabularies.FRENCH, times=5)
    vocabularies.write_text(folder / "en.jsonl", vocabularies.ENGLISH)


def natives() -> dict[str, Row]:
    """Operations whose output is a class of transformers, and what a domain gate stands before."""
    layers = {"op": "insert_layers", "where": {"after": [1, 3]}}
    tokens = {"learn": "fr.jsonl", "count": 12, "keep": "en.jsonl"}
    ungated = {"op": "gated_adapters", "size": 12, "gate": "none", "local_loss": "none"}
    gate = {"op": "domain_gate"}
    return {
        "layers by LESA": row_of([layers | {"init": {"kind": "lesa"}}]),
        "silent layers dropped": row_of(
            [{"op": "drop_layers", "layers": [2, 5]}], grown_by(layers | {"init": {"kind": "copy"}})
        ),
        "trained adapters folded": row_of([{"op": "fold_adapters"}], grown_by(ungated, trained=True)),
        "FFN widened": row_of([{"op": "widen_ffn", "to": 64}]),
        "attention widened": row_of([{"op": "widen_attention", "groups": 2}]),
        "stream widened, twice": row_of([{"op": "widen_hidden", "times": 2}]),
        "embeddings untied": row_of([{"op": "untie_embeddings"}], tied),
        "new tokens": row_of([{"op": "grow_vocabulary", "tokens": tokens}], with_tokenizer),
        "experts beside a shared one": row_of([{"op": "upcycle_experts", "experts": 4}]),
        "copies as experts": row_of([{"op": "upcycle_experts", "form": "copies", "experts": 4}]),
        "layers, gated": row_of([layers | {"init": {"kind": "ot_fusion"}}, gate]),
        "adapters, gated": row_of([ungated, gate]),
        "slots, gated": row_of([{"op": "pmoe_experts", "slots": 2}, gate]),
        "control states, gated": row_of([{"op": "mixture_of_control", "rank": 4, "top_k": 2}, gate]),
    }


def plan_in(path: Path, operations: list[dict[str, Any]]) -> Path:
    """A plan of operations, written."""
    path.write_text(json.dumps({"surgeon": 1, "operations": operations}))
    return path


def compared(operations: list[dict[str, Any]], folder: Path) -> str:
    """The result of `verify` for the operations on the checkpoint `base` in `folder`."""
    base = folder / "base"
    try:
        applied = surgeon.apply(plan_in(folder / "plan.yaml", operations), str(base), folder / "out")
    except BadInput as error:
        return f"refused: {str(error).splitlines()[0].rpartition('): ')[2]}"
    verified = surgeon.verify(base, folder / "out", window=24, windows=2, dtypes=DTYPES)
    promise = applied.manifest.promise
    if promise not in ("exact", "rounding") or not verified.holds:
        return "promise broken"
    assert len(verified.comparisons) >= len(DTYPES)
    if promise == "exact":
        different = [f"{c.mode} {c.dtype}" for c in verified.comparisons if not c.identical]
        return f"promise broken: {', '.join(different)}" if different else "identical"
    if all(c.identical for c in verified.comparisons):
        return "identical"
    worst = {d: max(c.max_abs_difference for c in verified.comparisons if c.dtype == d) for d in DTYPES}
    return f"{worst['float32']:.1e}, {worst['bfloat16']:.1e}"


def table(rows: dict[str, Row], families: list[str]) -> tuple[list[str], bool]:
    """The lines of a table, printed as they come, and whether every cell is what was promised."""
    lines = [f"| operation | {' | '.join(families)} |", "|---" * (len(families) + 1) + "|"]
    reasons: list[str] = []
    holds = True
    for name, row in rows.items():
        cells = []
        for family in families:
            with tempfile.TemporaryDirectory() as folder:
                cell, _, why = row(family, Path(folder)).partition(": ")
            cells.append(cell)
            if why:
                reasons.append(f"- {name}, {family}: {why}")
        holds = holds and not any(cell.startswith("promise") for cell in cells)
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return [*lines, *(["", *reasons] if reasons else [])], holds


TITLES = {
    "grafts": "Grafts:",
    "natives": "Operations whose output is a class of transformers, and domain gates (float32, bfloat16):",
    "encoders": "Encoders (one forward, padding included):",
}


def sections(page: Path) -> dict[str, list[str]]:
    """The lines of each table of an earlier page, by its name."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    found = {}
    for name, title in TITLES.items():
        part = re.search(rf"^{re.escape(title)}\n\n(.*?)(?=\n\n\S[^\n]*:\n\n\||\Z)", text, re.M | re.S)
        if part:
            found[name] = part[1].strip().splitlines()
    return found


def joined(old: list[str], new: list[str], names: list[str]) -> list[str]:
    """A table with the rows of a new one in the place of its own, in the order of `names`, and reasons likewise."""
    head, rows, reasons = new[:2], {}, {}
    for lines in (old, new):
        for name in names:
            if row := [line for line in lines if line.startswith(f"| {name} |")]:
                rows[name] = row
                reasons[name] = [line for line in lines if line.startswith(f"- {name}, ")]
    given = [line for name in names for line in reasons.get(name, ())]
    return [*head, *(line for name in names for line in rows.get(name, ())), *(["", *given] if given else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(tiny.FAMILIES), choices=list(tiny.FAMILIES))
    parser.add_argument("--table", nargs="*", default=list(TITLES), choices=list(TITLES))
    parser.add_argument("--rows", nargs="*", help="of the tables asked for; default: all")
    asked = parser.parse_args()
    rows: dict[str, dict[str, Row]] = {
        "grafts": {name: row_of(operations) for name, operations in grafts().items()}
        | {
            "a slot added to trained ones": row_of(
                [{"op": "pmoe_experts", "rank": 3}], grown_by({"op": "pmoe_experts", "slots": 2}, trained=True)
            )
        },
        "natives": natives(),
        # Encoders route by token, or by the whole sequence.
        "encoders": {name: row_of(operations) for name, operations in states().items()},
    }
    page = RESULTS / "born_identical.md"
    found, all_hold = sections(page), True
    for name in asked.table:
        families = list(tiny.ENCODERS) if name == "encoders" else asked.families
        asked_rows = {row: made for row, made in rows[name].items() if asked.rows is None or row in asked.rows}
        lines, holds = table(asked_rows, families)
        found[name] = joined(found.get(name, []), lines, list(rows[name]))
        all_hold = all_hold and holds
    if asked.families == list(tiny.FAMILIES):
        RESULTS.mkdir(exist_ok=True)
        lines = ["# Born identical: prefill and cached decode, bfloat16 and float32, bit by bit", ""]
        lines += [line for name, title in TITLES.items() if name in found for line in (title, "", *found[name], "")]
        page.write_text("\n".join(lines), encoding="utf-8")
    return int(not all_hold)


if __name__ == "__main__":
    sys.exit(main())
