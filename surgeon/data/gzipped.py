"""Compressed files of texts, unpacked to where any document can be read."""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from typing import BinaryIO

from surgeon.common.library import first_line
from surgeon.errors import BadInput, printable

MAGIC = b"\x1f\x8b"
# Texts unpack to ten times their size, and such as repeat themselves to some more; what is made to fill a disk, to a
# thousand times. Small files may repeat themselves as they like.
_MOST_TIMES, _SMALL = 100, 64 * 1024 * 1024
_PIECE = 1024 * 1024


# Descriptors of what was unpacked in this process, by device, inode, size and time of the compressed file.
_HELD: dict[tuple[int, ...], int] = {}
# A child lets go of them (`surgeon.common.child`) and unpacks for itself.
os.register_at_fork(after_in_child=_HELD.clear)


def unpacked(packed: BinaryIO, shown: str) -> BinaryIO:
    """Open what a file unpacks to, a file without a name that is gone with the process.

    Raises BadInput, which begins with `shown`, for what is damaged, unpacks to too much or to more than there is room.
    """
    about = os.fstat(packed.fileno())
    key = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
    if key not in _HELD:
        most = max(_SMALL, _MOST_TIMES * about.st_size)
        try:
            with tempfile.TemporaryFile() as found, gzip.GzipFile(fileobj=packed) as file:
                while piece := file.read(_PIECE):
                    if found.tell() + len(piece) > most:
                        raise BadInput(
                            f"{printable(shown)}: unpacks to more than {most:,} bytes, {_MOST_TIMES} times its size;"
                            " if you trust it, unpack it yourself"
                        )
                    found.write(piece)
                found.flush()
                _HELD[key] = os.dup(found.fileno())
        except (OSError, EOFError, zlib.error) as error:
            raise BadInput(
                f"{printable(shown)}: cannot be unpacked in {printable(tempfile.gettempdir())} ({first_line(error)});"
                " get the file again, or make room there (TMPDIR names another folder)"
            ) from None
    again = os.fdopen(os.dup(_HELD[key]), "rb")
    again.seek(0)
    return again
