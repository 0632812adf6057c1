"""Progress on stderr: a bar with rate and remaining time where there is a terminal, silence where there is none."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from surgeon.errors import printable


class ProgressListener:
    """Shows stages as a bar and what is said as lines; `quiet` drops both. A context manager."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        shown = self.console.is_terminal and not quiet
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
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

    def begin(self, stage: str, total: int) -> None:
        """A stage of `total` bytes begins; its bar takes the place of the last one."""
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(stage, total=total)

    def advance(self, count: int) -> None:
        """`count` bytes of the stage are done."""
        if self.task is not None:
            self.progress.advance(self.task, count)

    def say(self, line: str) -> None:
        """A word to the user, above the bar."""
        if not self.quiet:
            self.console.print(printable(line, 2000), style="dim", soft_wrap=True)
