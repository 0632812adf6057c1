"""Files of a folder that stay open from the check until they are sent, so that exactly the checked bytes are sent.

No link is followed, neither to a file nor to a folder within; only the folder itself may be reached through a link.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

from surgeon.checkpoint.source import Stamp, open_regular
from surgeon.errors import BadInput, printable

# Linux's path to the file behind a descriptor, which renaming files cannot redirect. On macOS, descriptors of /dev/fd
# share one position, so the files' own paths are used there, and `check_unchanged` finds a replaced file.
_DESCRIPTORS = Path("/proc/self/fd")


class HeldFolder:
    """A folder and some of its files, kept open until the `with` block ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, tuple[int, Stamp]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor, _facts in self._files.values():
            os.close(descriptor)
        self._files.clear()

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size in bytes of every open file."""
        return MappingProxyType({name: facts.size for name, (_, facts) in self._files.items()})

    def hold(self, name: str) -> None:
        """Open the file `name` (relative, `/` between parts). Raises BadInput for anything but a regular file.

        A link is refused wherever it leads: an allow-list of names cannot judge the target of a link.
        """
        self._refuse_links(name)
        descriptor = open_regular(self.path, name)
        self._files[name] = descriptor, Stamp.of(os.fstat(descriptor))
        # Detects a link that was created after the check above and then followed.
        self._check(name)

    def content(self, name: str) -> bytes:
        """Return all bytes of a small open file. Raises BadInput where it cannot be read."""
        descriptor, facts = self._files[name]
        try:
            return os.pread(descriptor, facts.size, 0)
        except OSError as error:
            raise BadInput(f"{self._shown(name)}: cannot be read ({error.strerror})") from None

    def place(self, name: str) -> Path:
        """Return a path that leads to the open file itself, where the system has one; else the file's own path."""
        own = _DESCRIPTORS / str(self._files[name][0])
        return own if own.exists() else self.path / name

    def check_unchanged(self) -> None:
        """Raise BadInput where an open file was written, replaced or linked since it was opened."""
        for name in self._files:
            self._check(name)

    def _check(self, name: str) -> None:
        """Raise BadInput where the open file, or the file now at its path, has changed since it was opened."""
        descriptor, facts = self._files[name]
        self._refuse_links(name)
        try:
            there = Stamp.of(os.lstat(self.path / name))
        except OSError:
            there = None
        if not facts == there == Stamp.of(os.fstat(descriptor)):
            raise BadInput(
                f"{self._shown(name)}: changed while it was checked and sent; start again when nothing writes there"
            )

    def _refuse_links(self, name: str) -> None:
        """Raise BadInput where a part of the path `name` inside the folder is a link; ignore a missing part."""
        path = self.path
        for part in name.split("/"):
            path /= part
            try:
                linked = stat.S_ISLNK(os.lstat(path).st_mode)
            except OSError:
                # Opening the file later gives the error, and `_check` detects a difference.
                return
            if linked:
                raise BadInput(
                    f"{printable(str(path))}: a link; only files that lie in the folder itself are sent: put the file"
                    " there, or remove the link"
                )

    def _shown(self, name: str) -> str:
        return printable(str(self.path / name))
