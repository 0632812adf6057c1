"""Sharing a file's bytes without a copy: a hard link (a second name), or a reflink (a file that shares the blocks)."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from surgeon.errors import BadInput, printable

# ioctl_ficlone(2): the target becomes a separate file that shares the source's blocks; a write copies the block first.
_FICLONE = 0x40049409
_WRITING = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_WITHOUT = "leave out --link, and it is copied"


def clone(source: int, target: int) -> bool:
    """Make the open file `target` share all blocks of `source`; return False where the file system cannot do this."""
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        # Another file system, or one without reflinks. A full or failing disk shows when the bytes are copied instead.
        return False
    return True


def can_clone(source: int, folder: Path) -> bool:
    """Return whether a file in `folder` can share the blocks of `source`, tried with an unnamed temporary file."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as trial:
        return clone(source, trial.fileno())
    return False


def check_linkable(source: int, path: Path, folder: Path) -> None:
    """Raise BadInput where the open file `source` at `path` cannot get a second name in `folder`.

    The user must own it: a file shared by two folders is made read-only, which only its owner can do.
    """
    found, shown = os.fstat(source), printable(str(path))
    if found.st_dev != folder.stat().st_dev:
        raise BadInput(
            f"{shown}: on another disk than {printable(str(folder))}, so it cannot be hard-linked there; {_WITHOUT}"
        )
    if found.st_uid != os.geteuid():
        raise BadInput(
            f"{shown}: another user's, so it cannot be made read-only, which a hard-linked file must be; {_WITHOUT}"
        )


def hard_link(source: int, path: Path, target: Path) -> None:
    """Make the open file `source` at `path` read-only, and give it the second name `target`.

    Both names then refer to one file: a write through one name would change both, so nobody may write. Raises BadInput
    where the file cannot be made read-only or linked; the name `target` does not exist then.
    """
    shown = printable(str(path))
    try:
        mode = stat.S_IMODE(os.fstat(source).st_mode)
        if mode & _WRITING:
            os.fchmod(source, mode & ~_WRITING)
        if os.fstat(source).st_mode & _WRITING:
            raise BadInput(f"{shown}: stays writable on this file system, so it is not hard-linked; {_WITHOUT}")
        os.link(path, target)
    except OSError as error:
        raise BadInput(f"{shown}: cannot be hard-linked ({error.strerror}); {_WITHOUT}") from None
    if not os.path.samestat(os.fstat(source), os.lstat(target)):
        target.unlink()
        raise BadInput(f"{shown}: replaced meanwhile; start again when nothing writes to it")
