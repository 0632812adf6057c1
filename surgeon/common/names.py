"""Names of what is to be written: what every file system takes, and what every library that opens it takes."""

from __future__ import annotations

import os
from pathlib import Path

from surgeon.errors import BadInput, printable

# What surgeon's own folders beside an output add to its name: a dot, `.surgeon`, `.old-12`, `.training`, a suffix of a
# temporary file.
_BESIDE = 32
# Where the file system does not say.
_LONGEST = 255


def check_new_name(path: Path) -> None:
    """Raise BadInput for a path that nothing can be written to, or that not every library could open afterwards.

    Its last part must be a name of its own, short enough that the folders surgeon makes beside it fit too.
    """
    shown = printable(str(path))
    try:
        # safetensors takes no other names, and neither do JSON and the card.
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
