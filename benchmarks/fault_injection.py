"""Fail or kill a command at its state-changing system calls, one at a time: `out` must be absent or complete.

    python benchmarks/fault_injection.py --out OUT -- surgeon apply PLAN BASE OUT

The command runs once alone, and once under `strace` to find which of its system calls touch `OUT` and the
working folder beside it. Then, for each of these calls, it runs once with that call failing with ENOSPC, once
with EIO, and once killed there. After each, `OUT` must be absent or byte-equal to the first run's,
and the same command must then finish it byte-equal. Exit status: 0 all held, 1 something did not, 2 no strace.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CALLS = (
    "openat,creat,write,writev,pwrite64,pwritev,pwritev2,copy_file_range,sendfile,ftruncate,truncate,fallocate,"
    "fsync,fdatasync,rename,renameat,renameat2,mkdir,mkdirat,unlink,unlinkat,rmdir,link,linkat,symlink,symlinkat,"
    "flock,chmod,fchmod,fchmodat"
)
_LINE = re.compile(r"(?P<thread>\d+) +(?P<call>[a-z0-9_]+)\((?P<rest>.*)")
# Written content may name the output too: only the descriptor shows where it goes.
_CONTENT = re.compile(r"(?<=>, ).*")
_TO_TERMINAL = re.compile(r"\bp?writev?(64)?\([12]<.*\(INJECTED\)")
# System calls whose names differ between machines.
_ABSENT_ON = {"aarch64": {"creat", "rename", "mkdir", "unlink", "rmdir", "link", "symlink", "chmod"}}


@dataclass(frozen=True)
class Point:
    """The `number`-th `call` of one thread, which touched the output."""

    call: str
    number: int


class Trial:
    """A command and the folder it writes."""

    def __init__(self, command: list[str], out: Path) -> None:
        self.command = command
        self.out = Path(os.path.realpath(out.parent)) / out.name
        self.working = self.out.with_name(f".{self.out.name}.surgeon")

    def clear(self) -> None:
        """Remove the output and its working folders."""
        for folder in (self.out, *self.out.parent.glob(f"{self.working.name}*")):
            if folder.exists():
                shutil.rmtree(folder)

    def run(self, *prefix: str) -> subprocess.CompletedProcess[str]:
        """Run the command, under `prefix`."""
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [*prefix, *self.command], capture_output=True, text=True, check=False, env=environment, errors="replace"
        )

    def digest(self) -> dict[str, str] | None:
        """sha256 of every file of the output; None where it is absent."""
        if not os.path.lexists(self.out):
            return None
        return {
            str(path.relative_to(self.out)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.out.rglob("*"))
            if path.is_file()
        }

    def points(self, calls: str) -> list[Point]:
        """The calls that touch the output. Threads count for themselves, as strace's injection does."""
        with tempfile.NamedTemporaryFile("r", suffix=".strace") as log:
            self.run("strace", "-f", "-qq", "-y", "-s", "4096", "-e", f"trace={calls}", "-o", log.name)
            lines = log.read().splitlines()
        places = (str(self.out), str(self.working))
        seen: collections.Counter[tuple[str, str]] = collections.Counter()
        found: dict[Point, None] = {}
        for line in lines:
            matched = _LINE.match(line)
            if matched is None:
                continue
            key = (matched["thread"], matched["call"])
            seen[key] += 1
            reads_only = matched["call"] == "openat" and "O_CREAT" not in line
            where = matched["rest"]
            if "write" in matched["call"]:
                where = _CONTENT.sub("", where)
            if any(place in where for place in places) and not reads_only:
                found[Point(matched["call"], seen[key])] = None
        return list(found)


def spread(points: list[Point], most: int) -> Iterator[Point]:
    """At most `most` points of each call, evenly spread."""
    by_call: dict[str, list[Point]] = collections.defaultdict(list)
    for point in points:
        by_call[point.call].append(point)
    for group in by_call.values():
        step = max(1.0, len(group) / most)
        yield from (group[int(index * step)] for index in range(min(most, len(group))))


def judge(trial: Trial, point: Point, mode: str, expected: dict[str, str], codes: set[int]) -> tuple[str, list[str]]:
    """One injection: the state of `out` afterwards, and the broken promises."""
    trial.clear()
    how = "signal=SIGKILL" if mode == "SIGKILL" else f"error={mode}"
    inject = f"inject={point.call}:{how}:when={point.number}"
    with tempfile.NamedTemporaryFile("r", suffix=".strace") as log:
        ran = trial.run("strace", "-f", "-qq", "-y", "-o", log.name, "-e", f"trace={point.call}", "-e", inject)
        # Every thread's call of this number fails; where that was the message to the user, its form is ignored.
        speechless = _TO_TERMINAL.search(log.read()) is not None
    wrong: list[str] = []
    if mode != "SIGKILL" and ran.returncode not in codes and not speechless:
        wrong.append(f"exit status {ran.returncode}: {ran.stderr.strip().splitlines()[-1:]}")
    if "Traceback" in ran.stderr and not speechless:
        wrong.append(f"a traceback: {ran.stderr.strip().splitlines()[-1]}")
    left = trial.digest()
    if left is not None and left != expected:
        wrong.append("`out` is there and not complete")
    if left is None and mode != "SIGKILL" and ran.returncode == 0:
        wrong.append("the command succeeded and left no `out`")
    if left is None or trial.working.exists():
        again = trial.run()
        # After a kill with only an empty working folder left to remove, the rerun says that `out` exists.
        if again.returncode != 0 and left is None:
            wrong.append(f"the rerun failed: {again.stderr.strip().splitlines()[-1:]}")
        if trial.digest() != expected:
            wrong.append("the rerun's output differs")
    outcome = "absent" if left is None else "complete"
    return outcome, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder that the command makes")
    parser.add_argument("--most", type=int, default=1000, help="at most this many points of each system call")
    parser.add_argument("--modes", default="ENOSPC,EIO,SIGKILL")
    parser.add_argument("--codes", default="0,2", help="exit statuses that a failing call may lead to")
    parser.add_argument("--json", type=Path, help="write the counts here")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    if shutil.which("strace") is None:
        print("strace is not installed; faults cannot be injected without it", file=sys.stderr)
        return 2
    trial = Trial(given.command, given.out)
    if os.path.lexists(trial.out):
        print(f"{trial.out} exists; this benchmark removes it many times, choose another", file=sys.stderr)
        return 2
    first = trial.run()
    expected = trial.digest()
    if first.returncode != 0 or not expected:
        print(f"the command itself fails: {first.stderr}", file=sys.stderr)
        return 2
    trial.clear()
    absent = _ABSENT_ON.get(os.uname().machine, set())
    points = list(spread(trial.points(",".join(c for c in CALLS.split(",") if c not in absent)), given.most))
    if not points:
        print("strace saw no call that touches the output; may it trace here?", file=sys.stderr)
        return 2
    counts: collections.Counter[str] = collections.Counter()
    broken = 0
    for mode in given.modes.split(","):
        for point in points:
            outcome, wrong = judge(trial, point, mode, expected, {int(code) for code in given.codes.split(",")})
            counts[f"{mode} {point.call}: {outcome}"] += 1
            broken += bool(wrong)
            for problem in wrong:
                print(f"{mode} at {point.call} number {point.number}: {problem}", flush=True)
    trial.clear()
    for name, count in sorted(counts.items()):
        print(f"{name} {count}")
    print(f"{sum(counts.values())} injections at {len(points)} calls, {broken} with a broken promise")
    if given.json:
        given.json.write_text(json.dumps({"counts": counts, "points": len(points), "broken": broken}, indent=1) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
