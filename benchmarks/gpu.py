"""surgeon on one GPU in about eight minutes: transport, verify, decoding and training, each beside its peer or floor.

    python -m benchmarks.gpu --work DIR [--device cuda] [--tiny]

On a random Llama of 1.1B parameters in bfloat16. Transport: maps of n rows of n numbers, over the time in which a copy
moves what Sinkhorn's passes have to read (n × n × 4 bytes an iteration), and POT's iteration on the same device.
Verify: every logit of an output, in two dtypes. Decoding: tokens a second of each graft over the base's, of some
compiled too. Training: tokens a second and peak memory of `surgeon train` on new layers, beside a loop of transformers
and torch on the same tensors, whose AdamW keeps no float32 masters.

Best of three but for `surgeon train`, each time with the device's work ended. The table goes to results/gpu.md with the
device's name, unless `--tiny`, which runs the same code on a small model anywhere.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ot
import torch
import yaml
from transformers import AutoModelForCausalLM

import surgeon
from benchmarks.measuring import machine
from benchmarks.random_llama import WORDS, make_base
from surgeon.transport.cost import distances
from surgeon.transport.maps import TransportSettings
from surgeon.transport.solving import solve

PAGE = Path(__file__).resolve().parent / "results" / "gpu.md"
ROUNDS = 3
LARGE = {"width": 2048, "inner": 8192, "layers": 16, "heads": 32, "groups": 8}
TINY = {"width": 64, "inner": 128, "layers": 4, "heads": 4, "groups": 2}
# Compiled too: more would take more than eight minutes.
COMPILED = ("base", "neutral-residues", "mixture-of-control")
PLANS = ("opt-deus", "neutral-residues", "control-llm", "mixture-of-control", "pmoe")
BATCH, LENGTH, STEPS = 8, 512, 30


def wait(device: str) -> None:
    """Wait until the device has finished its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def best(run: Callable[[], Any], device: str) -> float:
    """Return the least seconds of a call, after one that does not count."""
    run()
    found = []
    for _ in range(ROUNDS):
        wait(device)
        begun = time.perf_counter()
        run()
        wait(device)
        found.append(time.perf_counter() - begun)
    return min(found)


def transport(device: str, tiny: bool) -> Iterator[str]:
    """Yield rows of maps between trained-like rows: seconds by each way, beside the floor of a copy's bandwidth."""
    large = torch.ones(1 << (20 if tiny else 28), device=device)
    rate = 2 * large.nbytes / best(lambda: large.clone(), device)
    for n in (64, 128) if tiny else (2048, 4096, 8192):
        drawn = torch.Generator(device).manual_seed(n)
        spectrum = torch.arange(1, n + 1, device=device).float().rsqrt()
        lower, upper = (torch.randn(n, n, generator=drawn, device=device) * spectrum for _ in range(2))
        settings = TransportSettings()
        floor = 4.0 * n * n * solve(lower, upper, settings).solution.iterations / rate
        seconds = best(lambda: solve(lower, upper, settings), device)  # noqa: B023
        yield f"| transport, n = {n} | surgeon | {seconds:.3f} s | {seconds / floor:.1f} × the floor |"
        cost, even = distances(lower, upper), torch.full((n,), 1 / n, device=device)
        reg = settings.reg * float(cost.max())
        how: dict[str, Any] = {"method": "sinkhorn_log", "numItermax": 100, "stopThr": 0, "warn": False}
        seconds = best(lambda: ot.sinkhorn(even, even, cost, reg, **how), device)  # noqa: B023
        yield f"| transport, n = {n} | POT, 100 iterations | {seconds:.3f} s | |"


def outputs(work: Path, tiny: bool) -> dict[str, Path]:
    """Make the base and an output of each plan; return their folders, the base first."""
    documents = {"documents": 40 if tiny else 400, "length": LENGTH, "tied": True, "dtype": "bfloat16"}
    make_base(work / "base", **(TINY if tiny else LARGE), **documents)
    for plan in PLANS:
        surgeon.apply(plan, str(work / "base"), work / plan)
    return {name: work / name for name in ("base", *PLANS)}


def checked(made: dict[str, Path], device: str) -> Iterator[str]:
    """Yield rows of `verify` in two dtypes."""
    for dtype in ("bfloat16", "float32"):
        begun = time.perf_counter()
        found = surgeon.verify(made["base"], made["opt-deus"], dtypes=(dtype,), device=device)
        said = "holds" if found.holds else "does not hold"
        yield f"| verify | {dtype} | {time.perf_counter() - begun:.1f} s | {said} |"


def decoding(made: dict[str, Path], device: str, tiny: bool) -> Iterator[str]:
    """Yield rows of greedy decoding with a static cache, eager and compiled, batch 1."""
    tokens, base = (8 if tiny else 128), {}
    ids = torch.randint(3, WORDS, (1, 32), generator=torch.Generator().manual_seed(0)).to(device)
    how = {"cache_implementation": "static", "disable_compile": True, "do_sample": False, "eos_token_id": None}
    for name, folder in made.items():
        for way in ("eager", "compiled") if name in COMPILED else ("eager",):
            torch.compiler.reset()
            load: dict[str, Any] = {"dtype": torch.bfloat16, "trust_remote_code": True}
            model = AutoModelForCausalLM.from_pretrained(folder, **load).to(device).eval()
            if way == "compiled":
                model.forward = torch.compile(model.forward, backend="eager" if tiny else "inductor")
            seconds = best(lambda: model.generate(ids, max_new_tokens=tokens, **how), device)  # noqa: B023
            base.setdefault(way, seconds)
            yield f"| decode, {name} | {way} | {tokens / seconds:.1f} tokens/s | {seconds / base[way]:.2f} × the base |"


def training(made: dict[str, Path], work: Path, device: str, tiny: bool) -> Iterator[str]:
    """Yield rows of training new layers: `surgeon train` beside a loop on the same tensors."""
    batch, length, steps = (2, 32, 4) if tiny else (BATCH, LENGTH, STEPS)
    out, config = made["opt-deus"], work / "train.yaml"
    config.write_text(yaml.safe_dump({
        "surgeon_train": 1, "steps": steps, "batch": batch, "length": length, "packing": "joined", "save_every": 1000,
        "evaluate_every": 1000, "validation_sequences": 1, "optimizer": {"lr": 1e-5, "warmup": 1},
        "sources": [{"name": "text", "path": "text.txt", "share": 1, "validation": 0.05}],
    }))  # fmt: skip
    trained = surgeon.train(out, config, work / "run", device=device)
    assert trained is not None and trained.tokens_per_second is not None
    rate, peak = trained.tokens_per_second, trained.peak_memory
    yield f"| train new layers | surgeon train | {rate:,.0f} tokens/s | peak {peak / 2**30:.1f} GiB |"
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, trust_remote_code=True).to(device).train()
    new = json.loads((out / "surgery.json").read_text())["new_tensors"]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in new)
    ours = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(ours, lr=1e-5, fused=True)
    drawn = torch.randint(3, WORDS, (batch, length), generator=torch.Generator().manual_seed(2)).to(device)

    def step() -> None:
        model(input_ids=drawn, labels=drawn, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(ours, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    seconds = best(lambda: [step() for _ in range(steps)], device) / steps
    peak = torch.cuda.max_memory_allocated() if device.startswith("cuda") else 0
    shown = f"peak {peak / 2**30:.1f} GiB" if peak else ""
    yield f"| train new layers | a plain loop | {batch * length / seconds:,.0f} tokens/s | {shown} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    work, device, tiny = given.work.resolve(), given.device, given.tiny
    work.mkdir(parents=True)
    try:
        made = outputs(work, tiny)
        lines = [
            f"# surgeon on {machine(device)}, torch {torch.__version__}",
            "",
            "| what | by | | |",
            "|---|---|---:|---|",
        ]
        parts = transport(device, tiny), checked(made, device), decoding(made, device, tiny)
        for part in (*parts, training(made, work, device, tiny)):
            for line in part:
                print(line, flush=True)
                lines.append(line)
    finally:
        shutil.rmtree(work)
    if not tiny:
        PAGE.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
