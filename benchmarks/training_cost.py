"""What a training step costs: full fine-tuning, PEFT LoRA and each surgery, side by side in one run.

    python benchmarks/training_cost.py --base DIR --work DIR [--batch B] [--length T] [--steps N] [--device cuda]
    python benchmarks/training_cost.py --base DIR --work DIR --whole PLAN --text FILE [--batch B] [--length T]

Every candidate runs in a separate process, in the checkpoint's dtype, in turns: steps on B × T random tokens by the
optimizer of `surgeon train` (AdamW, float32 masters of trained tensors), the best one's seconds and the process's
peak memory. The same tensors train as in `surgeon train`. Two further steps are timed by parts, with a device
synchronisation in between: forward up to the lowest layer that trains, the rest of forward, backward, optimizer. Full
fine-tuning runs a second time with torch's AdamW on the bfloat16 weights themselves, as in transformers' Trainer.
Results, with the targets and whether they are met, go to benchmarks/results/training_cost_<base>.md.

With `--whole PLAN` the command itself is measured instead, in float32 on the CPU: `surgeon train` of what PLAN added,
from reading the texts to the published run, beside a loop of transformers and torch on the same new tensors. Both
count processor seconds from the end of the second step to the end of the last, and the whole process's peak memory.
These go to benchmarks/results/training_run_<base>.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from beside_trl import BEFORE, Clock, callback, loaded
from measuring import in_a_process, machine, peak_memory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

RESULTS = Path(__file__).resolve().parent / "results"
# A plan, or a way to train the base itself.
CANDIDATES = {
    "full fine-tuning": "full",
    "full fine-tuning, AdamW on the weights themselves": "full-narrow",
    "PEFT LoRA, rank 16, all linear layers": "lora",
    "OpT-DeUS-Top": "opt-deus",
    "OpT-DeUS-Btm": "opt-deus/bottom",
    "LLaMA PRO": "llama-pro",
    "Control LLM": "control-llm",
    "Neutral Residues": "neutral-residues",
    "vanilla adapters": "neutral-residues/adapters",
    "Mixture-of-Control": "mixture-of-control",
    "PMoE, one slot": "pmoe",
}
ON_THE_BASE = ("full", "full-narrow", "lora")
PARTS = ("prefix", "forward", "backward", "optimizer")
# Target share of full fine-tuning's step, for layers inserted at the top.
TARGET = 0.6
# Target peak of `surgeon train`, over the plain loop's.
MOST_OF_A_LOOP = 1.1
LAYER = re.compile(r"\blayers\.(\d+)\.")


def load(folder: Path, kind: str, device: str) -> Any:
    """The model with exactly the trained tensors unfrozen, copied out of mapped files."""
    import surgeon
    from surgeon.manifest.trainable import trainable_set
    from surgeon.training.trainable.trainable_set import unfreeze

    opened = surgeon.open_checkpoint(folder)
    model = opened.load(device=device)
    model.config.use_cache = False
    if kind == "lora":
        import peft

        settings = peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings)
    elif kind in ON_THE_BASE:
        model.requires_grad_(True)
    else:
        out = opened.folder
        assert out.manifest is not None
        unfreeze(model, trainable_set(out, opened.manifest, "last"), base_names=out.tensors)
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Loaded weights may be mapped from the file.
            parameter.data = parameter.data.clone()
    return model.train()


class Bench:
    """One candidate, ready to take steps."""

    def __init__(self, folder: Path, kind: str, shape: tuple[int, int], device: str, cross_entropy: str) -> None:
        import torch

        from surgeon.training.losses.cross_entropy import FusedHead
        from surgeon.training.steps.optimizer import MasterAdamW

        self.torch = torch
        self.device = device
        self.model = load(folder, kind, device)
        self.chosen = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW if kind == "full-narrow" else MasterAdamW
        self.optimizer = optimizer([{"params": self.chosen}], lr=1e-5)
        drawn = torch.Generator().manual_seed(0)
        ids = torch.randint(3, self.model.config.vocab_size, shape, generator=drawn).to(device)
        self.batch = {"input_ids": ids, "labels": ids}
        if hasattr(self.model, "surgery"):
            # Sequences of the original and the new domain in turn, so that every local loss is active.
            self.batch["domain_ids"] = torch.arange(len(ids), device=device) % 2
        whole = self.model.get_base_model() if kind == "lora" else self.model
        self.fused = None if cross_entropy == "torch" else FusedHead(whole, "chunked")
        self.layers = whole.model.layers

    def wait(self) -> float:
        """The time after the device has finished."""
        if self.device != "cpu":
            self.torch.cuda.synchronize()
        return time.perf_counter()

    def lowest(self) -> int:
        """The lowest layer with a trained tensor; 0 where a tensor below the layers trains."""
        found = []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                place = LAYER.search(name)
                # Tensors above the layers do not end the prefix.
                above = place is None and ("lm_head" in name or ".norm." in name)
                found.append(int(place[1]) if place else len(self.layers) - 1 if above else 0)
        return min(found)

    def step(self, marks: list[float] | None = None) -> float:
        """One step; its loss. Into `marks` the times at which each part of it was done."""

        def mark(*_: object) -> None:
            if marks is not None:
                marks.append(self.wait())

        hook = self.layers[self.lowest()].register_forward_pre_hook(mark) if marks is not None else None
        self.optimizer.zero_grad()
        with contextlib.nullcontext() if self.fused is None else self.fused.armed():
            loss = self.model(**self.batch, use_cache=False).loss
        mark()
        loss.backward()
        mark()
        self.optimizer.step()
        mark()
        if hook is not None:
            hook.remove()
        return float(loss.detach())

    def peak(self) -> float:
        """Bytes: of the GPU, or of this process."""
        if self.device != "cpu":
            return float(self.torch.cuda.max_memory_allocated())
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return float(line.split()[1]) * 1024


def inner(folder: str, kind: str, batch: str, length: str, steps: str, device: str, cross_entropy: str) -> None:
    """One candidate: seconds of a step and of its parts, peak memory, number of trained parameters."""
    bench = Bench(Path(folder), kind, (int(batch), int(length)), device, cross_entropy)
    seconds, losses = [], []
    for _ in range(int(steps)):
        begun = bench.wait()
        losses.append(bench.step())
        seconds.append(bench.wait() - begun)
    # A few steps at a small rate on random tokens: the loss must change, it need not fall.
    assert len(set(losses)) > 1, f"{kind} does not train: {losses}"
    found: dict[str, float] = {"step": min(seconds), "peak": bench.peak()}
    apart = []
    for _ in range(2):
        marks = [bench.wait()]
        bench.step(marks)
        apart.append([later - earlier for earlier, later in itertools.pairwise(marks)])
    found |= dict(zip(PARTS, min(apart, key=sum), strict=True))
    found |= {"trainable": float(sum(p.numel() for p in bench.chosen))}
    print(json.dumps(found | {"lowest": float(bench.lowest()), "layers": float(len(bench.layers))}))


def whole(folder: str, way: str, text: str, batch: str, length: str, steps: str) -> None:
    """The command or the loop: processor seconds of a step, and the peak memory of all."""
    by = {"surgeon train": by_command, "a plain loop": by_loop}[way]
    clock = by(Path(folder), Path(text), int(batch), int(length), int(steps))
    print(json.dumps({"step": clock.step(), "peak": float(peak_memory())}))


def by_command(out: Path, text: Path, batch: int, length: int, steps: int) -> Clock:
    """`surgeon train`, whole, with all that it does by default: checks, held-out losses, a checkpoint, publishing."""
    import surgeon
    from surgeon.training import opening

    clock, run = Clock(), out.with_name("run")
    # In the place of trackers, which are called as it is.
    opening.open_trackers = lambda *_, **__: [callback(clock)()]
    config = out.with_name("train.yaml")
    source = {"name": "text", "path": str(text.resolve()), "share": 1, "validation": 0.05}
    asked = {"steps": steps, "batch": batch, "length": length, "dtype": "float32", "sources": [source]}
    config.write_text(json.dumps({"surgeon_train": 1, **asked}))
    surgeon.train(out, config, run, device="cpu")
    shutil.rmtree(run)
    return clock


def by_loop(out: Path, text: Path, batch: int, length: int, steps: int) -> Clock:
    """A loop of one's own: transformers loads, torch's AdamW steps on the new tensors alone."""
    import torch
    from transformers import AutoTokenizer

    clock, model = Clock(), loaded(out, "new", "float32").train()
    rows = [json.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines()]
    ids = torch.tensor(AutoTokenizer.from_pretrained(out)("\n".join(rows))["input_ids"])
    training = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(training, lr=1e-3, fused=True)
    for step in ids[: steps * batch * length].view(steps, batch, length):
        model(input_ids=step, labels=step, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(training, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.stop()
    return clock


def measure_whole(arguments: argparse.Namespace) -> None:
    """The command beside the loop, in turns, and their page."""
    import surgeon

    out, shape = arguments.work / "out", (arguments.batch, arguments.length, arguments.steps)
    measured: dict[str, dict[str, float]] = {}
    load_before = os.getloadavg()[0]
    try:
        surgeon.apply(arguments.whole, str(arguments.base), out)
        for _ in range(arguments.rounds):
            for way in ("surgeon train", "a plain loop"):
                found = in_a_process(__file__, "whole", out, way, arguments.text.resolve(), *shape)
                earlier = measured.get(way, found)
                measured[way] = {key: min(found[key], earlier[key]) for key in found}
                print(way, found, flush=True)
    finally:
        shutil.rmtree(arguments.work, ignore_errors=True)
    command, loop = measured["surgeon train"], measured["a plain loop"]
    lines = [
        f"# `surgeon train` beside a plain loop on {arguments.base.name} ({machine()}, load before {load_before:.1f})",
        "",
        f"`python benchmarks/training_cost.py --whole {arguments.whole}`: the new tensors train in float32, {shape[2]}"
        f" steps of {shape[0]} × {shape[1]} tokens, the least of {arguments.rounds} rounds, one thread. `surgeon train`"
        " does all that it does by default: checks, held-out losses, a checkpoint, the published run.",
        "",
        "| by | processor s a step | tokens a processor s | peak GB |",
        "|---|---:|---:|---:|",
    ]
    for way, found in measured.items():
        speed = shape[0] * shape[1] / found["step"]
        lines.append(f"| {way} | {found['step']:.3f} | {speed:,.0f} | {found['peak'] / 1e9:.2f} |")
    ratio = command["peak"] / loop["peak"]
    met = "met" if ratio <= MOST_OF_A_LOOP else "missed"
    lines += [
        "",
        f"- Peak at most {MOST_OF_A_LOOP} of the loop's: {ratio:.2f}, {met}.",
        f"- A step takes {command['step'] / loop['step']:.2f} of the loop's.",
        "",
    ]
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / f"training_run_{arguments.base.name}.md").write_text("\n".join(lines))
    print("\n".join(lines))


def better(found: dict[str, float], earlier: dict[str, float]) -> dict[str, float]:
    """The least memory and the faster step of two turns, each step with parts of its own turn."""
    faster = min(found, earlier, key=lambda turn: turn["step"])
    apart = min(found, earlier, key=lambda turn: sum(turn[part] for part in PARTS))
    return faster | {part: apart[part] for part in PARTS} | {"peak": min(found["peak"], earlier["peak"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the outputs, removed afterwards")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="at least 2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cross-entropy", choices=("torch", "chunked"), default="torch")
    parser.add_argument("--without", nargs="*", default=[], help="candidates to leave out, by plan")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--whole", metavar="PLAN", help="measure the command beside a plain loop, after this plan")
    parser.add_argument("--text", type=Path, help="of --whole: JSON lines with the key `text`")
    arguments = parser.parse_args()
    if arguments.steps <= BEFORE:
        parser.error(f"--steps: more than {BEFORE}, of which the first makes the optimizer's state")
    if (arguments.whole is None) != (arguments.text is None):
        parser.error("--whole needs --text, and --text is for --whole")
    import surgeon

    if arguments.work.exists() and any(arguments.work.iterdir()):
        parser.error(f"--work {arguments.work}: not empty, and it is removed afterwards")
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.whole is not None:
        measure_whole(arguments)
        return
    candidates = {name: kind for name, kind in CANDIDATES.items() if kind not in arguments.without}
    shape = (arguments.batch, arguments.length, arguments.steps, arguments.device, arguments.cross_entropy)
    outs: dict[str, Path] = {}
    measured: dict[str, dict[str, float]] = {}
    load_before = os.getloadavg()[0]
    try:
        for kind in candidates.values():
            outs[kind] = arguments.base
            if kind not in ON_THE_BASE:
                outs[kind] = arguments.work / kind.replace("/", "-")
                surgeon.apply(kind, str(arguments.base), outs[kind])
        # In turn, so that a slow minute of the machine does not affect one candidate alone.
        for _ in range(arguments.rounds):
            for name, kind in candidates.items():
                found = in_a_process(__file__, outs[kind], kind, *shape)
                measured[name] = better(found, measured.get(name, found))
                print(name, measured[name], flush=True)
    finally:
        shutil.rmtree(arguments.work, ignore_errors=True)
    arguments.results.mkdir(parents=True, exist_ok=True)
    where = arguments.base.name if arguments.device == "cpu" else f"{arguments.base.name}_{arguments.device}"
    by_kind = {kind: measured[name] for name, kind in candidates.items()}
    lines = [*_table(arguments, measured, by_kind.get("full"), load_before), "", *_targets(by_kind)]
    (arguments.results / f"training_cost_{where}.md").write_text("\n".join([*lines, ""]))


def _table(
    arguments: argparse.Namespace, measured: dict[str, dict[str, float]], full: dict[str, float] | None, load: float
) -> list[str]:
    lines = [
        f"# A training step on {arguments.base.name} ({machine(arguments.device)}, load before {load:.1f})",
        "",
        f"AdamW with float32 masters on {arguments.batch} × {arguments.length} tokens, best of {arguments.rounds} ×"
        f" {arguments.steps} steps; cross-entropy: {arguments.cross_entropy}; × is over full fine-tuning. `trains from`"
        " is the lowest layer that trains, of all; the parts of a step are from steps of their own: forward up to that"
        " layer, the rest of forward, backward, optimizer.",
        "",
        "| trained | trainable | trains from | step s | × | tokens/s | peak GB | × |"
        " prefix s | forward s | backward s | optimizer s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    tokens = arguments.batch * arguments.length
    for name, found in measured.items():
        ratio = {key: f"{found[key] / full[key]:.2f}" if full else "" for key in ("step", "peak")}
        parts = " | ".join(f"{found[part]:.3f}" for part in PARTS)
        lines.append(
            f"| {name} | {found['trainable']:,.0f} | {found['lowest']:.0f} of {found['layers']:.0f} |"
            f" {found['step']:.3f} | {ratio['step']} | {tokens / found['step']:,.0f} | {found['peak'] / 1e9:.2f} |"
            f" {ratio['peak']} | {parts} |"
        )
    return lines


def _targets(measured: dict[str, dict[str, float]]) -> list[str]:
    """The targets of the project and the paper, compared with the results."""
    top, bottom, full = (measured.get(kind) for kind in ("opt-deus", "opt-deus/bottom", "full"))
    lines = []
    if top and full:
        ratio = top["step"] / full["step"]
        met = "met" if ratio <= TARGET else "missed"
        lines.append(f"- OpT-DeUS-Top at most {TARGET} of full fine-tuning's step: {ratio:.2f}, {met}.")
    if top and bottom:
        faster = 1 - top["step"] / bottom["step"]
        met = "met" if faster > 0 else "missed"
        lines.append(f"- OpT-DeUS-Top faster than -Btm (the paper: by 14 %): by {faster:.0%}, {met}.")
    return lines


if __name__ == "__main__":
    if sys.argv[1:3] == ["--inner", "whole"]:
        whole(*sys.argv[3:])
    elif sys.argv[1:2] == ["--inner"]:
        inner(*sys.argv[2:])
    else:
        main()
