"""Reading ahead and writing behind, so that whoever computes waits for no disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from surgeon.checkpoint.copying import write_all
from surgeon.checkpoint.folder import CheckpointFolder

# Tensors that may wait to be written, beside the one that is.
_WAITING = 2


class ReadAhead:
    """Tensors of a checkpoint, read by a thread in the order in which they will be asked for.

    What is read and not yet asked for is at most the larger of the two sets that `expect` was told last.
    """

    def __init__(self, base: CheckpointFolder) -> None:
        self._base = base
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._waiting: deque[str] = deque()
        self._coming: dict[str, Future[bytearray]] = {}
        self._room = 0

    def expect(self, now: Sequence[str], then: Sequence[str]) -> None:
        """Read what is needed now, each once, and what is needed after it; forget what was expected earlier."""
        self._room = max(self._bytes(now), self._bytes(then))
        wanted = list(dict.fromkeys([*now, *then]))
        for name in self._coming.keys() - set(wanted):
            self._coming.pop(name).cancel()
        self._waiting = deque(name for name in wanted if name not in self._coming)
        self._fill()

    def read(self, name: str) -> bytearray:
        """The bytes of one tensor: those read ahead, for whoever asks first, or read now. Raises BadInput."""
        coming = self._coming.pop(name, None)
        if coming is None:
            # Asked for before its turn: reading it again later would be for nobody.
            if name in self._waiting:
                self._waiting.remove(name)
            return self._base.read(name)
        content = coming.result()
        self._fill()
        return content

    def close(self) -> None:
        """Forget everything; an error of what nobody asked for is nobody's."""
        self._waiting.clear()
        self._coming.clear()
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _fill(self) -> None:
        free = self._room - self._bytes(self._coming)
        while self._waiting and self._base.tensors[self._waiting[0]].nbytes <= free:
            name = self._waiting.popleft()
            free -= self._base.tensors[name].nbytes
            self._coming[name] = self._reader.submit(self._base.read, name)

    def _bytes(self, names: Sequence[str] | dict[str, Future[bytearray]]) -> int:
        return sum(self._base.tensors[name].nbytes for name in names)


class WriteBehind:
    """Writes to an open file by a thread, in order. An error comes out at the next `write`, or at the end.

    Left without an error, everything is written; left with one, what waits is dropped, and nothing is under way.
    """

    def __init__(self, target: int, advance: Callable[[int], None]) -> None:
        self._target = target
        self._advance = advance
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write-behind")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while kind is None and self._pending:
                self._pending.popleft().result()
        finally:
            self._writer.shutdown(wait=True, cancel_futures=True)

    def write(self, data: memoryview, offset: int) -> None:
        """Have `data` written at `offset`; waits while too much is waiting. The caller changes `data` no more."""
        while len(self._pending) > _WAITING or (self._pending and self._pending[0].done()):
            self._pending.popleft().result()
        self._pending.append(self._writer.submit(self._put, data, offset))

    def _put(self, data: memoryview, offset: int) -> None:
        write_all(self._target, data, offset)
        self._advance(len(data))
