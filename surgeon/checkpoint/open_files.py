"""Files of a folder, held open from before they are checked until they are sent: what is sent is what was checked.

No link is followed on the way, neither by a file nor by a folder within; only the folder itself may be reached by one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

from surgeon.checkpoint.known_digests import Stamp
from surgeon.checkpoint.source import open_regular
from surgeon.errors import BadInput, printable

# Where the system names a descriptor's own file: a path that no swap of names can lead elsewhere. Not so /dev/fd of
# macOS, whose descriptors share one position; there the files' own paths serve, and `check_unchanged` finds a swap.
_DESCRIPTORS = Path("/proc/self/fd")


class HeldFolder:
    """A folder and some of its files, open until the `with` block ends.

    Raises BadInput where the folder is none or cannot be read.
    """

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
        """Bytes of every file that is held."""
        return MappingProxyType({name: facts.size for name, (_, facts) in self._files.items()})

    def hold(self, name: str) -> None:
        """Open the file `name` (relative, `/` between parts). Raises BadInput for anything but a regular file.

        A link is refused wherever it leads: an allow-list of names says nothing of what lies behind one.
        """
        self._refuse_links(name)
        descriptor = open_regular(self.path, name)
        self._files[name] = descriptor, Stamp.of(os.fstat(descriptor))
        # A link that came after the look above and was followed shows itself here.
        self._check(name)

    def content(self, name: str) -> bytes:
        """All bytes of a small file that is held. Raises BadInput where it cannot be read."""
        descriptor, facts = self._files[name]
        try:
            return os.pread(descriptor, facts.size, 0)
        except OSError as error:
            raise BadInput(f"{self._shown(name)}: cannot be read ({error.strerror})") from None

    def place(self, name: str) -> Path:
        """A path that leads to the file that is held, where the system has one; else its own path."""
        own = _DESCRIPTORS / str(self._files[name][0])
        return own if own.exists() else self.path / name

    def check_unchanged(self) -> None:
        """Raise BadInput where a file that is held was written, replaced or linked since."""
        for name in self._files:
            self._check(name)

    def _check(self, name: str) -> None:
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
        path = self.path
        for part in name.split("/"):
            path /= part
            try:
                linked = stat.S_ISLNK(os.lstat(path).st_mode)
            except OSError:
                # Opening it gives the error, and `_check` compares what is there.
                return
            if linked:
                raise BadInput(
                    f"{printable(str(path))}: a link; only files that lie in the folder itself are sent: put the file"
                    " there, or remove the link"
                )

    def _shown(self, name: str) -> str:
        return printable(str(self.path / name))
