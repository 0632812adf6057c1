"""sha256 over ranges of files, without holding the interpreter's lock or more than a few MiB."""

from __future__ import annotations

import functools
import hashlib
import os

from surgeon.checkpoint.durable import name_of
from surgeon.errors import BadInput

# Two of them fit a core's cache, so that a block is still there when it is hashed and compared.
_CHUNK = 512 * 1024
# A model's zero tensors have only a few sizes.
_KNOWN_ZEROS = 256


def sha256_range(fd: int, begin: int, end: int) -> str:
    """Hex sha256 of the bytes `begin` to `end` of the open file. Raises BadInput when the file ends before `end`.

    Reads into one buffer (a mapping would count as this process's memory); reading and hashing release the lock,
    so that another thread copies meanwhile.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_CHUNK, end - begin)))
    while begin < end:
        count = os.preadv(fd, [buffer[: min(len(buffer), end - begin)]], begin)
        if count == 0:
            raise BadInput(f"{name_of(fd)}: ends {end - begin:,} bytes early; was it cut meanwhile?")
        digest.update(buffer[:count])
        begin += count
    return digest.hexdigest()


def compare_ranges(fd: int, begin: int, other_fd: int, other_begin: int, count: int) -> str | None:
    """Hex sha256 of `count` bytes at `begin` if the other file holds the same bytes at `other_begin`, else None.

    One pass over both. Raises BadInput when a file ends early.
    """
    digest = hashlib.sha256()
    size = min(_CHUNK, count)
    ours, theirs = bytearray(size), bytearray(size)
    while count:
        if count < size:
            size = count
            ours, theirs = bytearray(size), bytearray(size)
        _fill(fd, ours, begin)
        _fill(other_fd, theirs, other_begin)
        if ours != theirs:
            return None
        digest.update(ours)
        begin, other_begin, count = begin + size, other_begin + size, count - size
    return digest.hexdigest()


def _fill(fd: int, buffer: bytearray, position: int) -> None:
    """Fill the whole buffer from the file, starting at `position`."""
    view = memoryview(buffer)
    while view:
        count = os.preadv(fd, [view], position)
        if count == 0:
            raise BadInput(f"{name_of(fd)}: ends {len(view):,} bytes early; was it cut meanwhile?")
        view, position = view[count:], position + count


@functools.lru_cache(maxsize=_KNOWN_ZEROS)
def zeros_sha256(n: int) -> str:
    """Hex sha256 of `n` zero bytes."""
    digest = hashlib.sha256()
    block = bytes(min(n, _CHUNK))
    for _ in range(n // _CHUNK):
        digest.update(block)
    digest.update(block[: n % _CHUNK])
    return digest.hexdigest()
