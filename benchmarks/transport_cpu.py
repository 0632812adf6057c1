"""Optimal transport on the CPU, compared with POT: time, peak memory and marginal errors.

    python benchmarks/transport_cpu.py --sizes 1024,2048,4096,8192 --dim 2048
    python benchmarks/transport_cpu.py --pair 8b

The first compares solvers on square problems; the second fuses the matrices of one layer pair of a Llama-3 shape
(q, k, v, o, gate, up; down's map is not needed where it is zeroed) and compares the time with the limit of the measured
matrix rate and memory bandwidth. Every candidate runs in a separate process. Results go to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import processor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from surgeon.transport.cost import distances, product
from surgeon.transport.maps import TransportMap, TransportSettings
from surgeon.transport.solving import solve

RESULTS = Path(__file__).resolve().parent / "results"
REG = 0.06
# POT's plain iteration may need too many iterations; the table says where it was stopped.
MOST_ITERATIONS = 2000
TOLERANCE = TransportSettings().tolerance
CANDIDATES = ("pot float64", "pot float32", "surgeon")
# hidden size, key/value rows, MLP rows, new layers of the paper's model
SHAPES = {"1b": (2048, 512, 8192, 8), "8b": (4096, 1024, 14336, 16)}


def rows_like(kind: str, n: int, d: int, seed: int) -> torch.Tensor:
    """Rows as at initialisation (`gaussian`, std 0.02) or as trained: norms that differ and a decaying spectrum.

    The trained kinds differ in size, and with it in how sharp the plan is: `uneven` spreads a row over about a fifth
    of the others, `sharp` over some per cent, as the entropies of the paper's Table 8 have it for queries and keys.
    """
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(n, d, generator=generator)
    if kind == "gaussian":
        return made.mul_(0.02)
    made.mul_(torch.arange(1, d + 1).float().rsqrt())
    size = {"uneven": 1.0, "sharp": 2.5}[kind]
    return torch.nn.functional.normalize(made).mul_(size).mul_((torch.randn(n, 1, generator=generator) * 0.4).exp_())


def resident(what: str) -> int:
    """Bytes of this process in memory now (`VmRSS`) or at most since `forget_peak` (`VmHWM`); Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {what}")


def forget_peak() -> int:
    """Reset the peak; returns the bytes in memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def run_candidate(name: str, kind: str, n: int, d: int) -> dict[str, Any]:
    """One problem by one candidate, in this process. Inputs are in the candidate's own dtype from the start."""
    x, y = rows_like(kind, n, d, 1), rows_like(kind, n, d, 2)
    candidate = {"pot float64": pot_float64, "pot float32": pot_float32, "surgeon": surgeon}[name]
    # Libraries load and thread pools start on the first call.
    small = rows_like(kind, 64, d, 3)
    candidate(small, small.clone())
    runs = [candidate(x, y) for _ in range(5 if n <= 4096 else 3)]
    best = min(runs, key=lambda run: float(run["seconds"]))
    # Later runs reuse memory that the allocator kept: only the first shows the need.
    peak = max(run["peak_bytes"] for run in runs)
    return {"candidate": name, "kind": kind, "n": n, "d": d, **best, "peak_bytes": peak}


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    made = run()
    return made, time.perf_counter() - start


def surgeon(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    before = forget_peak()
    solved, seconds = timed(lambda: solve(x, y, TransportSettings(reg=REG, tolerance=TOLERANCE)))
    peak = resident("VmHWM") - before
    plan = solved.matrix()
    iterations = solved.solution.iterations
    del solved
    cost_seconds = timed(lambda: distances(x, y))[1]
    return {
        "seconds": seconds,
        "cost_seconds": cost_seconds,
        "sinkhorn_seconds": seconds - cost_seconds,
        "iterations": iterations,
        "peak_bytes": peak,
        "marginal_error": marginal_error(plan),
        "entropy": entropy(plan),
    }


def pot_float64(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    return by_pot(x.double().numpy(), y.double().numpy())


def pot_float32(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    return by_pot(x, y)


def by_pot(x: Any, y: Any) -> dict[str, Any]:
    """POT as its documentation has it: Euclidean `ot.dist`, then `ot.sinkhorn`; stops at about our tolerance."""
    import ot

    n = len(x)
    # POT stops on the L2 norm of the column error: this much of it is at most TOLERANCE in L1.
    arguments = {"numItermax": MOST_ITERATIONS, "stopThr": TOLERANCE / n**0.5, "log": True, "warn": False}
    before = forget_peak()
    weights = ot.backend.get_backend(x).ones(n, type_as=x) / n
    cost, cost_seconds = timed(lambda: ot.dist(x, y, metric="euclidean"))
    (plan, log), sinkhorn_seconds = timed(lambda: ot.sinkhorn(weights, weights, cost, REG, **arguments))
    peak = resident("VmHWM") - before
    return {
        "seconds": cost_seconds + sinkhorn_seconds,
        "cost_seconds": cost_seconds,
        "sinkhorn_seconds": sinkhorn_seconds,
        "iterations": int(log["niter"]) + 1,
        "peak_bytes": peak,
        "marginal_error": marginal_error(torch.as_tensor(plan)),
        "entropy": entropy(torch.as_tensor(plan)),
    }


def marginal_error(plan: torch.Tensor) -> float:
    """The larger of both L1 distances from uniform, in float64."""
    n, m = plan.shape
    rows = (plan.sum(1, dtype=torch.float64) - 1 / n).abs().sum()
    columns = (plan.sum(0, dtype=torch.float64) - 1 / m).abs().sum()
    return float(max(rows, columns))


def entropy(plan: torch.Tensor) -> float:
    """In nats, by rows, so that no second matrix is needed."""
    return -sum(float(torch.xlogy(row, row).sum(dtype=torch.float64)) for row in plan)


def measured_rates() -> dict[str, float]:
    """Matrix rate (FLOP/s) of the product this uses, and bytes a second of reading one large buffer."""
    x = torch.randn(4096, 4096)
    product(x, x.T)
    rate = 2 * 4096**3 / min(timed(lambda: product(x, x.T))[1] for _ in range(5))
    large = torch.ones(1 << 28)
    vector = torch.ones(1 << 14)
    reading = large.numel() * 4 / min(timed(lambda: large.view(1 << 14, -1) @ vector)[1] for _ in range(5))
    return {"flop_per_second": rate, "bytes_per_second": reading}


def run_pair(shape: str, kind: str) -> dict[str, Any]:
    """Fuse the matrices of one layer pair (bfloat16 in, bfloat16 out) by the flow of the paper's Table 1."""
    hidden, key_rows, mlp_rows, new_layers = SHAPES[shape]
    sizes = {"query": hidden, "key": key_rows, "value": key_rows, "output": hidden, "gate": mlp_rows, "up": mlp_rows}
    layers = [
        {role: rows_like(kind, n, hidden, 10 * layer + i).bfloat16() for i, (role, n) in enumerate(sizes.items())}
        for layer in (1, 2)
    ]
    rates = measured_rates()
    solve(layers[0]["key"][:64], layers[1]["key"][:64], TransportSettings())
    output_map: TransportMap | None = None
    stages: dict[str, float] = dict.fromkeys(("align columns", "solve", "align rows", "convert and average"), 0.0)
    flops = passes_bytes = 0.0
    reports: dict[str, Any] = {}
    before = forget_peak()

    def stage(name: str, run: Callable[[], Any]) -> Any:
        made, seconds = timed(run)
        stages[name] += seconds
        return made

    start = time.perf_counter()
    for role, n in sizes.items():
        lower = stage("convert and average", layers[0][role].float)
        upper = stage("convert and average", layers[1][role].float)
        if role in ("gate", "up"):
            assert output_map is not None
            lower = stage("align columns", lambda lower=lower, by=output_map: by.align_columns(lower))
            flops += 2 * n * hidden * hidden
        solved = stage("solve", lambda lower=lower, upper=upper: solve(lower, upper, TransportSettings(reg=REG)))
        flops += 2 * n * n * hidden
        # The least memory traffic: write the cost, read and write K, one read a pass, read and write T.
        passes_bytes += (5 + solved.solution.iterations) * n * n * 4
        reports[role] = solved.solution.to_report()
        if role == "output":  # zeroed afterwards: its map is needed, its fused weight is not
            output_map = solved
            continue
        aligned = stage("align rows", lambda solved=solved, lower=lower: solved.align_rows(lower))
        flops += 2 * n * n * hidden
        stage("convert and average", lambda a=aligned, b=upper: b.add_(a).mul_(0.5).bfloat16())
        del solved, aligned, lower, upper
    seconds = time.perf_counter() - start
    floor = flops / rates["flop_per_second"] + passes_bytes / rates["bytes_per_second"]
    return {
        "shape": shape,
        "kind": kind,
        "seconds": seconds,
        "stages": stages,
        "peak_bytes": resident("VmHWM") - before,
        "flop": flops,
        "bytes": passes_bytes,
        **rates,
        "floor_seconds": floor,
        "times_floor": seconds / floor,
        "new_layers": new_layers,
        "all_layers_seconds": seconds * new_layers,
        "maps": reports,
    }


def in_process(*words: str) -> dict[str, Any]:
    """This script in a separate process, its result as JSON on the last line."""
    ran = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    made: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return made


def machine() -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        # Other work on the machine shows in every time: read the tables with this.
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "pot": version("pot"),
    }


def compare(sizes: list[int], d: int, kinds: list[str]) -> None:
    found: list[dict[str, Any]] = []
    rates = measured_rates()
    for kind in kinds:
        for n in sizes:
            for name in CANDIDATES:
                found.append(in_process("--candidate", name, "--kinds", kind, "--sizes", str(n), "--dim", str(d)))
                if name == "surgeon":
                    found[-1]["floor"] = floor(n, d, found[-1]["iterations"], rates)
                print(row(found[-1], found), flush=True)
    text = [
        f"# Transport on the CPU: {describe(machine())}",
        "",
        f"Square problems of n rows of {d}, reg {REG}, raw Euclidean cost; best of 3–5 runs; every candidate stops at"
        f" about {TOLERANCE:g} L1 marginal error, or after {MOST_ITERATIONS} iterations. Memory is the peak beyond the"
        " inputs. `×` is the time against surgeon's, cost included; the floor is the cost's products at"
        f" {rates['flop_per_second'] / 1e9:.0f} GFLOP/s and what the iterations have to move at"
        f" {rates['bytes_per_second'] / 1e9:.1f} GB/s, both measured here.",
        "",
        HEADER,
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(row(one, found) for one in found),
    ]
    write("transport_cpu", text)


def floor(n: int, d: int, iterations: int, rates: dict[str, float]) -> float:
    """Seconds that a solver with such iterations cannot beat: products of the cost, and its passes over memory."""
    # The least traffic: write the cost, read and write K, one read a pass, read and write T.
    return 2 * n * n * d / rates["flop_per_second"] + (5 + iterations) * n * n * 4 / rates["bytes_per_second"]


HEADER = "| rows | n | solver | cost s | sinkhorn s | total s | × | × floor | iterations | error | entropy | peak MB |"


def row(one: dict[str, Any], found: list[dict[str, Any]]) -> str:
    ours = [r for r in found if r["candidate"] == "surgeon" and (r["n"], r["kind"]) == (one["n"], one["kind"])]
    times = f"{one['seconds'] / ours[0]['seconds']:.1f}" if ours else ""
    least = f"{one['seconds'] / one['floor']:.2f}" if "floor" in one else ""
    return (
        f"| {one['kind']} | {one['n']} | {one['candidate']} | {one['cost_seconds']:.2f} |"
        f" {one['sinkhorn_seconds']:.2f} | {one['seconds']:.2f} | {times} | {least} |"
        f" {one['iterations']} |"
        f" {one['marginal_error']:.1e} | {one['entropy']:.2f} | {one['peak_bytes'] / 1e6:.0f} |"
    )


def pair(shape: str, kind: str) -> None:
    found = in_process("--measure-pair", shape, "--kinds", kind)
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found["stages"].items())
    text = [
        f"# One layer pair of the {shape.upper()} shape on the CPU: {describe(machine())}",
        "",
        f"- {found['seconds']:.1f} s for the pair ({stages}); {found['new_layers']} such layers:"
        f" {found['all_layers_seconds'] / 60:.1f} min",
        f"- floor: {found['flop'] / 1e12:.2f} TFLOP at {found['flop_per_second'] / 1e9:.0f} GFLOP/s and"
        f" {found['bytes'] / 1e9:.1f} GB at {found['bytes_per_second'] / 1e9:.1f} GB/s ="
        f" {found['floor_seconds']:.1f} s; measured time is {found['times_floor']:.2f} × that",
        f"- peak memory beyond the bfloat16 weights: {found['peak_bytes'] / 1e9:.2f} GB",
        f"- rows: {kind}; reg {REG}",
        "",
        "| map | rows | iterations | converged | row error | column error | entropy (nats) |",
        "|---|---:|---:|---|---:|---:|---:|",
        *(
            f"| {role} | {r['rows']} | {r['iterations']} | {r['converged']} | {r['row_error']:.1e} |"
            f" {r['column_error']:.1e} | {r['entropy']:.2f} |"
            for role, r in found["maps"].items()
        ),
    ]
    print("\n".join(text))
    write(f"transport_cpu_pair_{shape}", text)


def describe(on: dict[str, Any]) -> str:
    versions = f"torch {on['torch']}, POT {on['pot']}"
    return f"{on['cpu']}, {on['cores']} cores, {on['instructions']}, {versions}, load {on['load_average']:.1f}"


def write(name: str, text: list[str]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text("\n".join(text) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1024,2048,4096,8192")
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--kinds", default="gaussian,uneven,sharp", help="of rows: gaussian, uneven, sharp")
    parser.add_argument("--pair", choices=sorted(SHAPES), help="fuse one layer pair of this shape instead")
    parser.add_argument("--candidate", choices=CANDIDATES, help=argparse.SUPPRESS)
    parser.add_argument("--measure-pair", choices=sorted(SHAPES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes, kinds = [int(n) for n in given.sizes.split(",")], given.kinds.split(",")
    if given.candidate:
        print(json.dumps(run_candidate(given.candidate, kinds[0], sizes[0], given.dim)))
    elif given.measure_pair:
        print(json.dumps(run_pair(given.measure_pair, kinds[-1])))
    elif given.pair:
        pair(given.pair, kinds[-1])
    else:
        print(HEADER)
        compare(sizes, given.dim, kinds)


if __name__ == "__main__":
    main()
