"""Every family × every graft × every interpolator or gate: born identical, as one table.

    python benchmarks/born_identical.py [--families llama …]

Each cell is a real `surgeon apply` of a plan on a tiny checkpoint of the family (biases, sliding windows, query/key
norms, post-norms, fused projections, tied embeddings as the family has them) and a `surgeon verify` of the output:
prefill and cached decode in bfloat16 and float32, bit by bit. Results go to benchmarks/results/born_identical.md;
the exit code is 1 where a cell is not identical.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from surgeon import api
from surgeon.families import FAMILIES
from tests import tiny

RESULTS = Path(__file__).resolve().parent / "results"
DTYPES = ("bfloat16", "float32")
SCALAR = ("lerp", "plerp", "slerp", "proj")


def control(kind: str, **more: Any) -> list[dict[str, Any]]:
    """Side branches at two layers, α not ½ so that no symmetry helps."""
    return [{"op": "control_llm", "layers": [1, 4], "interpolator": {"kind": kind, "alpha": 0.3} | more}]


def grafts() -> dict[str, list[dict[str, Any]]]:
    """Operations by the name of their row."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for kind in ("lerp", "dlerp", "dlerp_in", "moe", "plerp", "slerp", "proj"):
        rows[f"concat, {kind}"] = control(kind)
        rows[f"concat, {kind}, learnable"] = control(kind, learnable=True)
    rows["concat, lerp α 1 → 0.5"] = control("lerp", alpha=1.0, inference_alpha=0.5)
    rows["stack"] = [{"op": "control_llm", "layers": [1, 4], "expansion": "stack"}]
    rows["hybrid"] = [{"op": "control_llm", "layers": [1, 3, 4, 5], "expansion": "hybrid"}]
    for gate in ("relu", "sigmoid", "none"):
        for init in ("low_variance", "he"):
            rows[f"adapters, {gate}, {init}"] = [{"op": "gated_adapters", "size": 12, "gate": gate, "init": init}]
    rows["inserted + control + adapters"] = [
        {"op": "insert_layers", "where": {"after": [2]}, "init": {"kind": "ot_fusion"}},
        *control("lerp"),
        {"op": "gated_adapters", "size": 12},
    ]
    rows["adapters, then control on them"] = [{"op": "gated_adapters", "size": 12}, *control("dlerp")]
    return rows


def cell(family: str, operations: list[dict[str, Any]], folder: Path) -> str:
    """`identical`, or what differs."""
    base = tiny.checkpoint(folder / "base", family)
    plan = folder / "plan.yaml"
    plan.write_text(json.dumps({"surgeon": 1, "operations": operations}))
    applied = api.apply(plan, str(base), folder / "out")
    verified = api.verify(base, folder / "out", window=24, windows=2, dtypes=DTYPES)
    if applied.manifest.promise != "exact" or not verified.holds:
        return "promise broken"
    different = [f"{c.mode} {c.dtype}" for c in verified.comparisons if not c.identical]
    assert len(verified.comparisons) == 2 * len(DTYPES)
    return ", ".join(different) or "identical"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    families = parser.parse_args().families
    lines = [
        "# Born identical: prefill and cached decode, bfloat16 and float32, bit by bit",
        "",
        f"| graft | {' | '.join(families)} |",
        "|---" * (len(families) + 1) + "|",
    ]
    failed = False
    for name, operations in grafts().items():
        cells = []
        for family in families:
            with tempfile.TemporaryDirectory() as folder:
                cells.append(cell(family, operations, Path(folder)))
        failed = failed or set(cells) != {"identical"}
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if families == list(FAMILIES):
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "born_identical.md").write_text("\n".join([*lines, ""]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
