"""Room on a disk: looked at before, and missed in one line that says what is needed, what is there and what to do."""

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
# What libraries in other languages say of the same: safetensors the system's number, torch that a file is too short.
_SAID = re.compile(
    rf"\(os error (?P<number>{'|'.join(map(str, _NO_ROOM))})\)"
    r"|No space left on device|file write failed|unexpected pos \d+ vs \d+|basic_ios::clear: iostream error"
)


def no_room(error: BaseException | None) -> str | None:
    """Return in words why there was no room, where an error or one behind it comes of that; else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return _NO_ROOM[error.errno]
        if not isinstance(error, OSError) and (said := _SAID.search(str(error))):
            return _NO_ROOM[int(said["number"])] if said["number"] else "the disk took no more"
        error = error.__cause__ or error.__context__
    return None


def free_bytes(path: Path) -> int:
    """Bytes that we may still write where `path` is or will be. Raises OSError where there is no such folder."""
    while not path.exists() and path != path.parent:
        path = path.parent
    system = os.statvfs(path)
    return system.f_bavail * system.f_frsize


def check_room(path: Path, needed_bytes: int, *, what: str = "") -> None:
    """Raise BadInput, with both numbers, where the file system of `path` has less room; `what` says what it is for."""
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
    """Turn the errors of a disk in this block into BadInput; libraries' too, where there is no room.

    It says where, what, and what became of it: `kept`, which is said only where `kept_in`, if given, is there after
    the error.
    """

    def message(error: BaseException) -> str:
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
