"""Depth growth measured: `surgeon apply` compared with `cp -r` and mergekit, OT fusion by stage, start-up.

    python benchmarks/depth_growth.py --work DIR [--mergekit PATH/TO/mergekit-yaml] [--rounds 3]

Makes a Llama-3.2-1B-shaped checkpoint (bf16, tied embeddings, three shards, 2.5 GB) in DIR and grows it from
16 to 24 layers. Every candidate runs in a separate process, in turn, `rounds` times; the best wall time
and the highest peak memory (ru_maxrss of the process) count. Results go to benchmarks/results/depth_growth.*.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from measuring import machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
SURGEON = [sys.executable, "-m", "surgeon"]
LAYERS, NEW = 16, 8

MERGEKIT = """\
merge_method: passthrough
dtype: bfloat16
slices:
{slices}
"""

LOAD_AND_SAVE = """
import copy, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
layers = torch.nn.ModuleList()
for i, layer in enumerate(model.model.layers):
    layers.append(layer)
    if i % 2:
        new = copy.deepcopy(layer)
        new.self_attn.o_proj.weight.data.zero_()
        new.mlp.down_proj.weight.data.zero_()
        layers.append(new)
model.model.layers = layers
model.config.num_hidden_layers = len(layers)
model.save_pretrained(sys.argv[2])
"""


@dataclass
class Measured:
    """One candidate: wall seconds of every round, highest peak memory in bytes, bytes it wrote."""

    name: str
    walls: list[float] = field(default_factory=list)
    peak: int = 0
    written: int = 0

    @property
    def best(self) -> float:
        return min(self.walls)


def make_base(folder: Path) -> None:
    """A random Llama-3.2-1B-shaped checkpoint, saved as transformers saves it."""
    if (folder / "model.safetensors.index.json").exists():
        return
    code = f"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers={LAYERS},
    num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    max_position_embeddings=131072, rms_norm_eps=1e-5)
torch.set_default_dtype(torch.bfloat16)
LlamaForCausalLM(config).save_pretrained({str(folder)!r}, max_shard_size="900MB")
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run(command: list[str], environment: dict[str, str] | None = None) -> tuple[float, int]:
    """Wall seconds and peak resident bytes of a command, including the flush of writes that it left to the kernel."""
    os.sync()
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **(environment or {})}
    )
    assert process.stderr is not None
    error = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{error.decode()[-2000:]}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def warm(folder: Path) -> None:
    """Read every file of a folder once."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def logical_bytes(folder: Path) -> int:
    """Sum of file sizes, holes included."""
    return sum(path.stat().st_size for path in folder.iterdir())


def compare_writers(work: Path, base: Path, mergekit: str | None, rounds: int) -> list[Measured]:
    """surgeon, cp -r of what surgeon wrote, cp -r and sync, mergekit's passthrough, load-and-save; in turn."""
    out, copied, merged, saved = (work / name for name in ("out", "copied", "merged", "saved"))
    recipe = work / "mergekit.yaml"
    ranges = [
        f"  - sources: [{{model: {base}, layer_range: [{i}, {i + 1}]}}]"
        for i in range(LAYERS)
        for _ in range(1 + i % 2)
    ]
    recipe.write_text(MERGEKIT.format(slices="\n".join(ranges)))

    grow = [*SURGEON, "apply", "llama-pro", str(base), str(out)]
    candidates: list[tuple[Measured, Path, Callable[[], tuple[float, int]]]] = [
        (Measured("surgeon apply llama-pro --no-read-back"), out, lambda: run([*grow, "--no-read-back"])),
        (Measured("surgeon apply llama-pro (read back, the default)"), out, lambda: run(grow)),
        (Measured("cp -r of its output"), copied, lambda: run(["cp", "-r", str(out), str(copied)])),
        (
            Measured("cp -r of its output, and sync"),
            copied,
            lambda: run(["sh", "-c", f"cp -r '{out}' '{copied}' && sync '{copied}'/*"]),
        ),
    ]
    if mergekit:
        candidates.append(
            (
                Measured("mergekit passthrough"),
                merged,
                lambda: run([mergekit, str(recipe), str(merged), "--lazy-unpickle"]),
            )
        )
    candidates.append(
        (
            Measured("load, copy layers, save_pretrained"),
            saved,
            lambda: run([sys.executable, "-c", LOAD_AND_SAVE, str(base), str(saved)]),
        )
    )
    for _ in range(rounds):
        for measured, target, measure in candidates:
            shutil.rmtree(target, ignore_errors=True)
            # Every candidate finds its input in the page cache and memory that was just in use: this compares copying,
            # not disk reads or a virtual machine's first use of its memory.
            shutil.copytree(base, work / "scratch")
            shutil.rmtree(work / "scratch")
            warm(out if measured.name.startswith("cp") else base)
            wall, peak = measure()
            measured.walls.append(wall)
            measured.peak = max(measured.peak, peak)
            measured.written = logical_bytes(target)
            if target != out:
                shutil.rmtree(target)
    return [measured for measured, _, _ in candidates]


def fuse(work: Path, base: Path) -> tuple[Measured, dict[str, float]]:
    """OT fusion of the same base: wall, peak memory, and seconds by stage."""
    out = work / "fused"
    shutil.rmtree(out, ignore_errors=True)
    measured = Measured("surgeon apply opt-deus (8 fused layers)")
    report = work / "fused.json"
    command = f"{' '.join(SURGEON)} apply opt-deus '{base}' '{out}' --device cpu --json > '{report}'"
    wall, measured.peak = run(["sh", "-c", f"exec {command}"])
    measured.walls.append(wall)
    measured.written = logical_bytes(out)
    stages: dict[str, float] = json.loads(report.read_text())["seconds"]
    shutil.rmtree(out)
    return measured, stages


def start_up() -> float:
    """Best of ten, seconds of `surgeon --help`."""
    return min(run([*SURGEON, "--help"])[0] for _ in range(10))


def table(writers: list[Measured], fused: Measured, stages: dict[str, float], help_seconds: float) -> str:
    """The results as Markdown."""
    copying = next(m for m in writers if m.name == "cp -r of its output")
    lines = [
        f"Machine: {machine()}; Python {platform.python_version()}.",
        "",
        "| candidate | wall s (best) | all rounds | bytes written | ns per byte | × cp -r per byte | peak memory MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for m in writers:
        per_byte = m.best / m.written
        ratio = per_byte / (copying.best / copying.written)
        lines.append(
            f"| {m.name} | {m.best:.2f} | {', '.join(f'{w:.2f}' for w in m.walls)} | {m.written:,}"
            f" | {per_byte * 1e9:.2f} | {ratio:.2f} | {m.peak / 1e6:.0f} |"
        )
    lines += [
        "",
        f"OT fusion: {fused.best:.1f} s, peak memory {fused.peak / 1e6:.0f} MB.",
        "",
        *(f"- {stage}: {seconds:.2f} s" for stage, seconds in stages.items()),
        "",
        f"`surgeon --help`: {help_seconds:.3f} s.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints (needs 15 GB)")
    parser.add_argument("--mergekit", help="path of mergekit-yaml (pip install mergekit), to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fusion", action="store_true", help="OT fusion alone; the rest stays as it is recorded")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    base = arguments.work / "base-1b"
    make_base(base)
    if arguments.fusion:
        known = json.loads((RESULTS / "depth_growth.json").read_text())
        help_seconds, writers = known["help_seconds"], [Measured(**one) for one in known["writers"]]
    else:
        help_seconds = start_up()
        writers = compare_writers(arguments.work, base, arguments.mergekit, arguments.rounds)
    fused, stages = fuse(arguments.work, base)
    text = table(writers, fused, stages, help_seconds)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "depth_growth.md").write_text(f"# Depth growth, 1B shape, 16 → 24 layers\n\n{text}\n")
    record = {
        "machine": machine(),
        "writers": [vars(m) for m in writers],
        "fusion": vars(fused),
        "stages": stages,
        "help_seconds": help_seconds,
    }
    (RESULTS / "depth_growth.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
