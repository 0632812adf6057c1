"""Optimal transport on a GPU: 16 fused layers of the 8B shape, random weights made on the device.

    python benchmarks/transport_gpu.py [--device cuda] [--shape 8b] [--layers 16]

For each layer pair the flow of the paper's Table 1: column alignment, six maps (down's is not needed where it is
zeroed), row alignment and average, everything on the device. Told are seconds by stage, and Sinkhorn's time over what
its passes over the cost would take at the measured copy bandwidth. Target: at most 20 s for all, and within 2 × of
that floor. Results go to benchmarks/results/transport_gpu.md with the device's name. Where torch sees no such device
it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.transport_cpu import SHAPES
from surgeon import devices
from surgeon.errors import BadInput
from surgeon.transport import TransportMap, TransportSettings, solve
from surgeon.transport.cost import distances

RESULTS = Path(__file__).resolve().parent / "results"


class Stages:
    """Seconds by stage; each waits for the device, so that its time is its own."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)

    def wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)

    def time(self, name: str, run: Callable[[], Any]) -> Any:
        self.wait()
        begun = time.perf_counter()
        made = run()
        self.wait()
        self.seconds[name] += time.perf_counter() - begun
        return made


def rows(n: int, d: int, seed: int, device: str) -> torch.Tensor:
    """Rows as trained ones: norms that differ and a decaying spectrum (`sharp` of transport_cpu)."""
    generator = torch.Generator(device).manual_seed(seed)
    made = torch.randn(n, d, generator=generator, device=device)
    made.mul_(torch.arange(1, d + 1, device=device).float().rsqrt())
    norms = (torch.randn(n, 1, generator=generator, device=device) * 0.4).exp_()
    return torch.nn.functional.normalize(made).mul_(2.5).mul_(norms).bfloat16()


def fuse_pair(shape: str, layer: int, device: str, stages: Stages) -> float:
    """One fused layer; returns the bytes that Sinkhorn's passes over the cost have to move at least."""
    hidden, key_rows, mlp_rows, _ = SHAPES[shape]
    sizes = {"query": hidden, "key": key_rows, "value": key_rows, "output": hidden, "gate": mlp_rows, "up": mlp_rows}
    output: TransportMap | None = None
    moved = 0.0
    for number, (role, n) in enumerate(sizes.items()):
        lower, upper = (rows(n, hidden, 100 * layer + 10 * number + side, device).float() for side in (0, 1))
        if role in ("gate", "up"):
            assert output is not None
            lower = stages.time("align columns", lambda lower=lower, by=output: by.align_columns(lower))
        solved = stages.time("solve", lambda a=lower, b=upper: solve(a, b, TransportSettings()))
        stages.time("of which cost, measured alone", lambda a=lower, b=upper: distances(a, b))
        moved += 4.0 * n * n * solved.solution.iterations
        aligned = stages.time("align rows", lambda a=lower, s=solved: s.align_rows(a))
        stages.time("convert and average", lambda a=aligned, b=upper: a.add_(b).mul_(0.5).bfloat16())
        if role == "output":
            output = solved
    return moved


def bandwidth(device: str, stages: Stages) -> float:
    """Bytes a second of copying one large buffer, read and write counted."""
    source = torch.ones(1 << 28 if device.startswith("cuda") else 1 << 24, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        stages.wait()
        begun = time.perf_counter()
        target.copy_(source)
        stages.wait()
        best = min(best, time.perf_counter() - begun)
    return 2 * source.nbytes / best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="8b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    try:
        device = devices.resolve(arguments.device)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "the processor"
    stages = Stages(device)
    fuse_pair(arguments.shape, 0, device, stages)  # libraries load, kernels are chosen
    stages = Stages(device)
    moved = sum(fuse_pair(arguments.shape, layer, device, stages) for layer in range(1, arguments.layers + 1))
    cost = stages.seconds.pop("of which cost, measured alone")
    rate = bandwidth(device, stages)
    sinkhorn = stages.seconds["solve"] - cost
    lines = [
        f"# {arguments.layers} fused layers of the {arguments.shape} shape on {name}, torch {torch.__version__}",
        "",
        f"- {sum(stages.seconds.values()):.2f} s in all; target: at most 20 s for 16 layers of 8b",
        f"- Sinkhorn {sinkhorn:.2f} s; its passes over the cost at {rate / 1e9:.0f} GB/s: {moved / rate:.2f} s",
        "",
        "| stage | seconds |",
        "|---|---:|",
        *(f"| {stage} | {seconds:.3f} |" for stage, seconds in stages.seconds.items()),
        f"| of solve: the cost alone | {cost:.3f} |",
    ]
    print("\n".join(lines))
    if device.startswith("cuda"):
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "transport_gpu.md").write_text("\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
