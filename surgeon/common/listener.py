"""What work reports while it runs: progress and notes to a listener, seconds to a stopwatch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
