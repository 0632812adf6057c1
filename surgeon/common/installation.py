"""The package's installation, and a check whether another distribution has written into its folder.

On PyPI the name `surgeon` belongs to another project; this one's distribution is `model-surgeon`. Where both are
installed, each has overwritten files of the other, and uninstalling one removes them.
"""

from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

DISTRIBUTION = "model-surgeon"

_PACKAGE = Path(__file__).resolve().parents[1]
# Longer lists of installed files belong to large libraries; reading them would slow the start of a command.
_LONGEST_LIST = 1 << 18


def installing(extra: str = "") -> str:
    """Return how to install this package, with the dependencies of `extra` where it is given.

    The distribution is not published; once it is, only this function must change.
    """
    return f"run `pip install -e '.{extra and f'[{extra}]'}'` in surgeon's source tree"


def lacking(what: str, package: str, extra: str) -> str:
    """Return one line that `what` needs a package that is not installed, and that `extra` installs it."""
    return f"{what} needs {package}, which is not installed; {installing(extra)}"


def clash(package: Path = _PACKAGE) -> str | None:
    """Return one line that names other distributions with files in `package`; None where there are none.

    The lists of installed files next to the package are read as text; nothing is imported.
    """
    own, inside = DISTRIBUTION.replace("-", "_"), f"\n{package.name}/".encode()
    others = set()
    for files in package.parent.glob("*.dist-info/RECORD"):
        name = files.parent.name.partition("-")[0]
        if name.lower().replace(".", "_") != own and inside in b"\n" + _listed(files):
            others.add(name)
    if not others:
        return None
    named = " and ".join(f"`{name}`" for name in sorted(others))
    return (
        f"{package}: {named} and `{DISTRIBUTION}` have both installed files there, so neither is whole;"
        f" `pip uninstall -y {' '.join(sorted(others))} {DISTRIBUTION}`, then {installing()}"
    )


def untested(package: str) -> str | None:
    """Return one line where the installed version of a package is above the range that this distribution requires.

    The range ends with the newest version with which the tests have passed. None where one of the two is not installed.
    """
    try:
        asked = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    ends = (each for r in asked if r.name == package and r.marker is None for each in r.specifier)
    bound = next((each.version for each in ends if each.operator == "<"), None)
    if bound is None or Version(version) < Version(bound):
        return None
    return (
        f"{package} {version} is newer than what this version of surgeon was tested with (below {bound}); `surgeon"
        " verify` shows whether what it writes is right"
    )


def _listed(files: Path) -> bytes:
    """Return the content of a list of installed files; empty where the list is long or unreadable."""
    try:
        return files.read_bytes() if files.stat().st_size < _LONGEST_LIST else b""
    except OSError:
        return b""
