"""A check of names of new outputs: every file system, and every library that opens the output, must accept them."""

from __future__ import annotations

import os
from pathlib import Path

from surgeon.errors import BadInput, printable

# Bytes that surgeon's own folders next to an output add to its name: a dot, `.surgeon`, `.old-12`, `.training`, a
# suffix of a temporary file.
_BESIDE = 32
# The longest name where the file system does not report a limit.
_LONGEST = 255


def check_new_name(path: Path) -> None:
    """Raise BadInput for a path that cannot be written, or that some library could not open afterwards.

    Its last part must be a real name, short enough for the longer names of surgeon's folders next to it.
    """
    shown = printable(str(path))
    try:
        # safetensors, JSON and the card accept only UTF-8 names.
        raw = os.fspath(path).encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(f"{shown}: a name that is not UTF-8; choose one that is") from None
    if b"\0" in raw:
        raise BadInput(f"{shown}: a name with a NUL character, which no file has; choose another name")
    if path.name == "..":
        raise BadInput(f"{shown}: ends in `..`; write the path without it")
    if not path.name.isprintable():
        raise BadInput(f"{shown}: a name with a character that cannot be shown; choose a plain name")
    try:
        parent_is_there = path.absolute().parent.is_dir()
        most = os.pathconf(path.absolute().parent, "PC_NAME_MAX") if parent_is_there else _LONGEST
    except OSError as error:
        raise BadInput(f"{shown}: cannot be reached ({error.strerror}); choose another place") from None
    if (length := len(path.name.encode("utf-8"))) > most - _BESIDE:
        raise BadInput(
            f"{shown}: its name has {length} bytes; at most {most - _BESIDE} fit here (the file system takes {most},"
            f" and surgeon's own folder beside it needs up to {_BESIDE} more); choose a shorter name"
        )
