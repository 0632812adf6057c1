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
import re
import sys
from dataclasses import dataclass
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
    "heads": "{op: widen_attention, groups: double}",
    "stream": "{op: widen_hidden, times: 2}",
}
# What a type takes in the place of the above: whole periods where config.json says each layer's kind by a period, and
# gaps whose two sides are of one kind.
OTHERWISE = {
    "deepseek_v3": {"fused": "{op: insert_layers, where: {after: [1, 2]}, init: {kind: ot_fusion}}"},
    # Channels of embeddings per layer, whose order stands outside the layers.
    "gemma4_text": {
        "fused": "{op: insert_layers, where: {after: [0, 3]}, init: {kind: ot_fusion, unaligned: average}}",
    },
    "jamba": {
        "insert": "{op: insert_layers, where: {every_period: 1}, init: {kind: copy}}",
        "drop": "{op: drop_layers, layers: [0, 1, 2, 3]}",
    },
    "bamba": {"fused": "{op: insert_layers, where: {after: [0, 3]}, init: {kind: ot_fusion}}"},
    "lfm2": {"fused": "{op: insert_layers, where: {after: [0, 3]}, init: {kind: ot_fusion}}"},
    "zamba2": {"fused": "{op: insert_layers, where: {after: [0, 3]}, init: {kind: ot_fusion}}"},
    # Experts that nobody has described how to align.
    "dbrx": {"fused": "{op: insert_layers, where: {after: [0, 1]}, init: {kind: ot_fusion, unaligned: average}}"},
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
† are layers of which some modules are averaged as they stand (Gemma 4's channels of embeddings per layer, whose order
stands outside the layers; DBRX's experts, in the rows of matrices). `exact` and `rounding` are promises that held,
`none` is an operation that promises nothing; numbers are reasons below.
{otherwise}
`published.jsonl` has each row's day, versions and seconds.
"""


@dataclass(frozen=True)
class Kind:
    """A kind of refusal: words that each of its lines has, why it cannot be otherwise, and what serves instead."""

    words: str
    why: str
    instead: str


_BESIDE = "`form: shared` (modules beside the MLP)"
# A line that none of them has, or two, ends a run: somebody has to look at it.
KINDS = (
    Kind(
        "layers share a block .*none can be added",
        "a shared block is tied, and its cache kept, by the numbers of layers, so the stack keeps its layers",
        "adapters, slots or control states",
    ),
    Kind(
        "no two neighbours of this model are alike",
        "the mean of two layers needs the same tensors in both, and of these stacks no two neighbours have them",
        "init `copy`",
    ),
    Kind(
        "is a mixture of experts already|has experts already",
        "the operation makes experts of one FFN, and this model has experts",
        "the dense original, or grafts",
    ),
    Kind(
        "have no MLP of gate_proj",
        "experts of the native classes are gated FFNs of three matrices, and this FFN has two",
        _BESIDE,
    ),
    Kind(
        "hold different tensors, and none of the classes",
        "no native class of experts has these layers: that with Bamba's (granitemoehybrid) turns whole heads, and Gemma"
        " 4's own puts experts beside the MLP, behind norms of their own",
        _BESIDE,
    ),
    Kind(
        "several layers share, and (experts|no class|such a block)|its layers share a block",
        "a block that several layers run is no layer's own: it becomes no wider, and no experts begin as copies of it",
        "`gated_adapters`, or new layers",
    ),
    Kind(
        r"no class of transformers known here computes what .*\((?!layers )",
        "each native class was tried on a twin and computes something else: other norms, biases, rotation or windows",
        _BESIDE,
    ),
    Kind(
        "no layer has an FFN whose projections are known",
        "experts that lie below one another in the rows of matrices stay as they are",
        "grafts, or new layers",
    ),
    Kind(
        "its code multiplies embeddings by a number",
        "the class multiplies embeddings by the root of the width, so a wider stream would change them",
        "`widen_ffn`, or new layers",
    ),
    Kind(
        "heads transformers' class builds heads of another size",
        "the class divides the hidden size by the number of heads, whatever config.json says of their size, or (zamba2)"
        " gives adapters on queries, keys and values twice the hidden size",
        "`widen_ffn`, or new layers",
    ),
    Kind(
        "makes this norm over all heads as wide as the stream",
        "the class gives a norm over all heads the width of the stream, whatever the number of heads",
        "`widen_ffn`, or new layers",
    ),
)


def kind_of(words: str) -> Kind:
    """The kind of a refusal. Raises ValueError where it is of none, or of several."""
    found = [kind for kind in KINDS if re.search(kind.words, words)]
    if len(found) != 1:
        raise ValueError(f"of {len(found)} kinds of refusals, where one is needed: {words}")
    return found[0]


def kinds_table(rows: list[Row]) -> list[str]:
    """The kinds of refusals in `rows`, the most frequent first, with the pairs that each stands for."""
    refused: dict[Kind, list[str]] = {}
    for row in rows:
        by_kind: dict[Kind, list[str]] = {}
        for name in PLANS:
            if row.told[name] not in HELD:
                by_kind.setdefault(kind_of(row.told[name]), []).append(name)
        for kind, plans in by_kind.items():
            named = "every plan" if len(plans) == len(PLANS) else ", ".join(plans)
            refused.setdefault(kind, []).append(f"{row.model_type}: {named}")
    lines = ["| pairs | why not | instead | which |", "|---|---|---|---|"]
    counts = {
        kind: sum(len(PLANS) if "every plan" in w else w.count(",") + 1 for w in refused[kind]) for kind in refused
    }
    for kind in sorted(refused, key=lambda kind: -counts[kind]):
        lines.append(f"| {counts[kind]} | {kind.why} | {kind.instead} | {'; '.join(refused[kind])} |")
    return lines


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
            row.told[name] + _marked(row.model_type, name)
            if row.told[name] in HELD
            else f"[{reasons.setdefault(_reason(row.told[name]), len(reasons) + 1)}]"
            for name in PLANS
        ]
        lines.append(f"| {row.model_type} | {' | '.join(cells)} |")
    summary = ", ".join(f"{word} {count}" for word, count in counts.items())
    summary += f", refused {len(told) - sum(counts.values())}"
    return "\n".join(
        [
            _ABOUT.format(versions="; ".join(versions), days=days, otherwise=_others()),
            f"Of {len(rows)} configs and {len(PLANS)} plans, {len(told)} pairs: {summary}.",
            "",
            *lines,
            "",
            "## Why not",
            "",
            "Refused pairs by kind. A refusal of no kind here ends a run of this benchmark.",
            "",
            *kinds_table(rows),
            "",
            "## In their words",
            "",
            "| reason | words |",
            "|---|---|",
            *(f"| {number} | {words} |" for words, number in reasons.items()),
            "",
        ]
    )


def _marked(model_type: str, name: str) -> str:
    """A mark where the plan leaves parts of a layer unaligned."""
    return " †" if "unaligned: average" in OTHERWISE.get(model_type, {}).get(name, "") else ""


def _others() -> str:
    """Which types take another plan than the others, and which."""
    plans = [f"{each}: {name} `{plan}`" for each, own in OTHERWISE.items() for name, plan in own.items()]
    return f"Plans that a type takes in the place of the others': {'; '.join(plans)}."


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
        own = PLANS | OTHERWISE.get(model_type, {})
        plans = {n: own[n] for n in asked.plans if asked.again or before is None or n not in before.told}
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
