"""Optimal transport on a GPU: 16 fused layers of the 8B shape, random weights made on the device.

    python benchmarks/transport_gpu.py [--device cuda] [--shape 8b] [--layers 16]

For each layer pair the flow of the paper's Table 1: column alignment, six maps (down's is not needed where it is
zeroed), row alignment and average, everything on the device; once with the fused Triton kernels and once with plain
torch. It reports seconds by stage, and Sinkhorn's time over the time of its passes over the cost at the measured copy
bandwidth; then each pass alone, in bytes moved a second beside that bandwidth. Target: at most 20 s for
all, and within 2 × of that floor. Results go to benchmarks/results/transport_gpu.md with the device's name. It needs a
GPU: where torch sees none it says so and exits with 2 (`--device cpu` runs small shapes with torch alone).
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
from surgeon.common import devices
from surgeon.errors import BadInput
from surgeon.transport import sinkhorn
from surgeon.transport.cost import distances
from surgeon.transport.maps import TransportMap, TransportSettings
from surgeon.transport.passes import TORCH, Passes
from surgeon.transport.sinkhorn import passes_for
from surgeon.transport.solving import solve

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


def whole(name: str, passes: Passes, arguments: argparse.Namespace, device: str, rate: float) -> list[str]:
    """All layers with these passes: the lines of the report."""
    sinkhorn.passes_for = lambda _: passes
    fuse_pair(arguments.shape, 0, device, Stages(device))  # libraries load, kernels are compiled
    stages = Stages(device)
    moved = sum(fuse_pair(arguments.shape, layer, device, stages) for layer in range(1, arguments.layers + 1))
    cost = stages.seconds.pop("of which cost, measured alone")
    taken = stages.seconds["solve"] - cost
    return [
        f"## {name}",
        "",
        f"- {sum(stages.seconds.values()):.2f} s in all; target: at most 20 s for 16 layers of 8b",
        f"- Sinkhorn {taken:.2f} s, {taken * rate / moved:.1f} × what its sweeps over the cost take at"
        f" {rate / 1e9:.0f} GB/s ({moved / rate:.2f} s); target: at most 2 ×",
        "",
        "| stage | seconds |",
        "|---|---:|",
        *(f"| {stage} | {seconds:.3f} |" for stage, seconds in stages.seconds.items()),
        f"| of solve: the cost alone | {cost:.3f} |",
        "",
    ]


def alone(ways: dict[str, Passes], n: int, device: str, rate: float) -> list[str]:
    """Each pass over an n × n matrix: the bytes that it has to move, a second, and their share of a copy's."""
    stages = Stages(device)
    generator = torch.Generator(device).manual_seed(n)
    cost = torch.rand(n, n, generator=generator, device=device)
    g, v = torch.zeros(n, device=device), torch.ones(n, device=device)
    kernel = torch.empty_like(cost)
    lines = []
    for way, passes in ways.items():

        def made(passes: Passes = passes) -> None:
            passes.make_kernel(kernel, g, 0.06)

        # How often each has to read or write the whole matrix.
        steps: dict[str, tuple[int, Callable[[], Any]]] = {
            "make_kernel": (3, made),
            "sweep": (1, lambda passes=passes: passes.sweep(kernel, v)),
            "finish": (2, lambda passes=passes: passes.finish(kernel, v, 1.0)),
        }
        for step, (times, run) in steps.items():
            best = float("inf")
            for _ in range(7):
                kernel.copy_(cost)
                if step != "make_kernel":
                    made()
                stages.seconds.clear()
                stages.time(step, run)
                best = min(best, stages.seconds[step])
            speed = times * cost.nbytes / best
            lines.append(f"| {n} | {step} | {way} | {best * 1e3:.3f} | {speed / 1e9:.0f} | {speed / rate:.2f} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="8b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    try:
        device = devices.resolve(arguments.device)
    except BadInput as error:
        print(f"this benchmark needs a GPU: {error}", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "the processor"
    hidden, key_rows, mlp_rows, _ = SHAPES[arguments.shape]
    sizes = sorted({hidden, key_rows, mlp_rows})
    ways = {"torch": TORCH}
    if all(passes_for(torch.empty(1, n, device=device)) is not TORCH for n in sizes):
        ways = {"fused": passes_for(torch.empty(1, hidden, device=device)), **ways}
    rate = bandwidth(device, Stages(device))
    lines = [
        f"# {arguments.layers} fused layers of the {arguments.shape} shape on {name}, torch {torch.__version__}",
        "",
        *(
            []
            if "fused" in ways
            else ["The fused kernels do not work here (no GPU, no triton, or what a warning said).", ""]
        ),
    ]
    for way, passes in ways.items():
        lines.extend(whole(way, passes, arguments, device, rate))
    lines.extend(
        ["## Passes alone", "", "| n | pass | by | ms | GB/s | of a copy's |", "|---:|---|---|---:|---:|---:|"]
    )
    for n in sizes:
        lines.extend(alone(ways, n, device, rate))
    print("\n".join(lines))
    if device.startswith("cuda"):
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "transport_gpu.md").write_text("\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
