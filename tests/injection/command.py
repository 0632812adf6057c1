"""A command that writes, and a place where it runs: what it makes there, and what it leaves."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.injection.faults import DISK, Child, Ended, Injection, digests


@dataclass(frozen=True)
class Command:
    """A command that writes: `run(inputs, work)` makes `work / result`, of inputs that it only reads.

    `beside` is what else it leaves in `work`, not later than the result. `again`: the same command ends well on what is
    complete too (others say that it exists).
    """

    name: str
    run: Callable[[Path, Path], object]
    result: str = "out"
    beside: tuple[str, ...] = ()
    # Trials of these take seconds each: every Nth call is enough where not asked otherwise.
    every: int = 1
    again: bool = False

    @property
    def kinds(self) -> tuple[tuple[str, ...], ...]:
        """Faults that are tried at the same calls, by what is counted: calls to the disk."""
        return (tuple(DISK),)

    @contextmanager
    def place(self, inputs: Path, parent: Path) -> Iterator[Place]:
        """An empty folder to run in, gone afterwards."""
        folder = Path(tempfile.mkdtemp(dir=parent))
        try:
            (folder / "work").mkdir()
            (folder / "temporary").mkdir()
            yield self._place(inputs, folder)
        finally:
            shutil.rmtree(folder)

    def _place(self, inputs: Path, folder: Path) -> Place:
        return Place(self, inputs, folder)


class Place:
    """Where a command runs, as often as a trial wants."""

    def __init__(self, command: Command, inputs: Path, folder: Path) -> None:
        self.command = command
        self.inputs = inputs
        self.work = folder / "work"
        self.temporary = folder / "temporary"

    def run(self) -> None:
        """The command, in a child."""
        tempfile.tempdir = str(self.temporary)
        self.prepare()
        self.command.run(self.inputs, self.work)

    def prepare(self) -> None:
        """What the child needs before."""

    def there(self) -> dict[str, str] | None:
        """What the command made; None where nothing is there."""
        made = digests(self.work / self.command.result)
        if made is None:
            return None
        return made | {name: str(digests(self.work / name)) for name in self.command.beside}

    def left(self) -> list[str]:
        """What lies beside the result and is no part of it."""
        expected = (self.command.result, *self.command.beside)
        return sorted(path.name for path in self.work.iterdir() if path.name not in expected)

    def disturbed(self, fault: str, at: int | str) -> Ended:
        """Run it, with this fault at the call `at` (0: never; see `Injection`)."""
        return Child(self.run, Injection(at, DISK[fault])).ended()

    def at_once(self, moments: Sequence[float | None]) -> list[Ended]:
        """Run it as often as there are moments (seconds from now), at once, and kill each at its own (None: never)."""
        children = [Child(self.run, nullcontext()) for _ in moments]
        begun = time.perf_counter()
        for moment, child in sorted(
            ((moment, child) for moment, child in zip(moments, children, strict=True) if moment is not None),
            key=lambda pair: pair[0],
        ):
            time.sleep(max(0.0, begun + moment - time.perf_counter()))
            child.kill()
        return [child.ended() for child in children]
