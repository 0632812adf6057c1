"""What a second surgery of one shape costs beside the copy of its output: what the first one proved is kept.

    python benchmarks/second_apply.py --work DIR [--rounds 3]

Makes the Llama-3.2-1B-shaped checkpoint of depth_growth.py (2.5 GB, three shards) in DIR. `apply` of the shipped
llama-pro plan: once with an empty cache, then again and again, copied and hard-linked; `verify --static` of the output;
`cp -r` of the output with `sync` of its files. Each is a process of its own, start-up included, with the byte code of
all that it imports compiled, as pip leaves it; the plan renames all layers behind the first new one, so `--link` moves
every byte too. Processor seconds, wall seconds and peak resident memory, each the best of the rounds, go to
benchmarks/results/second_apply.md.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from depth_growth import make_base
from measuring import machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Cost:
    """Processor and wall seconds, and peak resident bytes, of a process and those that it started."""

    processor: float
    wall: float
    peak: int


def cost(command: list[str], environment: dict[str, str], before: Callable[[], None]) -> Cost:
    """What one run of a command costs. Exits where it fails."""
    before()
    os.sync()
    began = time.perf_counter()
    child = os.posix_spawnp(command[0], command, {**os.environ, **environment}, file_actions=_SILENT)
    _, status, used = os.wait4(child, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return Cost(used.ru_utime + used.ru_stime, time.perf_counter() - began, used.ru_maxrss * 1024)


_SILENT = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]


def best(command: list[str], environment: dict[str, str], rounds: int, before: Callable[[], None]) -> Cost:
    """The least of each over the rounds."""
    found = [cost(command, environment, before) for _ in range(rounds)]
    return Cost(min(c.processor for c in found), min(c.wall for c in found), min(c.peak for c in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    work, rounds = arguments.work.absolute(), arguments.rounds
    base, out, copy, cache = (str(work / name) for name in ("base", "out", "copy", "cache"))
    make_base(Path(base))
    compileall.compile_dir(str(ROOT / "surgeon"), quiet=1)
    environment = {"SURGEON_CACHE": cache, "SURGEON_STATE": str(work / "state")}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    surgeon, plan = [sys.executable, "-m", "surgeon"], str(ROOT / "plans" / "llama-pro.yaml")

    def without(*folders: str) -> Callable[[], None]:
        def clear() -> None:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)

        return clear

    # Whether the cache of the file system is warm does not depend on the order.
    apply, linked = [*surgeon, "apply", plan, base, out], [*surgeon, "apply", plan, base, out, "--link"]
    # Compiles what is imported.
    cost([*surgeon, "preview", plan, base], {**environment, "SURGEON_CACHE": "off"}, without(out, cache))
    rows = {
        "`apply`, the first": best(apply, environment, 1, without(out, cache)),
        "`apply`, again": best(apply, environment, rounds, without(out)),
        "`verify --static`": best([*surgeon, "verify", base, out, "--static"], environment, rounds, without()),
        "`cp -r` and `sync`": best(
            ["sh", "-c", f"cp -r {out} {copy} && sync {copy}/*"], environment, rounds, without(copy)
        ),
        "`apply --link`, again": best(linked, environment, rounds, without(out, copy)),
    }
    without(out, copy)()
    floor = rows["`cp -r` and `sync`"].processor
    table = "".join(
        f"| {name} | {row.processor:.1f} | {row.processor / floor:.1f} | {row.wall:.1f} | {row.peak / 1e6:.0f} |\n"
        for name, row in rows.items()
    )
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    (RESULTS / "second_apply.md").write_text(
        "# A second surgery of one shape\n\n"
        f"`plans/llama-pro.yaml` on a 1B Llama (2.5 GB), best of {rounds}, the first `apply` once.\n\n"
        "| | processor s | of `cp`'s | wall s | peak MB |\n|---|---:|---:|---:|---:|\n"
        f"{table}\n{machine()}; {versions}; `python benchmarks/second_apply.py`\n"
    )


if __name__ == "__main__":
    main()
