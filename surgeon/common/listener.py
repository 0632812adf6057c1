"""Reports of running work: progress and notes to a listener, silent or with bars; seconds to a stopwatch."""

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
    """Receives progress and notes: a progress bar in a terminal or notebook, or nothing."""

    def begin(self, stage: str, total: int, unit: str = "bytes") -> None:
        """A stage of `total` bytes, or of another unit, begins."""

    def advance(self, count: int) -> None:
        """`count` more units of the stage are done."""

    def rename(self, stage: str) -> None:
        """The current stage gets a new name."""

    def say(self, line: str) -> None:
        """A line for the user."""


class Quiet:
    """A listener that keeps the lines and shows nothing."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def begin(self, stage: str, total: int, unit: str = "bytes") -> None:
        """Nothing to show."""

    def advance(self, count: int) -> None:
        """Nothing to show."""

    def rename(self, stage: str) -> None:
        """Nothing to show."""

    def say(self, line: str) -> None:
        """Keep the line in `said`."""
        self.said.append(line)


class _Amount(ProgressColumn):
    """How much is done, the rate and the remaining time: bytes in decimal units, anything else as a count.

    For a stage of unknown size, the elapsed time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bytes = DownloadColumn(), TransferSpeedColumn()
        self._remaining, self._elapsed = TimeRemainingColumn(), TimeElapsedColumn()

    def render(self, task: Task) -> Text:
        """The column of one task."""
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
    """Shows stages as a bar and notes as lines on stderr; `quiet` drops both. A context manager.

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

    def begin(self, stage: str, total: int, unit: str = "bytes") -> None:
        """A stage of `total` bytes, or of another unit, begins; its bar takes the place of the last one."""
        self._replace(stage, total, unit)

    def wait(self, stage: str) -> None:
        """A stage of unknown size begins."""
        self._replace(stage, None, "")

    def advance(self, count: int) -> None:
        """`count` bytes of the stage are done."""
        if self.task is not None:
            self.progress.advance(self.task, count)

    def rename(self, stage: str) -> None:
        """The current stage gets a new name."""
        if self.task is not None:
            self.progress.update(self.task, description=stage)

    def say(self, line: str) -> None:
        """Print a line above the bar; where no stage is running, show that work goes on."""
        if self.quiet:
            return
        self.console.print(printable(line, 2000), style="dim", soft_wrap=True)
        if self.task is None or self.progress.tasks[0].finished:
            self.wait("working")

    def _replace(self, stage: str, total: int | None, unit: str) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(stage, total=total, unit=unit)


class Stopwatch:
    """Adds up wall seconds under names, of all threads together; stages may not nest.

    They are kept out of the manifest, whose bytes must not depend on the day.
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
