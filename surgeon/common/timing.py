"""Seconds by stage of an execution; kept out of the manifest, whose bytes must not depend on the day."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up wall seconds under names, of all threads together; stages may not nest."""

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
