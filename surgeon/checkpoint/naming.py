"""What an open file is called, for error messages of code that is given descriptors only."""

from __future__ import annotations

import os
from pathlib import Path

from surgeon.errors import printable


def name_of(fd: int) -> str:
    """The file's path where the system tells it (Linux), else its inode number; fit for a terminal."""
    try:
        return printable(str(Path(f"/proc/self/fd/{fd}").readlink()))
    except OSError:
        return f"file with inode {os.fstat(fd).st_ino}"
