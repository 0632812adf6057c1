"""The error of bfloat16 matrix products in fused weights, in units of the final rounding to bfloat16.

    python benchmarks/transport_bf16.py [--rows 2048] [--dim 2048]

Fused weights of one square module are computed in float64, then with the map applied by a bfloat16 product, then with
a bfloat16 product in the cost; the table has the error over that of rounding the exact result to bfloat16 (below 1:
hidden by it), root mean square and largest, and both products' rates. Results: benchmarks/results/transport_bf16.md.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path

import ot
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.transport_cpu import REG, rows_like
from surgeon.transport.cost import product
from surgeon.transport.maps import TransportSettings
from surgeon.transport.solving import solve

RESULTS = Path(__file__).resolve().parent / "results"


def rate(left: Tensor) -> float:
    """GFLOP/s of left · leftᵀ."""
    run = (lambda: left @ left.T) if left.dtype == torch.bfloat16 else (lambda: product(left, left.T))
    run()
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begun)
    return 2 * left.shape[0] ** 2 * left.shape[1] / best / 1e9


def fused(plan: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    return (len(plan) * (plan.T @ lower) + upper) / 2


def plan_by_bf16_cost(lower: Tensor, upper: Tensor) -> Tensor:
    """T in float64, from distances whose inner products were taken in bfloat16."""
    norms = lower.float().square().sum(1)[:, None] + upper.float().square().sum(1)
    cost = (norms - 2 * (lower @ upper.T).float()).clamp_min(0).sqrt().double().numpy()
    n = len(cost)
    uniform = torch.full((n,), 1 / n, dtype=torch.float64).numpy()
    return torch.from_numpy(ot.sinkhorn(uniform, uniform, cost, REG, method="sinkhorn_log", stopThr=1e-7, warn=False))


def errors(kind: str, n: int, d: int) -> list[str]:
    lower, upper = rows_like(kind, n, d, 1).bfloat16(), rows_like(kind, n, d, 2).bfloat16()
    plan = solve(lower.double(), upper.double(), TransportSettings(reg=REG)).matrix()
    exact = fused(plan, lower.double(), upper.double())
    rounding = exact.bfloat16().double() - exact
    applied = ((n * plan).bfloat16().T @ lower).double()
    candidates = {
        "map applied in bf16": (applied + upper.double()) / 2,
        "cost taken in bf16": fused(plan_by_bf16_cost(lower, upper), lower.double(), upper.double()),
    }
    rows = []
    for name, found in candidates.items():
        error = found - exact
        rms = float(error.square().mean().sqrt() / rounding.square().mean().sqrt())
        rows.append(f"| {kind} | {name} | {rms:.3f} | {float(error.abs().max() / rounding.abs().max()):.3f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=2048)
    arguments = parser.parse_args()
    square = torch.randn(4096, 4096)
    lines = [
        f"# bfloat16 products in optimal transport ({platform.machine()}, torch {torch.__version__})",
        "",
        f"Products of 4096 × 4096: float32 {rate(square):.0f} GFLOP/s, bfloat16 {rate(square.bfloat16()):.0f} GFLOP/s.",
        "",
        "| rows | what | rms error / rms rounding | largest / largest |",
        "|---|---|---:|---:|",
    ]
    for kind in ("gaussian", "uneven", "sharp"):
        lines += errors(kind, arguments.rows, arguments.dim)
    print("\n".join(lines))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "transport_bf16.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
