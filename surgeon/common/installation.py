"""How the package is installed, and whether a library is newer than what it was tested with."""

from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

DISTRIBUTION = "model-surgeon"


def installing(extra: str = "") -> str:
    """Return how to install this package, with the dependencies of `extra` where it is given.

    The distribution is not published; once it is, only this function must change.
    """
    return f"run `pip install -e '.{extra and f'[{extra}]'}'` in surgeon's source tree"


def lacking(what: str, package: str, extra: str) -> str:
    """Return one line that `what` needs a package that is not installed, and that `extra` installs it."""
    return f"{what} needs {package}, which is not installed; {installing(extra)}"


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
