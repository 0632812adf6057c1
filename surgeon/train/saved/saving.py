"""Checkpoints written beside the steps: what one holds is copied at its step, and a thread writes the copy.

The thread only writes. What needs other processes, the model or the optimizer is done at the step, by the thread that
trains: gathering shares, copying, random numbers. One checkpoint is written at a time.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Literal, Self

Write = Callable[[], object]


def is_beside(setting: Literal["auto", "beside", "in_step"], *, copy_bytes: int, model_bytes: int) -> bool:
    """Whether checkpoints are written beside the steps; `auto`: where the copy is no larger than the model."""
    return setting == "beside" or (setting == "auto" and copy_bytes <= model_bytes)


class Saving:
    """Writes a checkpoint's files: at once, or beside the steps that follow.

    At its end as a context nothing is being written any more, whatever ended it. What the writing raised is raised
    where the next step begins, or the next checkpoint, or at the end, unless another error ends it.
    """

    def __init__(self, *, beside: bool) -> None:
        self._allowed = beside
        self.beside = False
        self._writes: list[Write] = []
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def begin(self, *, last: bool) -> None:
        """A checkpoint, once the one before is written; after the `last` step there is nothing to write beside.

        Raises what that one's writing raised.
        """
        self.wait()
        self.check()
        self.beside = self._allowed and not last
        self._writes = []

    def add(self, write: Write) -> None:
        """One file of it; where it is written beside, nothing else may change what `write` holds."""
        if self.beside:
            self._writes.append(write)
        else:
            write()

    def finish(self, write: Write) -> None:
        """The last of it, by which it counts."""
        self.add(write)
        if self.beside:
            writes, self._writes = self._writes, []
            self._writing = self._thread.submit(_in_turn, writes)

    def check(self) -> None:
        """Raise what the writing raised that is over."""
        if self._writing is not None and self._writing.done():
            over, self._writing = self._writing, None
            over.result()

    def wait(self) -> None:
        """Return when nothing is being written; an interruption of the waiting is raised then.

        Else the folder could be another process' while it is written to.
        """
        interrupted: KeyboardInterrupt | None = None
        while self._writing is not None and not self._writing.done():
            try:
                concurrent.futures.wait([self._writing])
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()
        if error is None:
            self.check()


def _in_turn(writes: list[Write]) -> None:
    """Each is let go of, with the tensors in it, as soon as it is done."""
    writes.reverse()
    while writes:
        writes.pop()()
