"""Opening files of a folder that anybody may have made: regular files only, and no link that leads elsewhere.

The Hub's cache is made of links (`snapshots/<commit>/f` to `../../blobs/<etag>`, which itself may be a link into
the cache's shared store `blobs/ab/<64 hex digits>`): exactly those are followed, and links to a neighbour.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Never

from surgeon.errors import BadInput, printable

_SHARED_BLOB = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")


def open_regular(folder: Path, name: str) -> int:
    """A read-only descriptor of the regular file `name` (relative, checked by the caller) in `folder`.

    Nothing else is ever opened: a FIFO would hang, a device may act on being opened. Raises BadInput.
    """
    path = folder / name
    shown = printable(str(path))
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            path = _behind_link(folder, path, shown)
            found = os.lstat(path)
        _check_regular(found, shown)
        # The file may have been swapped since: neither follow a link now nor wait for a FIFO's writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        _refuse(error, shown)
    try:
        _check_regular(os.fstat(fd), shown)
    except BadInput:
        os.close(fd)
        raise
    return fd


def read_capped(folder: Path, name: str, *, max_bytes: int) -> bytes:
    """All bytes of a small regular file in `folder`; BadInput where it holds more than `max_bytes`."""
    shown = printable(str(folder / name))
    fd = open_regular(folder, name)
    try:
        size = os.fstat(fd).st_size
        if size > max_bytes:
            raise BadInput(f"{shown}: {size:,} bytes, at most {max_bytes:,} are read")
        with open(fd, "rb", closefd=False) as file:
            return file.read(max_bytes)
    except OSError as error:
        _refuse(error, shown)
    finally:
        os.close(fd)


def read_range(fd: int, begin: int, end: int, *, file: str, name: str) -> bytearray:
    """The bytes `begin` to `end` of an open file, which hold tensor `name`; BadInput where the file is shorter."""
    content = bytearray(end - begin)
    rest = memoryview(content)
    try:
        while rest:
            count = os.preadv(fd, [rest], begin)
            if count == 0:
                raise BadInput(f"{printable(file)}: ends within tensor {printable(name)}; was it cut meanwhile?")
            rest, begin = rest[count:], begin + count
    except OSError as error:
        raise BadInput(f"{printable(file)}: cannot be read ({error.strerror})") from None
    return content


def _behind_link(folder: Path, link: Path, shown: str) -> Path:
    home = Path(os.path.realpath(folder))
    target = _target(link)
    if target.parent == home:
        return target
    repository = home.parent.parent
    if home.parent.name == "snapshots" and target.parent == repository / "blobs":
        if not target.is_symlink():
            return target
        shared = _target(target)
        store = repository.parent / "blobs"
        if shared.parent.parent == store and _SHARED_BLOB.fullmatch(f"{shared.parent.name}/{shared.name}"):
            return shared
    raise BadInput(
        f"{shown}: a link that leads out of the folder, to {printable(str(target))}; only the Hub cache's own links"
        " are followed: put the file itself here"
    )


def _target(link: Path) -> Path:
    # The last component is not resolved: it must be a file by itself, not one more link.
    joined = link.parent / os.readlink(link)  # noqa: PTH115 (an absolute target replaces the parent)
    return Path(os.path.realpath(joined.parent)) / joined.name


def _check_regular(found: os.stat_result, shown: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        kinds = {
            stat.S_IFDIR: "a directory",
            stat.S_IFIFO: "a FIFO",
            stat.S_IFLNK: "a link behind a link",
            stat.S_IFSOCK: "a socket",
        }
        kind = kinds.get(stat.S_IFMT(found.st_mode), "a device")
        raise BadInput(f"{shown}: {kind}, expected a regular file")


def _refuse(error: OSError, shown: str) -> Never:
    if isinstance(error, FileNotFoundError):
        raise BadInput(f"{shown}: no such file, or a link to nowhere; is the download complete?") from None
    if isinstance(error, PermissionError):
        raise BadInput(f"{shown}: permission denied; make it readable (`chmod u+r`) or run as its owner") from None
    raise BadInput(f"{shown}: cannot be read ({error.strerror})") from None
