"""The protocol by which work reports progress, and a listener that shows nothing."""

from __future__ import annotations

from typing import Protocol


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
