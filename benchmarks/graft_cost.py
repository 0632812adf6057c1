"""What grafts cost: forward and decode over the base's, beside the FLOPs they should cost; memory in training.

    python benchmarks/graft_cost.py --base DIR --work DIR [--plans NAME …] [--no-training]

Each plan is applied to the base; every candidate then runs in a process of its own, in the checkpoint's dtype:
prefill of 4 × 512 tokens, 16 decoded tokens for each of 4 sequences with a cache (best of `rounds`), and two AdamW
steps on 1 × 256 tokens whose peak memory (VmHWM) is compared with full fine-tuning, PEFT LoRA with as many trainable
numbers as the first plan, and each plan training only what is new. FLOPs are counted by torch's own counter on the
same forward. Results go to benchmarks/results/graft_cost_<base>.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from measuring import in_a_process, machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

RESULTS = Path(__file__).resolve().parent / "results"
PLANS = [
    "control-llm",
    "control-llm/dlerp8-mse",
    "control-llm/moe8",
    "control-llm/plerp8",
    "control-llm/stack",
    "neutral-residues",
    "neutral-residues/adapters",
]
BATCH, LENGTH, DECODED = 4, 512, 16


def load(folder: Path) -> Any:
    import surgeon

    return surgeon.open_checkpoint(folder).load()


def speed(folder: Path, rounds: int) -> dict[str, float]:
    """Seconds of prefill and of one decoded token for the batch, FLOPs of prefill, numbers in the model."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from tests.caches import CACHE, cache_in

    model = load(folder)
    ids = torch.randint(3, 4000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    prefill: list[float] = []
    decode: list[float] = []
    with torch.inference_mode():
        with FlopCounterMode(display=False) as counter:
            model(ids)
        for _ in range(rounds):
            begun = time.perf_counter()
            state = cache_in(model(ids, use_cache=True))
            prefill.append(time.perf_counter() - begun)
            token = ids[:, -1:]
            begun = time.perf_counter()
            for _ in range(DECODED):
                token = model(token, **{CACHE: state}, use_cache=True).logits.argmax(-1)
            decode.append((time.perf_counter() - begun) / DECODED)
    return {
        "prefill": min(prefill),
        "decode": min(decode),
        "flops": float(counter.get_total_flops()),
        "parameters": float(sum(p.numel() for p in model.parameters())),
    }


def training(folder: Path, trains: str, numbers: int) -> dict[str, float]:
    """Peak memory in bytes and seconds of a step; `trains` is `all`, `lora` or `new`."""
    import torch

    model = load(folder).train()
    if trains == "lora":
        import peft

        per_rank = sum(
            m.in_features + m.out_features
            for name, m in model.named_modules()
            if name.endswith(("gate_proj", "up_proj", "down_proj"))
        )
        rank = max(1, round(numbers / per_rank))
        settings = peft.LoraConfig(r=rank, target_modules=["gate_proj", "up_proj", "down_proj"])
        model = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    elif trains == "new":
        new = set(json.loads((folder / "surgery.json").read_text())["new_tensors"])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in new)
    chosen = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(chosen, lr=1e-5, foreach=False)
    ids = torch.randint(3, 4000, (1, 256), generator=torch.Generator().manual_seed(0))
    more = {"domain_ids": torch.tensor([0])} if hasattr(model.config, "surgery") else {}
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        optimiser.zero_grad()
        model(input_ids=ids, labels=ids, **more).loss.backward()
        optimiser.step()
        seconds.append(time.perf_counter() - begun)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {
        "peak": float(peak.split()[1]) * 1024,
        "step": min(seconds),
        "trainable": float(sum(p.numel() for p in chosen)),
    }


def speed_table(outs: dict[str, Path], rounds: int) -> list[str]:
    # In turn, so that a slow minute of the machine does not fall on one candidate alone.
    measured: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for name, folder in outs.items():
            found = in_a_process(__file__, "speed", folder, 2)
            earlier = measured.setdefault(name, found)
            measured[name] = {key: min(value, earlier[key]) for key, value in found.items()}
    base = measured["base"]
    lines = [
        f"Prefill {BATCH} × {LENGTH} tokens, best of {rounds} turns of two; × is over the base's.",
        "",
        "| model | prefill s | × | FLOPs × | time × / FLOPs × | decode ms/token | × | weights × |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, found in measured.items():
        prefill, decode = found["prefill"] / base["prefill"], found["decode"] / base["decode"]
        flops, weights = found["flops"] / base["flops"], found["parameters"] / base["parameters"]
        lines.append(
            f"| {name} | {found['prefill']:.3f} | {prefill:.3f} | {flops:.3f} | {prefill / flops:.3f} |"
            f" {found['decode'] * 1e3:.1f} | {decode:.3f} | {weights:.3f} |"
        )
        print(lines[-1], flush=True)
    return lines


def training_table(base: Path, outs: dict[str, Path]) -> list[str]:
    first = next(name for name in outs if name != "base")
    rows = {name: in_a_process(__file__, "training", outs[name], "new", 0) for name in outs if name != "base"}
    numbers = int(rows[first]["trainable"])
    rows = {
        "full fine-tuning": in_a_process(__file__, "training", base, "all", 0),
        f"PEFT LoRA on the FFN, as many numbers as {first}": in_a_process(__file__, "training", base, "lora", numbers),
    } | rows
    lines = [
        "Two AdamW steps on 1 × 256 tokens, everything in the checkpoint's dtype; peak of the whole process.",
        "",
        "| trained | trainable | peak GB | step s |",
        "|---|---:|---:|---:|",
    ]
    for name, found in rows.items():
        lines.append(f"| {name} | {found['trainable']:,.0f} | {found['peak'] / 1e9:.2f} | {found['step']:.2f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the outputs, removed afterwards")
    parser.add_argument("--plans", nargs="*", default=PLANS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--training", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    import surgeon

    arguments.work.mkdir(parents=True, exist_ok=True)
    outs = {"base": arguments.base}
    try:
        for plan in arguments.plans:
            outs[plan] = arguments.work / plan.replace("/", "-")
            surgeon.apply(plan, str(arguments.base), outs[plan])
        load = os.getloadavg()[0]
        lines = [f"# What grafts cost on {arguments.base.name} ({machine()}, load {load:.1f})", ""]
        lines += speed_table(outs, arguments.rounds)
        if arguments.training:
            lines += ["", *training_table(arguments.base, outs)]
    finally:
        for name, folder in outs.items():
            if name != "base":
                shutil.rmtree(folder, ignore_errors=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"graft_cost_{arguments.base.name}.md").write_text("\n".join([*lines, ""]))


def inner(kind: str, folder: str, *arguments: str) -> None:
    found = (
        speed(Path(folder), int(arguments[0]))
        if kind == "speed"
        else training(Path(folder), arguments[0], int(arguments[1]))
    )
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inner"]:
        inner(*sys.argv[2:])
    else:
        main()
