"""Files whose bytes do not move: hard-linked under a second name, or sharing another file's blocks (a reflink)."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from surgeon.errors import BadInput, printable

# ioctl_ficlone(2): the target becomes a file of its own with the source's blocks, copied when one of them is written.
_FICLONE = 0x40049409
_WRITING = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_WITHOUT = "leave out --link, and it is copied"


def clone(source: int, target: int) -> bool:
    """Make the open file `target` share all blocks of `source`; False where their file system cannot."""
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
    """Whether a file in `folder` can share the blocks of `source`; tried on a file without a name."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as trial:
        return clone(source, trial.fileno())
    return False


def check_linkable(source: int, path: Path, folder: Path) -> None:
    """Raise BadInput where the open file `source`, which lies at `path`, cannot get a second name in `folder`.

    It must be ours: what two folders hold in common is made read-only, and only its owner can do that.
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
    """Make the open file `source`, which lies at `path`, read-only, and give it the second name `target`.

    Both names are of one file from then on: who writes to one writes to the other, so nobody may write. Raises BadInput
    where it cannot be made so, or cannot be linked; nothing has the name `target` then.
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
