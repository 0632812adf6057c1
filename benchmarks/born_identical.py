"""Every family × every graft × every interpolator or gate: born identical, as one table.

    python benchmarks/born_identical.py [--families llama …]

Each cell is a real `surgeon apply` of a plan on a tiny checkpoint of the family (biases, sliding windows, query/key
norms, post-norms, fused projections, tied embeddings where the family has them) and a `surgeon verify` of the output:
prefill and cached decode in bfloat16 and float32, bit by bit. Results go to benchmarks/results/born_identical.md;
the exit code is 1 where a cell is not identical.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import surgeon
from surgeon.families import FAMILIES
from surgeon.runtime.adapters_rules import GATES, VARIANCES
from surgeon.runtime.known import INTERPOLATORS
from tests import tiny

RESULTS = Path(__file__).resolve().parent / "results"
DTYPES = ("bfloat16", "float32")


def control(kind: str, **more: Any) -> list[dict[str, Any]]:
    """Side branches at two layers, α not ½ so that no symmetry helps."""
    return [{"op": "control_llm", "layers": [1, 4], "interpolator": {"kind": kind, "alpha": 0.3} | more}]


def grafts() -> dict[str, list[dict[str, Any]]]:
    """Operations by the name of their row."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for kind in INTERPOLATORS:
        rows[f"concat, {kind}"] = control(kind)
        rows[f"concat, {kind}, learnable"] = control(kind, learnable=True)
    rows["concat, lerp α 1 → 0.5"] = control("lerp", alpha=1.0, inference_alpha=0.5)
    rows["stack"] = [{"op": "control_llm", "layers": [1, 4], "expansion": "stack"}]
    rows["hybrid"] = [{"op": "control_llm", "layers": [1, 3, 4, 5], "expansion": "hybrid"}]
    for gate in GATES:
        for init in VARIANCES:
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


def next_slot(family: str, folder: Path) -> str:
    """A slot added, by its mass, to a model whose first slots were trained: `identical`, or what differs."""
    from tests.end_to_end.test_revert import train

    base = tiny.checkpoint(folder / "first", family)
    plan = folder / "first.yaml"
    plan.write_text(json.dumps({"surgeon": 1, "operations": [{"op": "pmoe_experts", "slots": 2}]}))
    surgeon.apply(plan, str(base), folder / "base")
    train(folder / "base", seed=1)
    return compared([{"op": "pmoe_experts", "rank": 3}], folder)


def cell(family: str, operations: list[dict[str, Any]], folder: Path) -> str:
    """`identical`, or what differs."""
    tiny.checkpoint(folder / "base", family)
    return compared(operations, folder)


def compared(operations: list[dict[str, Any]], folder: Path) -> str:
    """The result of `verify` for the operations on the checkpoint `base` in `folder`."""
    base, plan = folder / "base", folder / "plan.yaml"
    plan.write_text(json.dumps({"surgeon": 1, "operations": operations}))
    applied = surgeon.apply(plan, str(base), folder / "out")
    verified = surgeon.verify(base, folder / "out", window=24, windows=2, dtypes=DTYPES)
    if applied.manifest.promise != "exact" or not verified.holds:
        return "promise broken"
    different = [f"{c.mode} {c.dtype}" for c in verified.comparisons if not c.identical]
    assert len(verified.comparisons) >= len(DTYPES)
    return ", ".join(different) or "identical"


def table(rows: dict[str, Callable[[str, Path], str]], families: list[str]) -> tuple[list[str], bool]:
    """The lines of a table, printed as they come, and whether every cell is identical."""
    lines = [f"| graft | {' | '.join(families)} |", "|---" * (len(families) + 1) + "|"]
    holds = True
    for name, row in rows.items():
        cells = []
        for family in families:
            with tempfile.TemporaryDirectory() as folder:
                cells.append(row(family, Path(folder)))
        holds = holds and set(cells) == {"identical"}
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines, holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    families = parser.parse_args().families

    def row(operations: list[dict[str, Any]]) -> Callable[[str, Path], str]:
        return lambda family, folder: cell(family, operations, folder)

    rows = {name: row(operations) for name, operations in grafts().items()}
    rows["a slot added to trained ones"] = next_slot
    lines, holds = table(rows, families)
    if families != list(FAMILIES):
        return int(not holds)
    # Encoders route by token, or by the whole sequence.
    encoded, all_hold = table({name: row(operations) for name, operations in states().items()}, list(tiny.ENCODERS))
    RESULTS.mkdir(exist_ok=True)
    head = "# Born identical: prefill and cached decode, bfloat16 and float32, bit by bit"
    encoders = "Encoders (one forward, padding included):"
    (RESULTS / "born_identical.md").write_text("\n".join([head, "", *lines, "", encoders, "", *encoded, ""]))
    return int(not (holds and all_hold))


if __name__ == "__main__":
    sys.exit(main())
