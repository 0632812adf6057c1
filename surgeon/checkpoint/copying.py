"""Moving bytes from file to file: in the kernel where it can, through one small buffer where it cannot."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from surgeon.checkpoint.naming import name_of
from surgeon.errors import BadInput

# One kernel copy at most, so that progress is heard of and an interrupt is noticed.
_KERNEL_CHUNK = 64 * 1024 * 1024
_BUFFER = 8 * 1024 * 1024
# What "this kernel, or this pair of file systems, does not do that" is called.
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
    """Copy `count` bytes between two open files; `progress` hears of every piece in bytes.

    Raises BadInput when the source ends before; OSError (ENOSPC, EIO, …) comes through as it is.
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
    """Bytes copied; fewer than `count` where the kernel would not go on: the buffer finds out why."""
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
    """Make the file `size` bytes long; what is never written stays a hole: zeros that take no room."""
    os.ftruncate(fd, size)
