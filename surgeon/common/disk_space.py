"""Disk space: checked in advance, and reported in one line with the needed and the free bytes and what to do."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surgeon.common.formatting import size
from surgeon.errors import BadInput, printable

# No space on the device, over a quota, over a limit of the file's size.
_TOO_LARGE = "file too large for `ulimit -f` or the file system"
_NO_ROOM = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: _TOO_LARGE}
# Messages of libraries in other languages for the same errors: safetensors gives the system's error number, torch only
# that a file is too short.
_SAID = re.compile(
    rf"\(os error (?P<number>{'|'.join(map(str, _NO_ROOM))})\)"
    r"|No space left on device|file write failed|unexpected pos \d+ vs \d+|basic_ios::clear: iostream error"
)


def no_room(error: BaseException | None) -> str | None:
    """Return in words why there was no room, where the error or one of its causes is such an error; else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return _NO_ROOM[error.errno]
        if not isinstance(error, OSError) and (said := _SAID.search(str(error))):
            return _NO_ROOM[int(said["number"])] if said["number"] else "the disk took no more"
        error = error.__cause__ or error.__context__
    return None


def free_bytes(path: Path) -> int:
    """Return the bytes still free for the user at the place of `path`. Raises OSError where there is no such folder."""
    while not path.exists() and path != path.parent:
        path = path.parent
    system = os.statvfs(path)
    return system.f_bavail * system.f_frsize


def check_room(path: Path, needed_bytes: int, *, what: str = "") -> None:
    """Raise BadInput, with both numbers, where the file system of `path` has less than `needed_bytes` free.

    `what` names the purpose in the error.
    """
    free = free_bytes(path)
    if needed_bytes > free:
        raise BadInput(
            f"{printable(str(path))}: {size(needed_bytes)} are needed{what}, {size(free)} are free on its disk;"
            " free some or choose another disk"
        )


@contextmanager
def writing(
    path: Path, *, kept: str = "", kept_in: Path | None = None, needed_bytes: int | None = None
) -> Iterator[None]:
    """Convert disk errors in this block to BadInput, also libraries' errors where there is no room.

    The message names the file, the problem, and what is kept: `kept`, which is added only where `kept_in`, if given,
    exists after the error. With `needed_bytes`, a message about missing room also contains this number.
    """

    def message(error: BaseException) -> str:
        """Return the message for a disk error, with the free bytes where there is no room."""
        where = printable(str(getattr(error, "filename", None) or path))
        so_far = f"; {kept}" if kept and (kept_in is None or kept_in.exists()) else ""
        problem = no_room(error)
        if problem is None:
            return f"{where}: {getattr(error, 'strerror', None) or printable(str(error))}{so_far}"
        try:
            there = f"{size(free_bytes(path))} are free there"
        except OSError:
            there = "nobody can say what is free there"
        needed = "" if needed_bytes is None else f"{size(needed_bytes)} are needed in all, "
        do = "raise that limit and run" if problem == _TOO_LARGE else "make room and run"
        return f"{where}: {problem} ({needed}{there}); {do} the same command again{so_far}"

    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BadInput(message(error)) from error
    except Exception as error:
        if isinstance(error, BadInput) or no_room(error) is None:
            raise
        raise BadInput(message(error)) from error
