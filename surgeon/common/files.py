"""Reading files named on the command line: only regular ones, since a FIFO would hang and a device never ends."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from surgeon.errors import BadInput, printable


def check_readable(path: Path) -> None:
    """Raise BadInput where a text is no regular file that can be read."""
    shown = printable(str(path))
    if path.is_dir() or not path.exists():
        why = "a folder" if path.is_dir() else f"no such file; looked at {printable(str(path.absolute()))}"
        raise BadInput(f"{shown}: cannot read the text ({why}); check the path")
    if not os.access(path, os.R_OK):
        raise BadInput(f"{shown}: cannot read the text (Permission denied); check the path")


def read_given(path: Path, *, what: str, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes; links are followed. Errors (BadInput) call it `what`."""
    shown = printable(str(path))
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadInput(f"{shown}: cannot read the {what} ({error.strerror}); check the path") from None
    except ValueError:
        raise BadInput(f"{shown}: a name with a NUL character, which no file has; check the path") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise BadInput(f"{shown}: not a regular file; give the file of a {what}")
    with os.fdopen(handle, "rb") as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise BadInput(f"{shown}: cannot read the {what} ({error.strerror}); check the disk") from None
    if len(content) > most:
        raise BadInput(f"{shown}: larger than {most:,} bytes; is this a {what}?")
    return content


def file_digests(files: Iterable[Path]) -> list[str]:
    """Return the SHA-256 digests of files, in order."""
    found = []
    for file in files:
        with file.open("rb") as handle:
            found.append(hashlib.file_digest(handle, "sha256").hexdigest())
    return found
