"""Byte ranges of open files: hashing, copying (by the kernel where possible), and writing.

Reading and hashing release the interpreter's lock, so that another thread can copy at the same time.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from surgeon.errors import BadInput, printable

# A block of this size fits a core's cache, so that it is still cached when it is hashed and inspected.
_CHUNK = 512 * 1024
# How many digests of zeros are cached: a model's zero tensors have only a few sizes.
_KNOWN_ZEROS = 256
# The most bytes of one kernel copy, so that progress is reported and an interrupt is noticed.
_KERNEL_CHUNK = 64 * 1024 * 1024
_BUFFER = 8 * 1024 * 1024
# The errors of a kernel, or a pair of file systems, without support for copy_file_range.
_NO_KERNEL_COPY = frozenset({errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EPERM})


def pieces_of(fd: int, begin: int, end: int, most: int) -> Iterator[memoryview]:
    """Yield the bytes `begin` to `end` in pieces of at most `most`, all in the same buffer, one after another.

    A mapping would count as this process's memory. Raises BadInput when the file ends before `end`.
    """
    buffer = memoryview(bytearray(min(most, end - begin)))
    while begin < end:
        count = os.preadv(fd, [buffer[: end - begin]], begin)
        if count == 0:
            raise _ends_early(fd, end - begin)
        yield buffer[:count]
        begin += count


def _ends_early(fd: int, missing: int) -> BadInput:
    """Return the error for a file that ends too early; it names the path where known (Linux), else the inode number."""
    try:
        name = printable(str(Path(f"/proc/self/fd/{fd}").readlink()))
    except OSError:
        name = f"file with inode {os.fstat(fd).st_ino}"
    return BadInput(f"{name}: ends {missing:,} bytes early; was it cut meanwhile?")


# A callback that inspects bytes that are read anyway.
Look = Callable[[bytearray | memoryview], None]


def _no_look(_piece: bytearray | memoryview) -> None:
    """Ignore the bytes: the default for callers that do not inspect them."""
    pass


def sha256_range(fd: int, begin: int, end: int, look: Look = _no_look) -> str:
    """Return the hex sha256 of the bytes `begin` to `end` of the open file; `look` receives each piece.

    Raises BadInput when the file ends before `end`.
    """
    digest = hashlib.sha256()
    for piece in pieces_of(fd, begin, end, _CHUNK):
        digest.update(piece)
        look(piece)
    return digest.hexdigest()


def sha256_pieces(pieces: Iterable[memoryview]) -> str:
    """Return the hex sha256 of the concatenated `pieces`."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def fill(fd: int, buffer: bytearray | memoryview, position: int) -> None:
    """Fill the whole buffer from the file, starting at `position`. Raises BadInput when the file ends early."""
    view = memoryview(buffer)
    while view:
        count = os.preadv(fd, [view], position)
        if count == 0:
            raise _ends_early(fd, len(view))
        view, position = view[count:], position + count


@functools.lru_cache(maxsize=_KNOWN_ZEROS)
def zeros_sha256(n: int) -> str:
    """Return the hex sha256 of `n` zero bytes."""
    digest = hashlib.sha256()
    block = bytes(min(n, _CHUNK))
    for _ in range(n // _CHUNK):
        digest.update(block)
    digest.update(block[: n % _CHUNK])
    return digest.hexdigest()


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

    Raises BadInput when the source ends too early; an OSError (ENOSPC, EIO, …) is passed on.
    """
    copied = _copy_in_kernel(source_fd, target_fd, source_offset, target_offset, count, progress)
    begin, target_offset = source_offset + copied, target_offset + copied
    for piece in pieces_of(source_fd, begin, source_offset + count, _BUFFER):
        write_all(target_fd, piece, target_offset)
        target_offset += len(piece)
        if progress is not None:
            progress(len(piece))


def _copy_in_kernel(
    source_fd: int,
    target_fd: int,
    source_offset: int,
    target_offset: int,
    count: int,
    progress: Callable[[int], None] | None,
) -> int:
    """Copy by the kernel as far as possible; return how many bytes were copied.

    If these are fewer than `count`, the copy through a buffer continues and finds the cause.
    """
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
        # Nothing moved: the source has ended, or the file system only claims support (kernels 5.3 to 5.18).
        if moved == 0:
            return copied
        copied += moved
        if progress is not None:
            progress(moved)
    return copied


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, repeating where the system writes only a part."""
    rest = memoryview(data).cast("B") if data else memoryview(b"")
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest = rest[written:]
        offset += written


def reserve(fd: int, size: int) -> None:
    """Make the file `size` bytes long; ranges that are never written are holes: zeros that take no disk space."""
    os.ftruncate(fd, size)
