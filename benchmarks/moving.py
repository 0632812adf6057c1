"""Bytes that need not move, and bytes that must: `apply` and `revert` beside `cp`, by way and file system.

    python benchmarks/moving.py --work DIR [--rounds 3] [--name ext4] [--grown [OPERATION …]] [--beside CHECKOUT]

Makes the Llama-3.2-1B-shaped checkpoint of depth_growth.py (2.5 GB, three shards) in DIR, and grafts adapters onto it:
copied, or reflinked where DIR's file system has that; and hard-linked, with the base's digests to be found, and
remembered from the time before. Beside each stand `cp -r`, `cp -r --reflink=auto`, `cp -rl`, and `cp -r` with `sync` of
the same output. surgeon runs in a process whose imports are done. Wall and processor s;
candidates in turn. The floor of hashing is sha256 of the same bytes on all cores. Results go to
benchmarks/results/moving*.md.

`--grown`: instead, the surgeries (or those of them that are named) whose output is much larger or whose embeddings
grow, each beside `cp -r` of its own output: 8 experts (8 copies of every MLP beside the base's), and 33,792 more
tokens. The peak of memory there is what `apply` adds to that of a process that has imported torch and transformers and
drawn the preview (needs 40 GB). Beside it stand preview alone, in which tokens are computed and nothing is moved, and
sha256 of the output. Processor seconds are of surgeon's child processes too, in which tokenizers run.
`--beside` is another checkout of surgeon, whose `apply` is measured in the same rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
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
from measuring import in_a_process, machine, peak_memory

RESULTS = Path(__file__).resolve().parent / "results"
_ADAPTERS = "{op: gated_adapters, layers: {every: 8}, size: 64}"
GROWN = {
    "upcycle_experts, 8 experts": "{op: upcycle_experts, experts: 8}",
    "grow_vocabulary, 33,792 tokens": "{op: grow_vocabulary, tokens: words.txt}",
}
# Words of three of these, and the pairs that they begin with, are 32³ + 32² new tokens.
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEF"


@dataclass
class Measured:
    """One candidate: wall and processor seconds of every round, and what it says of itself."""

    name: str
    walls: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    said: str = ""
    peak: int = 0


def plan_of(operation: str) -> str:
    """A plan of one operation."""
    return f"surgeon: 1\noperations:\n  - {operation}\n"


def inner(what: str, base: str, out: str, operation: str = _ADAPTERS) -> None:
    """One surgery (or its undoing) in a process of its own, timed without its imports."""
    import torch
    import transformers

    import surgeon
    from surgeon.rework import revert
    from surgeon.writing import compute, preflight

    assert torch and transformers and compute and revert
    plan: Path | None = None
    if what != "revert":
        plan = Path(base).parent / "plan.yaml"
        plan.write_text(plan_of(operation))
        blueprint = surgeon.preview(plan, base).blueprint
        # What the classes of this type import comes before the clock too.
        if not blueprint.native:
            preflight.check_skeleton(blueprint)
    before = forget_peak()
    began, spent = time.perf_counter(), processor_seconds()
    said = ""
    if plan is not None and what == "preview":
        surgeon.preview(plan, base)
    else:
        if plan is None:
            moved = surgeon.revert(base, out, link=True).moved
        else:
            read_back = what != "trust"
            moved = surgeon.apply(plan, base, out, link=what == "link", device="cpu", read_back=read_back).moved
        said = moved.text or f"{moved.written / 1e9:.2f} GB written"
    seconds = {"wall": time.perf_counter() - began, "processor": processor_seconds() - spent}
    peak = peak_memory() - before
    print(json.dumps({**seconds, "peak": peak, "said": said}))


def processor_seconds() -> float:
    """What this process has computed, and its children that have ended."""
    return sum(os.times()[:4])


def forget_peak() -> int:
    """Have Linux count this process's peak of memory from now on; the memory that it has now, in bytes."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")
    return peak_memory()


# Wall and processor seconds, bytes of memory, and what it says of itself.
Found = tuple[float, float, int, str]
Run = Callable[[], Found]


def command(line: str) -> Run:
    """A shell's command, timed."""

    def run() -> Found:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(["sh", "-c", line], check=True)
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 0, ""

    return run


def surgery(
    what: str, base: Path, out: Path, cache: str, operation: str = _ADAPTERS, checkout: Path | None = None
) -> Run:
    """surgeon (that of `checkout`), in a process of its own with this cache."""

    def run() -> Found:
        os.environ["SURGEON_CACHE"] = cache
        os.environ["PYTHONPATH"] = str((checkout or Path(__file__).parent.parent).resolve())
        found = in_a_process(__file__, what, base, out, operation)
        return found["wall"], found["processor"], found["peak"], found["said"]

    return run


def hashing(base: Path) -> Found:
    """sha256 of a checkpoint's shards, in pieces, on as many threads as there are cores."""

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
    return time.perf_counter() - began, time.process_time() - spent, 0, ""


def measure(work: Path, rounds: int) -> list[Measured]:
    """Every candidate, in turn, `rounds` times."""
    base, out, made, cache = (work / name for name in ("base-1b", "out", "made", "cache"))
    shutil.rmtree(cache, ignore_errors=True)
    copied = f"cp -r '{made}' '{out}'"
    candidates: list[tuple[str, Run]] = [
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
            note(measured, run())
    for folder in (out, made, work / "before"):
        shutil.rmtree(folder, ignore_errors=True)
    return found


def note(measured: Measured, found: Found) -> None:
    """Keep what one round found."""
    wall, processor, measured.peak, measured.said = found[0], found[1], max(measured.peak, found[2]), found[3]
    measured.walls.append(wall)
    measured.processor.append(processor)


def tokenizer_for(base: Path) -> None:
    """A tokenizer of bytes for the base, and the words that it is to learn, beside it."""
    if not (base / "tokenizer.json").exists():
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        from tests import vocabularies

        vocabularies.byte_level(base, size=260, texts=())
    words = ["".join(letters) for letters in itertools.product(_LETTERS, repeat=3)]
    (base.parent / "words.txt").write_text("\n".join(words) + "\n")


def measure_grown(work: Path, rounds: int, names: list[str], beside: Path | None) -> list[Measured]:
    """Each of GROWN that is named (none: all) beside copies of its output, in turn, `rounds` times."""
    base, out, made = (work / name for name in ("base-1b", "out", "made"))
    tokenizer_for(base)
    found: list[Measured] = []
    for name, operation in GROWN.items():
        if names and name.split(",")[0] not in names:
            continue
        candidates: list[tuple[Measured, Run]] = [
            (Measured(f"surgeon apply {name}"), surgery("apply", base, made, "off", operation)),
            (Measured(f"… without reading back ({name})"), surgery("trust", base, out, "off", operation)),
            # A second preview: what apply computes before it moves a byte, the grown tokenizer above all.
            (Measured(f"… preview alone ({name})"), surgery("preview", base, out, "off", operation)),
            (Measured("sha256 of its output, all cores"), lambda: hashing(made)),
            (Measured("cp -r of its output"), command(f"cp -r '{made}' '{out}'")),
            (Measured("cp -r of its output, and sync"), command(f"cp -r '{made}' '{out}' && sync '{out}'/*")),
        ]
        if beside is not None:
            other = surgery("apply", base, out, "off", operation, beside)
            candidates.insert(1, (Measured(f"… by surgeon at {described(beside)}"), other))
        for _ in range(rounds):
            shutil.rmtree(made, ignore_errors=True)
            for measured, run in candidates:
                shutil.rmtree(out, ignore_errors=True)
                warm(base)
                os.sync()
                note(measured, run())
        found += [measured for measured, _ in candidates]
        for folder in (out, made):
            shutil.rmtree(folder, ignore_errors=True)
    return found


def described(checkout: Path) -> str:
    """The commit of a checkout."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def table(found: list[Measured]) -> str:
    """The results as Markdown."""
    lines = [
        f"Machine: {machine()}; Python {platform.python_version()}.",
        "",
        "| candidate | wall s (best) | all rounds | processor s (best) | memory added, MB | load at the end |"
        " what moved |",
        "|---|---|---|---|---|---|---|",
    ]
    load = f"{os.getloadavg()[0]:.1f}"
    for m in found:
        rounds = ", ".join(f"{wall:.2f}" for wall in m.walls)
        peak = f"{m.peak / 1e6:.0f}" if m.peak else ""
        best = f"{min(m.walls):.2f} | {rounds} | {min(m.processor):.2f}"
        lines.append(f"| {m.name} | {best} | {peak} | {load} | {m.said} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints (needs 10 GB)")
    parser.add_argument("--name", default="", help="file system of DIR, for the result's name")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--grown",
        nargs="*",
        choices=[name.split(",")[0] for name in GROWN],
        help="experts and a larger vocabulary instead, or those that are named",
    )
    parser.add_argument("--beside", type=Path, help="with --grown: a folder with another version of surgeon")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    make_base(arguments.work / "base-1b")
    grown = "" if arguments.grown is None else "_grown"
    text = table(
        measure_grown(arguments.work, arguments.rounds, arguments.grown, arguments.beside)
        if arguments.grown is not None
        else measure(arguments.work, arguments.rounds)
    )
    print(text)
    suffix = f"{grown}_{arguments.name}" if arguments.name else grown
    what = " and ".join(name for name in GROWN if not arguments.grown or name.split(",")[0] in arguments.grown)
    what = what if grown else "adapters in two layers"
    title = f"# Bytes that move, 1B shape, {what}{', on ' + arguments.name if arguments.name else ''}"
    (RESULTS / f"moving{suffix}.md").write_text(f"{title}\n\n{text}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inner"]:
        inner(*sys.argv[2:])
    else:
        main()
