"""The cost of training and decoding with PMoE slots and control states, compared with PEFT LoRA of equal size.

    python benchmarks/expert_cost.py --base DIR --work DIR [--batch B] [--length T] [--steps N] [--device cuda]

Every candidate runs in a separate process, in the checkpoint's dtype, in turns: AdamW steps on B × T tokens (the
best one's seconds, the process's peak memory) and 32 decoded tokens for each of B sequences with a cache. Candidates:
Mixture-of-Control and Parallel Control as shipped, PEFT LoRA of as many numbers on the modules that the paper's
baseline adapts, PMoE with one and with eight slots, one PEFT LoRA of the same rank and targets, full fine-tuning.
LoRA stays unmerged, as the others cannot be merged. Results go to benchmarks/results/expert_cost_<base>.md.
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
# A plan, or a LoRA by PEFT.
CANDIDATES = {
    "full fine-tuning": "full",
    "LoRA, as many numbers as Mixture-of-Control": "lora-moc",
    "Parallel Control": "mixture-of-control/parallel-control",
    "Mixture-of-Control (cosine gate, mean)": "mixture-of-control",
    "Mixture-of-Control (linear gate, mode)": "mixture-of-control/linear",
    "LoRA rank 4 at query and value": "lora-4",
    "PMoE, one slot": "pmoe",
    "PMoE, eight slots": "pmoe/eight-slots",
}
BASELINES = {"mixture-of-control": "lora-moc", "pmoe": "lora-4"}
# The commonsense baselines of LoRA, DoRA and Parallel Control adapt these.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "up_proj", "down_proj"]
DECODED = 32


def load(folder: Path, kind: str, numbers: int, device: str) -> Any:
    """The model with exactly the trained tensors unfrozen."""
    import surgeon

    model = surgeon.open_checkpoint(folder).load(device=device)
    if kind == "full":
        return model.requires_grad_(True)
    if not kind.startswith("lora"):
        model.freeze_base()
        return model
    import peft

    targets, rank = (["q_proj", "v_proj"], 4) if kind == "lora-4" else (LORA_TARGETS, 0)
    per_rank = sum(
        m.in_features + m.out_features for name, m in model.named_modules() if name.rpartition(".")[2] in targets
    )
    settings = peft.LoraConfig(r=rank or max(1, round(numbers / per_rank)), lora_alpha=16, target_modules=targets)
    return peft.get_peft_model(model, settings, autocast_adapter_dtype=False)


def inner(folder: str, kind: str, numbers: str, batch: str, length: str, steps: str, device: str) -> None:
    """One candidate: seconds of a step and of a decoded token, peak memory, number of trained parameters."""
    import torch

    from tests.caches import CACHE, cache_in

    model = load(Path(folder), kind, int(numbers), device).train()
    on_gpu = device != "cpu"

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    chosen = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(chosen, lr=1e-5, foreach=on_gpu)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 4000, (int(batch), int(length)), generator=generator).to(device)
    seconds, losses = [], []
    for _ in range(int(steps)):
        wait()
        begun = time.perf_counter()
        optimiser.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimiser.step()
        wait()
        seconds.append(time.perf_counter() - begun)
        losses.append(loss.item())
    # A few steps at a small rate on random tokens: the loss must change, it need not fall.
    assert len(set(losses)) > 1, f"{kind} does not train: {losses}"
    if on_gpu:
        peak = float(torch.cuda.max_memory_allocated())
    else:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        peak = float(line.split()[1]) * 1024
    model.eval()
    with torch.inference_mode():
        cache = cache_in(model(input_ids=ids[:, :32], use_cache=True))
        token = ids[:, 32:33]
        for _ in range(4):
            token = model(input_ids=token, **{CACHE: cache}, use_cache=True).logits.argmax(-1)
        wait()
        begun = time.perf_counter()
        for _ in range(DECODED):
            token = model(input_ids=token, **{CACHE: cache}, use_cache=True).logits.argmax(-1)
        wait()
        decode = (time.perf_counter() - begun) / DECODED
    trainable = float(sum(p.numel() for p in chosen))
    print(json.dumps({"step": min(seconds), "peak": peak, "decode": decode, "trainable": trainable}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the outputs, removed afterwards")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--without", nargs="*", default=[], help="candidates to leave out")
    arguments = parser.parse_args()
    import surgeon

    arguments.work.mkdir(parents=True, exist_ok=True)
    candidates = {name: kind for name, kind in CANDIDATES.items() if kind not in arguments.without}
    outs: dict[str, Path] = {}
    measured: dict[str, dict[str, float]] = {}
    shape = (arguments.batch, arguments.length, arguments.steps, arguments.device)
    try:
        for kind in candidates.values():
            outs[kind] = arguments.base
            if kind != "full" and not kind.startswith("lora"):
                outs[kind] = arguments.work / kind.replace("/", "-")
                surgeon.apply(kind, str(arguments.base), outs[kind])
        manifest = json.loads((outs["mixture-of-control"] / "surgery.json").read_text())
        numbers = _numbers(outs["mixture-of-control"], set(manifest["new_tensors"]))
        # In turn, so that a slow minute of the machine does not affect one candidate alone.
        for _ in range(arguments.rounds):
            for name, kind in candidates.items():
                found = in_a_process(__file__, outs[kind], kind, numbers, *shape)
                earlier = measured.setdefault(name, found)
                measured[name] = {key: min(value, earlier[key]) for key, value in found.items()}
                print(name, measured[name], flush=True)
    finally:
        shutil.rmtree(arguments.work, ignore_errors=True)
    RESULTS.mkdir(exist_ok=True)
    where = arguments.base.name if arguments.device == "cpu" else f"{arguments.base.name}_{arguments.device}"
    lines = _table(arguments, candidates, measured)
    (RESULTS / f"expert_cost_{where}.md").write_text("\n".join([*lines, ""]))


def _numbers(folder: Path, names: set[str]) -> int:
    import surgeon

    return sum(info.numel for name, info in surgeon.open_checkpoint(folder).tensors.items() if name in names)


def _table(
    arguments: argparse.Namespace, candidates: dict[str, str], measured: dict[str, dict[str, float]]
) -> list[str]:
    where = f"{machine(arguments.device)}, load {os.getloadavg()[0]:.1f}"
    lines = [
        f"# Slots and control states beside LoRA, on {arguments.base.name} ({where})",
        "",
        f"AdamW on {arguments.batch} × {arguments.length} tokens, best of {arguments.rounds} × {arguments.steps} steps;"
        f" decoding {arguments.batch} sequences. × is over the LoRA above: of equal size for Mixture-of-Control, of"
        " equal rank and targets for PMoE.",
        "",
        "| trained | trainable | step s | × | peak GB | × | decode tokens/s | × |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, found in measured.items():
        kind = candidates[name].partition("/")[0]
        beside = next((measured[n] for n, k in candidates.items() if k == BASELINES.get(kind)), None)
        ratios = {key: f"{found[key] / beside[key]:.2f}" if beside else "" for key in ("step", "peak")}
        faster = f"{beside['decode'] / found['decode']:.2f}" if beside else ""
        lines.append(
            f"| {name} | {found['trainable']:,.0f} | {found['step']:.3f} | {ratios['step']} |"
            f" {found['peak'] / 1e9:.2f} | {ratios['peak']} | {arguments.batch / found['decode']:.1f} | {faster} |"
        )
    return lines


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inner"]:
        inner(*sys.argv[2:])
    else:
        main()
