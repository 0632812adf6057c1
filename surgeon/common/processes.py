"""Python processes that the package starts; they must not import code from the working directory.

Python puts the working directory first on the path of `-m` and `-c`, and once for every empty entry of PYTHONPATH (a
colon too many). A file `selectors.py` next to a study would then be imported instead of Python's own. The entry by `-m`
is removed before this module is imported (`surgeon/__init__.py`).
"""

import os
import sys

TYPE_CHECKING = False  # do not import `typing` or `__future__`: until the path is safe, import nothing new
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from subprocess import Popen
    from typing import Any

_PATH, _SAFE = "PYTHONPATH", "PYTHONSAFEPATH"


def leave_out_working_folder() -> None:
    """Remove the working directory from this process's path where empty entries of PYTHONPATH added it.

    Processes that libraries start inherit this. An entry that names a folder, also `.`, stays: the user asked for it.
    """
    given = os.environ.get(_PATH, "").split(os.pathsep)
    os.environ.update(_safe(os.environ))
    if len(given) < 2 or "" not in given or sys.flags.ignore_environment:
        return
    try:
        here = os.getcwd()  # noqa: PTH109
    except OSError:
        return
    if here not in {os.path.abspath(entry) for entry in given if entry}:  # noqa: PTH100
        sys.path[:] = [entry for entry in sys.path if entry not in ("", here)]


def start_python(
    arguments: "Sequence[str]", *, environment: "Mapping[str, str]", python: "Sequence[str]", **given: "Any"
) -> "Popen[bytes]":
    """Start `python` (its command) with these arguments, and without the working directory on its path."""
    import subprocess

    return subprocess.Popen([*python, "-P", *arguments], env={**environment, **_safe(environment)}, **given)


def _safe(environment: "Mapping[str, str]") -> dict[str, str]:
    """Return the environment variables that keep the working directory off a Python process's path.

    An empty PYTHONPATH is left out.
    """
    kept = [entry for entry in environment.get(_PATH, "").split(os.pathsep) if entry]
    return {_SAFE: "1", **({_PATH: os.pathsep.join(kept)} if _PATH in environment else {})}
