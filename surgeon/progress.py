"""Progress on stderr: a bar with rate and remaining time where there is a terminal, silence where there is none."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from surgeon.errors import printable


class _Amount(ProgressColumn):
    """How much is done, and how fast: of bytes in decimal units, of anything else as a count."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = DownloadColumn(), TransferSpeedColumn()

    def render(self, task: Task) -> Text:
        """One task's."""
        unit = task.fields["unit"]
        if unit == "bytes":
            done, speed = self._bytes
            return Text.assemble(done.render(task), " ", speed.render(task))
        rate = task.finished_speed or task.speed
        told = f" {rate:.1f}/s" if rate is not None else ""
        return Text(f"{task.completed:,.0f}/{task.total or 0:,.0f} {unit}{told}")


class ProgressListener:
    """Shows stages as a bar and what is said as lines; `quiet` drops both. A context manager."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        shown = self.console.is_terminal and not quiet
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            _Amount(),
            TimeRemainingColumn(),
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
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(stage, total=total, unit=unit)

    def advance(self, count: int) -> None:
        """`count` bytes of the stage are done."""
        if self.task is not None:
            self.progress.advance(self.task, count)

    def rename(self, stage: str) -> None:
        """The stage under way is called otherwise from now on."""
        if self.task is not None:
            self.progress.update(self.task, description=stage)

    def say(self, line: str) -> None:
        """A word to the user, above the bar."""
        if not self.quiet:
            self.console.print(printable(line, 2000), style="dim", soft_wrap=True)
