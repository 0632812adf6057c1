"""What rounding leaves of a merged adapter, by how small its change is: to the nearest, and guided.

    python -m benchmarks.merging [--size 1024] [--rank 16]

Merges one random LoRA into the query matrix of a random bfloat16 Llama of one layer, with weights that make ‖ΔW‖ the
given shares of ‖W‖. The figures are those that `surgery.json` records of the output's bytes: the share of ΔW that is
left in it. Results go to benchmarks/results/merging.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import surgeon
from tests import tiny
from tests.adapters import lora

RESULT = Path(__file__).resolve().parent / "results" / "merging.md"
SHARES = (1.0, 0.3, 0.1, 0.03)


def merged(base: Path, folder: Path, weight: float, rounding: str) -> dict[str, float]:
    """What surgery.json says of the one tensor that changed."""
    source = {"adapter": str(folder / "adapter"), "weight": weight}
    plan = folder / "plan.yaml"
    operation = {"op": "merge_adapter", "from": source, "rounding": rounding}
    plan.write_text(json.dumps({"surgeon": 1, "operations": [operation]}))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        out = surgeon.apply(plan, base, Path(scratch) / "out", device="cpu").path
        (found,) = json.loads((out / "surgery.json").read_text())["merged"].values()
        return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of the matrix")
    parser.add_argument("--rank", type=int, default=16)
    given = parser.parse_args()
    size = given.size
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": size // 8}
        base = tiny.checkpoint(folder / "base", "llama", hidden_size=size, num_hidden_layers=1, **heads)
        lora(folder / "adapter", {"self_attn.q_proj": (size, size)}, layers=1, rank=given.rank)
        whole = merged(base, folder, 1.0, "nearest")["change"]
        rows = []
        for share in SHARES:
            weight = share / 100 / whole
            nearest, guided = (merged(base, folder, weight, way) for way in ("nearest", "guided"))
            rows.append(f"| {share:g} % | {nearest['kept']:.3f} | {guided['kept']:.3f} |")
            print(rows[-1], flush=True)
    words = f"A random LoRA of rank {given.rank} in a random {size} × {size} matrix in bfloat16: the share of ΔW left."
    head = f"# What rounding leaves of a merged adapter\n\n`python -m benchmarks.merging`. {words}\n\n"
    table = ["| ‖ΔW‖ / ‖W‖ | nearest | guided |", "|---|---|---|", *rows]
    RESULT.write_text(head + "\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
