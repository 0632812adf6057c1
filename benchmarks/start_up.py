"""Start-up measured: what stands before any work, of the commands that are asked for while a plan is written.

    python benchmarks/start_up.py [--rounds 10]

`--help`, `schema`, `plans`, and `inspect` and `preview` of the 405B shape of large_previews.py, a sparse checkpoint
(header and hole) in a temporary folder. Each is a process of its own with its byte code compiled and an empty cache;
wall and processor seconds, the best of the rounds, beside Python's own start and the import of torch, which none of
them does (this is checked). The result goes to benchmarks/results/start_up.md.
"""

from __future__ import annotations

import argparse
import compileall
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"


def measured(command: list[str], rounds: int) -> tuple[float, float]:
    """Wall and processor seconds of a command, each the best of the rounds."""
    walls, spent = [], []
    for _ in range(rounds):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        walls.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(walls), min(spent)


def without_torch(command: list[str]) -> None:
    """Exit where a command imports torch."""
    ran = subprocess.run([command[0], "-X", "importtime", *command[1:]], check=True, capture_output=True, text=True)
    if any(line.rpartition("|")[2].strip() == "torch" for line in ran.stderr.splitlines()):
        sys.exit(f"{' '.join(command[3:])} imports torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    sys.path.insert(0, str(ROOT))
    from benchmarks.large_previews import PLAN, SHAPES, sparse_checkpoint

    compileall.compile_dir(str(ROOT / "surgeon"), quiet=1)
    surgeon = [sys.executable, "-m", "surgeon"]
    with tempfile.TemporaryDirectory(prefix="surgeon-start-") as room:
        large, plan = Path(room) / "large", Path(room) / "plan.yaml"
        # A first preview's cache: empty.
        os.environ |= {"SURGEON_CACHE": str(Path(room) / "cache"), "OMP_NUM_THREADS": "1"}
        plan.write_text(PLAN)
        sparse_checkpoint(large, SHAPES["Llama 3.1, 405B"])
        commands = {
            "surgeon --help": [*surgeon, "--help"],
            "surgeon schema": [*surgeon, "schema"],
            "surgeon plans": [*surgeon, "plans"],
            "surgeon inspect, 405B shape": [*surgeon, "inspect", str(large)],
            "surgeon preview, 405B shape": [*surgeon, "preview", str(plan), str(large)],
        }
        lines = []
        for name, command in commands.items():
            without_torch(command)
            wall, spent = measured(command, rounds)
            lines.append(f"| {name} | {wall:.2f} | {spent:.2f} |")
        for name, code in (("python", "pass"), ("python, import torch", "import torch")):
            wall, spent = measured([sys.executable, "-c", code], rounds)
            lines.append(f"| {name} | {wall:.2f} | {spent:.2f} |")
    text = "\n".join(
        [
            f"`python benchmarks/start_up.py --rounds {rounds}`: {machine()}; Python {platform.python_version()};"
            f" load at the end {os.getloadavg()[0]:.1f}.",
            "",
            "| command | wall s (best) | processor s (best) |",
            "|---|---|---|",
            *lines,
        ]
    )
    print(text)
    (RESULTS / "start_up.md").write_text(f"# Start-up, by command\n\n{text}\n")


if __name__ == "__main__":
    main()
