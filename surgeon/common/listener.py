"""Reports of running work: progress and notes to a listener (silent or with bars), seconds to a stopwatch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from surgeon.errors import printable


class Listener(Protocol):
    """A receiver of progress and notes, which shows a progress bar in a terminal or notebook, or nothing."""

    def begin(self, stage: str, total: int, unit: str = "bytes") -> None:
        """Begin a stage of `total` bytes, or of another unit."""

    def advance(self, count: int) -> None:
        """Count `count` more units of the stage as done."""

    def rename(self, stage: str) -> None:
        """Rename the current stage."""

    def say(self, line: str) -> None:
        """Show a line to the user."""


class Quiet:
    """A listener that keeps the lines and shows nothing."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def begin(self, stage: str, total: int, unit: str = "bytes") -> None:
        """Show nothing."""

    def advance(self, count: int) -> None:
        """Show nothing."""

    def rename(self, stage: str) -> None:
        """Show nothing."""

    def say(self, line: str) -> None:
        """Keep the line in `said`."""
        self.said.append(line)


class _Amount(ProgressColumn):
    """A progress column with the completed amount, rate and remaining time; for unknown sizes, the elapsed time.

    Bytes are shown in decimal units, anything else as a count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bytes = DownloadColumn(), TransferSpeedColumn()
        self._remaining, self._elapsed = TimeRemainingColumn(), TimeElapsedColumn()

    def render(self, task: Task) -> Text:
        """Return the column's text for one task."""
        if task.total is None:
            return self._elapsed.render(task)
        unit, left = task.fields["unit"], self._remaining.render(task)
        if unit == "bytes":
            done, speed = self._bytes
            return Text.assemble(done.render(task), " ", speed.render(task), " ", left)
        rate = task.finished_speed or task.speed
        per_second = f" {rate:.1f}/s" if rate is not None else ""
        return Text.assemble(f"{task.completed:,.0f}/{task.total:,.0f} {unit}{per_second} ", left)


class ProgressListener:
    """A listener that shows stages as a bar and notes as lines on stderr; `quiet` drops both. A context manager.

    A bar has the rate and the remaining time, or the elapsed time. Without a terminal there are no bars.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        shown = (self.console.is_terminal or self.console.is_jupyter) and not quiet
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            _Amount(),
            console=self.console,
            transient=True,
            disable=not shown,
        )
        self.task: TaskID | None = None

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def begin(self, stage: str, total: int | None, unit: str = "bytes") -> None:
        """Begin a stage of `total` bytes (None: of unknown size), or of another unit; its bar replaces the last one."""
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(stage, total=total, unit=unit)

    def wait(self, stage: str) -> None:
        """Begin a stage of unknown size."""
        self.begin(stage, None)

    def advance(self, count: int) -> None:
        """Count `count` more units of the stage as done."""
        if self.task is not None:
            self.progress.advance(self.task, count)

    def rename(self, stage: str) -> None:
        """Rename the current stage."""
        if self.task is not None:
            self.progress.update(self.task, description=stage)

    def say(self, line: str) -> None:
        """Print a line above the bar; where no stage is running, show that work continues."""
        if self.quiet:
            return
        self.console.print(printable(line, 2000), style="dim", soft_wrap=True)
        if self.task is None or self.progress.tasks[0].finished:
            self.wait("working")


class Stopwatch:
    """A sum of wall seconds per name, over all threads; stages may not nest.

    The seconds are kept out of the manifest, whose bytes must not depend on time.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time spent in the block under `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
