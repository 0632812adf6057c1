"""Which operations a checkpoint takes whose config.json is written as its maker published it.

`python -m benchmarks.published [TYPE …] [--plans NAME …] [--again]` makes a tiny checkpoint for each config of
published_configs.py (bfloat16, every parameter and every stored buffer random, saved by transformers, config.json as
published), carries one plan for each operation out on it, verifies every output (every byte; where the promise is exact
or to rounding, logits of prefill and cached generation in bfloat16 and float32), and reverts it (every byte).
A result is `exact`, `rounding`, `none` (the operation promises nothing), or the first line of the reason. The rows are
in results/published.jsonl, so that a run goes on where it was cut off; results/published.md is written from them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.coverage import RESULTS, Row, in_a_process, keep, read_rows
from benchmarks.published_configs import PUBLISHED

ROWS = RESULTS / "published.jsonl"
LIMIT = 600
# What is no refusal.
HELD = ("exact", "rounding", "none")

PLANS = {
    "insert": "{op: insert_layers, where: {every: 1}, init: {kind: copy}}",
    "fused": "{op: insert_layers, where: {after: [0, 1]}, init: {kind: ot_fusion}}",
    "stack": "{op: stack_layers, bottom: 0.75, top: 0.75}",
    "drop": "{op: drop_layers, layers: [1]}",
    "branch": "{op: control_llm, layers: all}",
    "adapters": "{op: gated_adapters, size: 8}",
    "slot": "{op: pmoe_experts, threshold: 1}",
    "states": "{op: mixture_of_control, rank: 4}",
    "gate": "{op: gated_adapters, size: 8, gate: none, local_loss: none}\n  - {op: domain_gate, reads: prefix_mean}",
    "tokens": '{op: grow_vocabulary, tokens: [" été", "légère"]}',
    "experts": "{op: upcycle_experts, form: shared, experts: 4}",
    "copies": "{op: upcycle_experts, form: copies, experts: 4}",
    "ffn": "{op: widen_ffn, by: 32}",
    "heads": "{op: widen_attention, groups: 2}",
    "stream": "{op: widen_hidden, times: 2}",
}


def published(folder: Path, model_type: str, _: str = "", *, dtype: str = "bfloat16") -> Path:
    """Save a checkpoint of a published config in `folder`, in several shards, with a tokenizer."""
    from tests.decoders import checkpoint_of

    return checkpoint_of(PUBLISHED[model_type], folder, dtype=dtype)


_ABOUT = """# Which operations published checkpoints take

`python -m benchmarks.published`, {versions}, on {days}. A tiny checkpoint for each config of
benchmarks/published_configs.py, which is written as its maker published it (sizes smaller; bfloat16; every parameter
and every stored buffer random), and a plan for each operation. Every output is verified (every byte; logits of prefill
and cached generation in bfloat16 and float32) and, where it promises to be the base, reverted to every byte of it.
`exact` and `rounding` are promises that held, `none` is an operation that promises nothing; numbers are reasons below.
`published.jsonl` has each row's day, versions and seconds.
"""


def page(rows: list[Row]) -> str:
    """The whole page: counts, the table, and the reasons of what is refused."""
    versions = sorted({", ".join(f"{name} {said}" for name, said in row.versions.items()) for row in rows})
    days = " to ".join(dict.fromkeys((min(row.day for row in rows), max(row.day for row in rows))))
    told = [row.told[name] for row in rows for name in PLANS]
    counts = {word: told.count(word) for word in HELD}
    reasons: dict[str, int] = {}
    lines = [f"| model type | {' | '.join(PLANS)} |", "|---" * (len(PLANS) + 1) + "|"]
    for row in rows:
        cells = [
            row.told[name]
            if row.told[name] in HELD
            else f"[{reasons.setdefault(_reason(row.told[name]), len(reasons) + 1)}]"
            for name in PLANS
        ]
        lines.append(f"| {row.model_type} | {' | '.join(cells)} |")
    summary = ", ".join(f"{word} {count}" for word, count in counts.items())
    summary += f", refused {len(told) - sum(counts.values())}"
    return "\n".join(
        [
            _ABOUT.format(versions="; ".join(versions), days=days),
            f"Of {len(rows)} configs and {len(PLANS)} plans, {len(told)} pairs: {summary}.",
            "",
            *lines,
            "",
            "| reason | words |",
            "|---|---|",
            *(f"| {number} | {words} |" for words, number in reasons.items()),
            "",
        ]
    )


def _reason(words: str) -> str:
    """The line of a refusal without its place in the plan."""
    return words.partition("): ")[2] if "operations[" in words else words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--rows", type=Path, default=ROWS)
    asked = parser.parse_args()
    import torch  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    rows = {row.model_type: row for row in read_rows(asked.rows)}
    for model_type in asked.types or PUBLISHED:
        before = rows.get(model_type)
        plans = {n: PLANS[n] for n in asked.plans if asked.again or before is None or n not in before.told}
        if not plans:
            continue
        row = in_a_process(model_type, "published", plans, LIMIT, published)
        row.told = (before.told if before else {}) | row.told
        rows[model_type] = row
        keep(rows.values(), asked.rows)
        print(
            f"{row.seconds:6.1f} s  {model_type}: {json.dumps({n: row.told[n] for n in plans}, indent=1)}",
            file=sys.stderr,
            flush=True,
        )
    asked.rows.with_suffix(".md").write_text(page([*rows.values()]))


if __name__ == "__main__":
    main()
