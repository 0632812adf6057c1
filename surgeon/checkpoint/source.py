"""Where a checkpoint's files are read from: a folder here, or (in hub.py) a repository there."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from surgeon.checkpoint.header import Header, read_header
from surgeon.checkpoint.opening import open_regular, read_capped
from surgeon.checkpoint.side_files import TEMPLATES_FOLDER
from surgeon.errors import BadInput, printable


class Source(Protocol):
    """The files of one checkpoint. `shown` is what errors call it, fit for a terminal."""

    @property
    def shown(self) -> str:
        """What errors call it."""

    def listing(self) -> dict[str, int]:
        """Every file's relative name and size in bytes, sorted; a folder's name ends in `/`."""

    def small(self, name: str, *, max_bytes: int) -> bytes:
        """A small file's content."""

    def check_small(self, name: str) -> None:
        """Raise BadInput where the file is not one that `small` would read."""

    def headers(self, files: list[str]) -> dict[str, Header]:
        """The header of each shard."""

    def open_shard(self, file: str) -> int:
        """A read-only descriptor of a shard whose header was read."""

    def identity(self) -> list[dict[str, Any]]:
        """What tells that a shard is still the one whose header was read."""

    def check_unchanged(self) -> None:
        """Raise BadInput where a shard is no longer the one whose header was read."""


@dataclass(frozen=True)
class _Identity:
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, fd: int) -> _Identity:
        found = os.fstat(fd)
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


class LocalSource:
    """A folder on this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = printable(str(path))
        self._identities: dict[str, _Identity] = {}

    def listing(self) -> dict[str, int]:
        """Every file's relative name and size in bytes; what lies deeper than chat templates is not looked at."""
        try:
            return dict(sorted({**_list(self.path, ""), **self._templates()}.items()))
        except FileNotFoundError:
            raise BadInput(f"{self.shown}: no such folder") from None
        except NotADirectoryError:
            raise BadInput(f"{self.shown}: not a folder; give the folder of a transformers checkpoint") from None
        except PermissionError:
            raise BadInput(f"{self.shown}: permission denied; make it readable or run as its owner") from None
        except OSError as error:
            raise BadInput(f"{self.shown}: cannot be read ({error.strerror})") from None

    def _templates(self) -> dict[str, int]:
        folder = self.path / TEMPLATES_FOLDER
        if folder.is_symlink() or not folder.is_dir():
            return {}
        return _list(folder, f"{TEMPLATES_FOLDER}/")

    def small(self, name: str, *, max_bytes: int) -> bytes:
        """A small file's content."""
        return read_capped(self.path, name, max_bytes=max_bytes)

    def check_small(self, name: str) -> None:
        """Raise BadInput where the file cannot be opened under the rules."""
        os.close(open_regular(self.path, name))

    def headers(self, files: list[str]) -> dict[str, Header]:
        """The header of each shard; from now on the shard must stay as it is."""
        found: dict[str, Header] = {}
        for file in files:
            fd = open_regular(self.path, file)
            try:
                self._identities[file] = _Identity.of(fd)
                found[file] = read_header(fd, file=file)
            except OSError as error:
                raise BadInput(f"{printable(file)}: cannot be read ({error.strerror})") from None
            finally:
                os.close(fd)
        return found

    def open_shard(self, file: str) -> int:
        """A read-only descriptor of a shard, which must be the one whose header was read."""
        fd = open_regular(self.path, file)
        if _Identity.of(fd) != self._identities[file]:
            os.close(fd)
            raise BadInput(
                f"{printable(str(self.path / file))}: changed since the run began (size, time or inode differ);"
                " start again when nothing writes to the base"
            )
        return fd

    def identity(self) -> list[dict[str, Any]]:
        """Name, size, mtime in nanoseconds and inode of every shard."""
        return [
            {"name": file, "size": known.size, "mtime_ns": known.mtime_ns, "inode": known.inode}
            for file, known in sorted(self._identities.items())
        ]

    def check_unchanged(self) -> None:
        """Open every shard once more and compare."""
        for file in self._identities:
            os.close(self.open_shard(file))


def _list(folder: Path, prefix: str) -> dict[str, int]:
    found: dict[str, int] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found[f"{prefix}{entry.name}/"] = 0
            else:
                found[f"{prefix}{entry.name}"] = _size(entry)
    return found


def _size(entry: os.DirEntry[str]) -> int:
    try:
        followed = entry.stat()
    except OSError:
        # A link to nowhere (or in a circle): its size is told to be 0, opening it tells the rest.
        return 0
    return followed.st_size if stat.S_ISREG(followed.st_mode) else 0
