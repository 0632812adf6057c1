"""Bytes from shard to shard: copied by the kernel where it can, else read ahead of computations and written behind."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from surgeon.checkpoint.durable import name_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput

# The most bytes of one kernel copy, so that progress is reported and an interrupt is noticed.
_KERNEL_CHUNK = 64 * 1024 * 1024
_BUFFER = 8 * 1024 * 1024

# The errors of a kernel, or a pair of file systems, that cannot copy so.
_NO_KERNEL_COPY = frozenset({errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EPERM})


def copy_range(
    source_fd: int,
    target_fd: int,
    *,
    source_offset: int,
    target_offset: int,
    count: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Copy `count` bytes between two open files; `progress` receives the size of every piece in bytes.

    Raises BadInput when the source ends before; OSError (ENOSPC, EIO, …) is passed on.
    """
    copied = _copy_in_kernel(source_fd, target_fd, source_offset, target_offset, count, progress)
    _copy_through_buffer(source_fd, target_fd, source_offset + copied, target_offset + copied, count - copied, progress)


def _copy_in_kernel(
    source_fd: int,
    target_fd: int,
    source_offset: int,
    target_offset: int,
    count: int,
    progress: Callable[[int], None] | None,
) -> int:
    """Bytes copied; fewer than `count` where the kernel stops: copying through the buffer then finds the cause."""
    copied = 0
    # macOS has no such call.
    kernel_copy = getattr(os, "copy_file_range", None)
    if kernel_copy is None:
        return copied
    while copied < count:
        try:
            moved = kernel_copy(
                source_fd,
                target_fd,
                min(_KERNEL_CHUNK, count - copied),
                offset_src=source_offset + copied,
                offset_dst=target_offset + copied,
            )
        except OSError as error:
            if error.errno in _NO_KERNEL_COPY:
                return copied
            raise
        # Nothing moved: the source's end, or a file system that pretends (kernels 5.3 to 5.18).
        if moved == 0:
            return copied
        copied += moved
        if progress is not None:
            progress(moved)
    return copied


def _copy_through_buffer(
    source_fd: int,
    target_fd: int,
    source_offset: int,
    target_offset: int,
    count: int,
    progress: Callable[[int], None] | None,
) -> None:
    if count == 0:
        return
    buffer = memoryview(bytearray(min(_BUFFER, count)))
    while count:
        read = os.preadv(source_fd, [buffer[: min(len(buffer), count)]], source_offset)
        if read == 0:
            raise BadInput(f"{name_of(source_fd)}: ends {count:,} bytes early; was it cut meanwhile?")
        write_all(target_fd, buffer[:read], target_offset)
        source_offset += read
        target_offset += read
        count -= read
        if progress is not None:
            progress(read)


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, however often the system writes less than it is given."""
    rest = memoryview(data).cast("B") if data else memoryview(b"")
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest = rest[written:]
        offset += written


def reserve(fd: int, size: int) -> None:
    """Make the file `size` bytes long; ranges that are never written stay holes: zeros that take no disk space."""
    os.ftruncate(fd, size)


# How many tensors may wait while one is written.
_WAITING = 2


class ReadAhead:
    """Tensors of a checkpoint, read by a thread in the order in which they will be needed.

    It holds at most the larger of the two sets given to the last `expect`.
    """

    def __init__(self, base: CheckpointFolder) -> None:
        self._base = base
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._waiting: deque[str] = deque()
        self._coming: dict[str, Future[bytearray]] = {}
        self._room = 0

    def expect(self, now: Sequence[str], then: Sequence[str]) -> None:
        """Read what is needed now, each once, then what is needed after it; drop earlier expectations."""
        self._room = max(self._bytes(now), self._bytes(then))
        wanted = list(dict.fromkeys([*now, *then]))
        for name in self._coming.keys() - set(wanted):
            self._coming.pop(name).cancel()
        self._waiting = deque(name for name in wanted if name not in self._coming)
        self._fill()

    def read(self, name: str) -> bytearray:
        """The bytes of one tensor: read ahead (returned once), or read now. Raises BadInput where reading fails."""
        coming = self._coming.pop(name, None)
        if coming is None:
            # Needed before its turn: nobody will need it again later.
            if name in self._waiting:
                self._waiting.remove(name)
            return self._base.read(name)
        content = coming.result()
        self._fill()
        return content

    def close(self) -> None:
        """Drop everything; errors of tensors that nobody needed are ignored."""
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
    """Writes to an open file by a thread, in order. An error is raised at the next `write`, or at the end.

    When the `with` block ends, everything is written; when it ends with an error, what waits is dropped.
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
        """Write `data` at `offset` later; blocks while the queue is full. The caller must not change `data`."""
        while len(self._pending) > _WAITING or (self._pending and self._pending[0].done()):
            self._pending.popleft().result()
        self._pending.append(self._writer.submit(self._put, data, offset))

    def _put(self, data: memoryview, offset: int) -> None:
        write_all(self._target, data, offset)
        self._advance(len(data))
