"""Where a wider output head changes old logits by rounding: products of few rows, by width, rows and threads.

    python benchmarks/head_width.py

A matrix of V rows and the same with more below it are multiplied with the same inputs; equal are the first V outputs,
or not, to the bit. Results go to benchmarks/results/head_width.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import machine

RESULTS = Path(__file__).resolve().parent / "results"
WIDTHS = {"V mod 4 = 0": (60, 64, 68, 100, 1004, 4096, 4100), "V mod 4 ≠ 0": (61, 62, 63, 65, 99, 1001, 4098)}
HIDDEN, MORE, POSITIONS = (32, 100, 512), (1, 4, 13), (1, 2, 3, 5, 8, 13, 17, 40, 130)


def differing(width: int, more: int, hidden: int, positions: int, dtype: torch.dtype) -> list[int]:
    """The old outputs that differ for any position."""
    old = (torch.randn(width, hidden) * 0.05).to(dtype)
    grown = torch.cat([old, torch.randn(more, hidden).to(dtype)])
    inputs = torch.randn(positions, 1, hidden).to(dtype)
    before, after = functional.linear(inputs, old), functional.linear(inputs, grown)[..., :width]
    return (before != after).flatten(0, -2).any(0).nonzero().flatten().tolist()


def row(name: str, widths: Sequence[int], dtype: torch.dtype, threads: int) -> str:
    """One line of the table."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tried, apart, before_tail, positions_apart = 0, 0, 0, set()
    for width in widths:
        for hidden in HIDDEN:
            for more in MORE:
                for positions in POSITIONS:
                    found = differing(width, more, hidden, positions, dtype)
                    tried += 1
                    if found:
                        apart += 1
                        positions_apart.add(positions)
                        before_tail += min(found) < width - width % 4
    shown = ", ".join(map(str, sorted(positions_apart)))
    kind = str(dtype).removeprefix("torch.")
    return f"| {name} | {kind} | {threads} | {tried} | {apart} | {before_tail} | {shown} |"


def main() -> None:
    """Measure and write the table."""
    lines = [
        "# Old logits beside more rows in the head",
        "",
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}. {machine()}.",
        "",
        "| V | dtype | threads | shapes | where old logits differ | before the last V mod 4 | at so many positions |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype in (torch.float32, torch.bfloat16):
        for threads in (1, 2):
            lines += [row(name, widths, dtype, threads) for name, widths in WIDTHS.items()]
    (RESULTS / "head_width.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
