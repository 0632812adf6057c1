"""Cost as work grows: layers, shards and tensors, each alone, with everything else as it is.

    python benchmarks/scale.py --work DIR [--rounds 1] [--only SERIES …]

Small checkpoints of random bfloat16 weights, of which one thing grows: layers 8 → 126, shards 1 → 191 of the same
tensors, tensors 300 → 50,000 (experts of one shape). On each: preview of a plan that puts a branch beside every fourth
layer, `apply` of it with shards hard-linked and copied, `verify --static` and `verify --streamed`. Each is a fork of a
process that has imported what it needs, so that the work alone is measured, after a preview that leaves in the cache
what is known of the family: processor seconds, those of helpers that it starts with them (the least of the rounds), and
what the peak of the resident set is above its beginning. Linked and copied, every file must have the same bytes:
checked here.

With `--only` the other series are what results/scale.json has of them.

A line is fitted through each series; `off` is the largest distance of a point from it, as a share of the largest value.
Results go to benchmarks/results/scale.md, scale.svg and scale.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import shutil
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measuring import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import surgeon

RESULTS = Path(__file__).resolve().parent / "results"
SERIES: dict[str, tuple[int, ...]] = {
    "layers": (8, 64, 126),
    "shards": (1, 96, 191),
    "experts": (2, 256, 512),
}
GRAFT = "surgeon: 1\noperations:\n  - {op: control_llm, layers: {every: 4}}\n"
# Layers of the series of shards, and of experts.
DEPTH, SPARSE_DEPTH = 64, 32
Sizes = dict[str, list[int]]


def dense(layers: int, hidden: int) -> tuple[dict[str, Any], Sizes]:
    """A config of Llama, and the shapes of its tensors."""
    inner, keys, words = 2 * hidden, hidden // 4, 1024
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": words,
        "tie_word_embeddings": False,
    }
    return config, dense_sizes(layers, hidden=hidden, inner=inner, keys=keys, words=words)


def dense_sizes(layers: int, *, hidden: int, inner: int, keys: int, words: int) -> Sizes:
    """The shapes of a Llama's tensors."""
    return {**_outside(words, hidden), **_attention(layers, hidden, keys), **_mlp(layers, hidden, inner)}


def sparse(layers: int, experts: int) -> tuple[dict[str, Any], Sizes]:
    """A config of Qwen3-MoE, and the shapes of its tensors: three for each expert."""
    hidden, inner, words = 64, 8, 1024
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": inner,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": words,
        "tie_word_embeddings": False,
    }
    sizes = {**_outside(words, hidden), **_attention(layers, hidden, hidden // 4)}
    for layer in range(layers):
        place = f"model.layers.{layer}"
        sizes |= {f"{place}.self_attn.{which}_norm.weight": [8] for which in "qk"}
        sizes[f"{place}.mlp.gate.weight"] = [experts, hidden]
        for expert in range(experts):
            sizes |= _three(f"{place}.mlp.experts.{expert}", hidden, inner)
    return config, sizes


def _outside(words: int, hidden: int) -> Sizes:
    return {
        "model.embed_tokens.weight": [words, hidden],
        "lm_head.weight": [words, hidden],
        "model.norm.weight": [hidden],
    }


def _attention(layers: int, hidden: int, keys: int) -> Sizes:
    found: Sizes = {}
    for layer in range(layers):
        place = f"model.layers.{layer}"
        rows = {"q": hidden, "k": keys, "v": keys, "o": hidden}
        found |= {f"{place}.self_attn.{which}_proj.weight": [rows[which], hidden] for which in rows}
        found |= {f"{place}.{norm}_layernorm.weight": [hidden] for norm in ("input", "post_attention")}
    return found


def _mlp(layers: int, hidden: int, inner: int) -> Sizes:
    found: Sizes = {}
    for layer in range(layers):
        found |= _three(f"model.layers.{layer}.mlp", hidden, inner)
    return found


def _three(place: str, hidden: int, inner: int) -> Sizes:
    return {
        f"{place}.gate_proj.weight": [inner, hidden],
        f"{place}.up_proj.weight": [inner, hidden],
        f"{place}.down_proj.weight": [hidden, inner],
    }


def write(folder: Path, config: dict[str, Any], sizes: Sizes, shards: int) -> None:
    """A checkpoint of random bfloat16 numbers between 2⁻⁷ and 2⁻⁶, of either sign, in so many shards."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    drawn, places = np.random.default_rng(0), {}
    names = list(sizes)
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        header, end, held = {}, 0, names[number * len(names) // shards : (number + 1) * len(names) // shards]
        for name in held:
            begin, end = end, end + 2 * int(np.prod(sizes[name]))
            header[name] = {"dtype": "BF16", "shape": sizes[name], "data_offsets": [begin, end]}
            places[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        words = (drawn.integers(0, 1 << 16, end // 2, dtype=np.uint16) & 0x807F) | 0x3C00
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + words.tobytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def spent_in(*calls: Callable[[], object]) -> tuple[float, float]:
    """Of calls side by side, each in a fork: processor seconds of all, the highest peak of memory added (MB)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    forks = []
    for call in calls:
        reader, writer = os.pipe()
        if (fork := os.fork()) == 0:
            begun = _memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")
            try:
                call()
                os.write(writer, str(_memory("VmHWM") - begun).encode())
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(writer)
        forks.append((fork, reader))
    added = []
    for fork, reader in forks:
        if os.waitpid(fork, 0)[1]:
            sys.exit("a fork failed")
        added.append(int(os.read(reader, 64)))
        os.close(reader)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, max(added) / 1000


def _memory(what: str) -> int:
    """Of this process in KB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(what)))


def digests(folder: Path) -> dict[str, str]:
    """Of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def same(one: Path, other: Path) -> None:
    """Exit unless both folders hold the same files, byte for byte."""
    here, there = digests(one), digests(other)
    if wrong := sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name)):
        sys.exit(f"{one} and {other} differ in {wrong}")


def on_one(base: Path, plan: Path, room: Path) -> dict[str, tuple[float, float]]:
    """What each command takes on one checkpoint."""
    linked, copied = room / "linked", room / "copied"
    for folder in (linked, copied):
        shutil.rmtree(folder, ignore_errors=True)
    calls: dict[str, Callable[[], object]] = {
        "preview": lambda: surgeon.preview(plan, base),
        "apply, copied": lambda: surgeon.apply(plan, base, copied, device="cpu"),
        "apply --link": lambda: surgeon.apply(plan, base, linked, device="cpu", link=True),
        "verify --static": lambda: proven(base, copied, logits=False),
        "verify --streamed": lambda: proven(base, copied, streamed=True, windows=1, window=16),
    }
    spent_in(calls["preview"])
    found = {name: spent_in(call) for name, call in calls.items()}
    same(linked, copied)
    return found


def proven(base: Path, out: Path, **options: Any) -> None:
    """Raise where the output does not keep what it promises."""
    found = surgeon.verify(base, out, device="cpu", **options)
    assert found.holds, [check for check in found.checks if not check.holds]


def measured(series: str, points: tuple[int, ...], work: Path, plan: Path) -> list[dict[str, Any]]:
    """One round of a series: for each point its amount and what each command takes."""
    found = []
    for point in points:
        layers = point if series == "layers" else DEPTH
        config, sizes = sparse(SPARSE_DEPTH, point) if series == "experts" else dense(layers, 256)
        base = work / f"{series}-{point}"
        if not base.exists():
            write(base, config, sizes, point if series == "shards" else 4)
        amount = len(sizes) if series == "experts" else point
        found.append({"amount": amount, "spent": on_one(base, plan, work)})
        print(series, amount, found[-1]["spent"], flush=True)
    return found


def least(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of several rounds of a series the least seconds and memory."""
    found = []
    for turns in zip(*rounds, strict=True):
        spent = {name: [min(turn["spent"][name][k] for turn in turns) for k in (0, 1)] for name in turns[0]["spent"]}
        found.append({"amount": turns[0]["amount"], "spent": spent})
    return found


def line_through(amounts: list[float], values: list[float]) -> tuple[float, float, float]:
    """Of the best line where it begins, what it gains for one more, and the largest distance over the largest value."""
    gain, begin = np.polyfit(amounts, values, 1)
    off = max(abs(value - begin - gain * amount) for amount, value in zip(amounts, values, strict=True))
    return float(begin), float(gain), off / max(values)


def tables(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Each series: seconds and memory by amount, and the line through them."""
    lines = []
    for series, points in found.items():
        what = "tensors" if series == "experts" else series
        amounts = [float(point["amount"]) for point in points]
        per = 1000 if series == "experts" else 1
        shown = " | ".join(f"{point['amount']:,}" for point in points)
        lines += [
            f"## {what.capitalize()}",
            "",
            f"| processor s; memory added, MB | {shown} | for {per:,} more | off |",
        ]
        lines += ["|---" * (len(points) + 3) + "|"]
        for name in points[0]["spent"]:
            for which, unit in enumerate(("s", "MB")):
                values = [point["spent"][name][which] for point in points]
                _, gain, off = line_through(amounts, values)
                cells = " | ".join(f"{value:.2f}" if which == 0 else f"{value:.0f}" for value in values)
                lines.append(f"| {name}, {unit} | {cells} | {per * gain:.2g} | {off:.0%} |")
        lines.append("")
    return lines


def picture(found: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each series: seconds left, memory right."""
    from surgeon.common.page.plots import Axis, Series, drawn_lines
    from tests.svg_files import placed, standalone

    width, height, gap = 360.0, 190.0, 24.0
    parts = []
    for row, (series, points) in enumerate(found.items()):
        amounts = [float(point["amount"]) for point in points]
        across = Axis.over("tensors" if series == "experts" else series, amounts, low=0.0)
        for column, label in enumerate(("processor s", "memory added, MB")):
            spent = {name: [point["spent"][name][column] for point in points] for name in points[0]["spent"]}
            lines = [
                Series(name, list(zip(amounts, values, strict=True)), style)
                for style, (name, values) in enumerate(spent.items())
            ]
            up = Axis.over(label, (value for values in spent.values() for value in values), low=0.0)
            drawn = drawn_lines(lines, across, up, size=(width, height))
            parts.append(placed(column * (width + gap), row * (height + gap), drawn))
    size = (2 * width + gap, len(found) * (height + gap) - gap)
    summary = "; ".join(found) + ": processor seconds and memory added, a line for each command; numbers in scale.md"
    return standalone("Cost as work grows", summary, size, *parts, scale=1.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints, 1 GB, removed")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=tuple(SERIES), default=list(SERIES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    work: Path = arguments.work
    if work.exists() and any(work.iterdir()):
        parser.error(f"--work {work}: not empty, and it is removed afterwards")
    work.mkdir(parents=True, exist_ok=True)
    plan = work / "graft.yaml"
    plan.write_text(GRAFT)
    os.environ |= {"SURGEON_CACHE": str(work / "cache"), "OMP_NUM_THREADS": "1"}
    # What the forks would import otherwise, each anew.
    import torch
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    import surgeon.models.compare_streamed  # noqa: F401

    torch.set_num_threads(1)
    chosen = [series for series in SERIES if series in arguments.only]
    try:
        rounds: dict[str, list[list[dict[str, Any]]]] = {series: [] for series in chosen}
        for _ in range(arguments.rounds):
            for series in chosen:
                rounds[series].append(measured(series, SERIES[series], work, plan))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    arguments.results.mkdir(parents=True, exist_ok=True)
    kept = arguments.results / "scale.json"
    before = json.loads(kept.read_text()) if kept.exists() else {}
    found = before | {series: least(turns) for series, turns in rounds.items()}
    kept.write_text(json.dumps(found, indent=1) + "\n")
    (arguments.results / "scale.svg").write_text(picture(found), encoding="utf-8")
    about = (
        f"`python benchmarks/scale.py --rounds {arguments.rounds}`: {machine()}; Python {platform.python_version()};"
        f" load at the end {os.getloadavg()[0]:.1f}. Imports are in no figure. Every file of what was hard-linked and"
        " what was copied had the same bytes."
    )
    text = "\n".join(["# Cost as work grows", "", about, "", "![seconds and memory](scale.svg)", "", *tables(found)])
    (arguments.results / "scale.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
