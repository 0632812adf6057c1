"""Trials of a command: what goes wrong in one, and what must hold of it afterwards."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import Process
from pathlib import Path

from tests.injection.command import Command, Place
from tests.injection.faults import DISK, Ended

_State = dict[str, str]
# Bytes of a file system that has room for everything here.
_ROOMY = 1 << 30


@dataclass
class Found:
    """What trials of one command and one fault showed; `wrong` are sentences, none where all is well.

    `calls` are those that an undisturbed run makes; of random trials there are none.
    """

    calls: int | None = None
    trials: int = 0
    absent: int = 0
    complete: int = 0
    wrong: list[str] = field(default_factory=list)


def injected(
    command: Command, inputs: Path, parent: Path, every: int, begin: int = 1, *, only: Collection[str] = ()
) -> dict[str, Found]:
    """Every `every`th call of a command (of a push, its requests too), once with each fault, or with `only` these.

    From the call `begin` on: from 1, or counted from the end where it is negative.
    """
    table: dict[str, Found] = defaultdict(Found)
    kinds = [tuple(fault for fault in faults if not only or fault in only) for faults in command.kinds]
    for faults in filter(None, kinds):
        expected, calls, _ = _undisturbed(command, inputs, parent, faults[0])
        for fault in faults:
            table[fault].calls = calls
        for at in range(begin if begin > 0 else max(1, calls + 1 + begin), calls + 1, every):
            for fault in faults:
                with command.place(inputs, parent) as place:
                    _trial(place, expected, at=at, fault=fault, found=table[fault])
    return table


def killed_at(command: Command, inputs: Path, parent: Path, places: Sequence[str]) -> Found:
    """Kill a command at calls that are named (see `Injection`), each of which must come."""
    expected, _, _ = _undisturbed(command, inputs, parent)
    found = Found()
    for at in places:
        with command.place(inputs, parent) as place:
            _trial(place, expected, at=at, fault="killed", found=found)
    return found


def at_random(command: Command, inputs: Path, parent: Path, trials: int, seed: int = 0) -> dict[str, Found]:
    """Kill a command at random moments, one to three times in a row, then as one of two runs onto one result.

    Each as often as `trials` says; of two runs one or both may go on to their end.
    """
    drawn = random.Random(seed)
    expected, _, seconds = max((_undisturbed(command, inputs, parent) for _ in range(2)), key=lambda run: run[2])
    table: dict[str, Found] = defaultdict(Found)
    for number in range(trials):
        for name, runs in {"killed at random": 1, "two at once": 2}.items():
            with command.place(inputs, parent) as place:
                ended: list[Ended] = []
                for _ in range(drawn.randint(1, 3)):
                    kept = [runs > 1 and drawn.random() < 0.4 for _ in range(runs)]
                    moments = [None if keep else drawn.uniform(0, 1.2 * seconds * runs) for keep in kept]
                    ended += place.at_once(moments)
                where = f"{command.name}, {name}, trial {number}"
                _judge(place, expected, ended, where, table[name], killed=True)
    return table


def on_small_disks(command: Command, inputs: Path, parent: Path, sizes: int) -> Found:
    """Run a command on file systems (tmpfs) of `sizes` sizes below what its result needs, then again with room.

    Mounting takes root's rights. A run that ends well on a smaller one counts as complete.
    """
    found = Found()
    with command.place(inputs, parent) as place, _mounted(place.work, _ROOMY):
        ended = place.disturbed("killed", 0)
        assert ended.code == 0, f"{command.name}: {ended.said}"
        expected, needed = place.there(), shutil.disk_usage(place.work).used
    assert expected
    for number in range(1, sizes + 1):
        size = needed * number // (sizes + 1)
        with command.place(inputs, parent) as place, _mounted(place.work, size):
            ended = place.disturbed("killed", 0)
            if ended.code != 2 and ended.code:
                found.wrong.append(f"{command.name}, {size} bytes: exit code {ended.code}")
            _mount(place.work, "remount", _ROOMY)
            _judge(place, expected, [ended], f"{command.name}, {size} bytes", found, killed=False)
    return found


@contextmanager
def _mounted(folder: Path, nbytes: int) -> Iterator[None]:
    _mount(folder, "nosuid", nbytes)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _mount(folder: Path, option: str, nbytes: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"{option},size={nbytes}", "tmpfs", str(folder)], check=True)


def _undisturbed(command: Command, inputs: Path, parent: Path, fault: str = "killed") -> tuple[_State, int, float]:
    """What the command makes, how many calls it needs (of those that the fault is of), and how many seconds."""
    with command.place(inputs, parent) as place:
        begun = time.perf_counter()
        ended = place.disturbed(fault, 0)
        seconds = time.perf_counter() - begun
        expected = place.there()
    assert ended.code == 0, f"{command.name}: {ended.said}"
    assert expected
    return expected, ended.calls, seconds


def _trial(place: Place, expected: _State, *, at: int | str, fault: str, found: Found) -> None:
    """One call of one run goes wrong, and the same command runs again."""
    ended = place.disturbed(fault, at)
    if isinstance(at, int) and ended.code == 0 and ended.calls < at:
        # Threads write in pieces that differ a little from run to run: this one was done before that call.
        return
    where = f"{place.command.name}, call {at}, {fault}"
    killed = fault.startswith("killed")
    # What a command has another process do (tokenizers) is one call's last too, and told in one line.
    if killed and ended.code not in (-signal.SIGKILL, 2):
        found.wrong.append(f"{where}: exit code {ended.code}, not killed")
    if fault not in DISK and not killed and (left := place.left()):
        found.wrong.append(f"{where}: left behind by a run that ended: {', '.join(left)}")
    _judge(place, expected, [ended], where, found, killed=killed)


def _judge(place: Place, expected: _State, runs: list[Ended], where: str, found: Found, *, killed: bool) -> None:
    """Absent or complete, ends in an orderly way, and a run after it ends well and leaves nothing."""
    there = place.there()
    found.trials += 1
    found.absent += there is None
    found.complete += there is not None
    if there not in (None, expected):
        found.wrong.append(f"{where}: neither absent nor complete")
    for code, said, _ in runs:
        if code not in (0, 2, -signal.SIGKILL if killed else 0) or "\n" in said:
            found.wrong.append(f"{where}: exit code {code}: {said}")
        if code == 0 and there is None:
            found.wrong.append(f"{where}: ended well, and nothing is there")
    again = place.disturbed("killed", 0)
    exists = there is not None and not place.command.again and "exists" in again.said
    if again.code and not exists:
        found.wrong.append(f"{where}: the run after: exit code {again.code}: {again.said}")
    if place.there() != expected:
        found.wrong.append(f"{where}: the run after is not byte-equal")
    # What was complete when it was killed is not taken up again by every command; its work folder is named as its own.
    if (left := place.left()) and (there is None or place.command.again):
        found.wrong.append(f"{where}: left behind: {', '.join(left)}")


@contextmanager
def load(folder: Path) -> Iterator[None]:
    """Two processes beside: one keeps the disk of `folder` busy, one a processor."""
    processes = [Process(target=_write, args=(folder / "load",)), Process(target=_compute)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _write(path: Path) -> None:
    while True:
        with path.open("wb") as file:
            for _ in range(16):
                file.write(bytes(1 << 20))
                file.flush()
        path.unlink()


def _compute() -> None:
    while True:
        sum(range(1_000_000))
