"""Flush files, replace them and lock a working folder, so that a kill leaves nothing half-written."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surgeon.errors import BadInput, printable

_LOCK = "lock"


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, text: str) -> None:
    """Replace the file at `path` by `text`: at every moment it holds the old content, or all of the new."""
    beside = path.with_suffix(".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync(path.parent)


@contextmanager
def working_in(folder: Path, *, target: Path) -> Iterator[None]:
    """Make `folder` at need and lock it inside. Raises BadInput where another process holds it, to make `target`."""
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"{printable(str(target))}: another process is making it; wait for it") from None
        yield
    finally:
        os.close(lock)


def name_of(fd: int) -> str:
    """The file's path where the system knows it (Linux), else its inode number; fit for a terminal."""
    try:
        return printable(str(Path(f"/proc/self/fd/{fd}").readlink()))
    except OSError:
        return f"file with inode {os.fstat(fd).st_ino}"
