"""Bytes that need not move, and bytes that must: `apply` and `revert` beside `cp`, by way and file system.

    python benchmarks/moving.py --work DIR [--rounds 3] [--name ext4]

Makes the Llama-3.2-1B-shaped checkpoint of depth_growth.py (2.5 GB, three shards) in DIR, and grafts adapters onto it:
copied, or reflinked where DIR's file system has that; and hard-linked, with the base's digests to be found, and
remembered from the time before. Beside each stand `cp -r`, `cp -r --reflink=auto`, `cp -rl`, and `cp -r` with `sync` of
the same output. surgeon runs in a process whose imports are done: start-up is start_up.py's. Wall and processor s;
candidates in turn. The floor of hashing is sha256 of the same bytes on all cores. Results go to
benchmarks/results/moving*.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from depth_growth import make_base, warm
from measuring import in_a_process, machine

RESULTS = Path(__file__).resolve().parent / "results"
PLAN = "surgeon: 1\noperations:\n  - {op: gated_adapters, layers: {every: 8}, size: 64}\n"


@dataclass
class Measured:
    """One candidate: wall and processor seconds of every round, and what it says of itself."""

    name: str
    walls: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    said: str = ""


def inner(what: str, base: str, out: str) -> None:
    """One surgery (or its undoing) in a process of its own, timed without its imports."""
    import torch
    import transformers

    import surgeon
    from surgeon.apply import compute, preflight
    from surgeon.rework import revert

    assert torch and transformers and compute and revert
    plan = surgeon.parse_plan(PLAN)
    if what != "revert":
        # What the classes of this type import comes before the clock too.
        preflight.check_skeleton(surgeon.preview(plan, base).blueprint)
    began, spent = time.perf_counter(), time.process_time()
    if what == "revert":
        moved = surgeon.revert(base, out, link=True).moved
    else:
        moved = surgeon.apply(plan, base, out, link=what == "link", device="cpu").moved
    seconds = {"wall": time.perf_counter() - began, "processor": time.process_time() - spent}
    print(json.dumps({**seconds, "said": moved.text or f"{moved.written / 1e9:.2f} GB written"}))


def command(line: str) -> Callable[[], tuple[float, float, str]]:
    """A shell's command, timed."""

    def run() -> tuple[float, float, str]:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(["sh", "-c", line], check=True)
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ""

    return run


def surgery(what: str, base: Path, out: Path, cache: str) -> Callable[[], tuple[float, float, str]]:
    """surgeon, in a process of its own with this cache."""

    def run() -> tuple[float, float, str]:
        os.environ["SURGEON_CACHE"] = cache
        found = in_a_process(__file__, what, base, out)
        return found["wall"], found["processor"], found["said"]

    return run


def hashing(base: Path) -> tuple[float, float, str]:
    """sha256 of the base's shards, in pieces, on as many threads as there are cores."""

    def digest(task: tuple[Path, int, int]) -> None:
        path, begin, end = task
        made = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            file.seek(begin)
            while begin < end and (piece := file.read(min(1 << 19, end - begin))):
                made.update(piece)
                begin += len(piece)

    sizes = {path: path.stat().st_size for path in sorted(base.glob("*.safetensors"))}
    parts = [(path, n * size // 8, (n + 1) * size // 8) for path, size in sizes.items() for n in range(8)]
    began, spent = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(digest, parts))
    return time.perf_counter() - began, time.process_time() - spent, ""


def measure(work: Path, rounds: int) -> list[Measured]:
    """Every candidate, in turn, `rounds` times."""
    base, out, made, cache = (work / name for name in ("base-1b", "out", "made", "cache"))
    shutil.rmtree(cache, ignore_errors=True)
    copied = f"cp -r '{made}' '{out}'"
    candidates: list[tuple[str, Callable[[], tuple[float, float, str]]]] = [
        ("surgeon apply (copied, or reflinked where that can be)", surgery("apply", base, out, "off")),
        ("surgeon apply --link, base not read before", surgery("link", base, out, "off")),
        ("surgeon apply --link, base read before", surgery("link", base, out, str(cache))),
        ("surgeon revert --link", surgery("revert", made, out, "off")),
        ("cp -r of its output", command(copied)),
        ("cp -r of its output, and sync", command(f"{copied} && sync '{out}'/*")),
        ("cp -r --reflink=auto of its output", command(f"cp -r --reflink=auto '{made}' '{out}'")),
        ("cp -rl of its output (hard links)", command(f"cp -rl '{made}' '{out}'")),
        ("sha256 of the base, all cores", lambda: hashing(base)),
    ]
    found = [Measured(name) for name, _ in candidates]
    shutil.rmtree(made, ignore_errors=True)
    surgery("apply", base, made, "off")()
    for _ in range(rounds):
        for measured, (name, run) in zip(found, candidates, strict=True):
            shutil.rmtree(out, ignore_errors=True)
            warm(base)
            if "read before" in name and "not" not in name:
                # A link that goes changes the base's times: what is remembered is from a run just before.
                first = work / "before"
                shutil.rmtree(first, ignore_errors=True)
                surgery("link", base, first, str(cache))()
            os.sync()
            wall, processor, said = run()
            measured.walls.append(wall)
            measured.processor.append(processor)
            measured.said = said
    for folder in (out, made, work / "before"):
        shutil.rmtree(folder, ignore_errors=True)
    return found


def table(found: list[Measured]) -> str:
    """The results as Markdown."""
    lines = [
        f"Machine: {machine()}; Python {platform.python_version()}.",
        "",
        "| candidate | wall s (best) | all rounds | processor s (best) | load at the end | what moved |",
        "|---|---|---|---|---|---|",
    ]
    load = f"{os.getloadavg()[0]:.1f}"
    for m in found:
        rounds = ", ".join(f"{wall:.2f}" for wall in m.walls)
        lines.append(f"| {m.name} | {min(m.walls):.2f} | {rounds} | {min(m.processor):.2f} | {load} | {m.said} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints (needs 10 GB)")
    parser.add_argument("--name", default="", help="file system of DIR, for the result's name")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    make_base(arguments.work / "base-1b")
    text = table(measure(arguments.work, arguments.rounds))
    print(text)
    suffix = f"_{arguments.name}" if arguments.name else ""
    title = f"# Bytes that move, 1B shape, adapters in two layers{', on ' + arguments.name if arguments.name else ''}"
    (RESULTS / f"moving{suffix}.md").write_text(f"{title}\n\n{text}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inner"]:
        inner(*sys.argv[2:])
    else:
        main()
