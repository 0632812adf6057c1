"""Who hears of progress: the protocol, and a listener that shows nothing."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """Who hears of progress: a terminal's progress bar, a notebook's, or nobody."""

    def begin(self, stage: str, total: int, unit: str = "bytes") -> None:
        """A stage of `total` bytes, or of another unit, begins."""

    def advance(self, count: int) -> None:
        """`count` of it are done."""

    def rename(self, stage: str) -> None:
        """The stage under way is called otherwise from now on."""

    def say(self, line: str) -> None:
        """A word to the user."""


class Quiet:
    """A listener that keeps what is said and shows nothing."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def begin(self, stage: str, total: int, unit: str = "bytes") -> None:
        """Nothing to show."""

    def advance(self, count: int) -> None:
        """Nothing to show."""

    def rename(self, stage: str) -> None:
        """Nothing to show."""

    def say(self, line: str) -> None:
        """Kept in `said`."""
        self.said.append(line)
