"""A copy of the package with a deliberate mistake in it, and what tests say of that copy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.house import PACKAGE

ROOT = Path(__file__).resolve().parents[2]
# file in the package, what stands there, what is put in its place.
Edit = tuple[str, str, str]


@dataclass(frozen=True)
class Ran:
    """How tests ended: pytest's exit code, those that failed in order, and all that was printed."""

    code: int
    failed: tuple[str, ...]
    text: str

    @property
    def count(self) -> int:
        """How many failed."""
        found = re.search(r"(\d+) failed", self.text)
        return int(found[1]) if found else 0


def plant(edits: Sequence[Edit], folder: Path) -> None:
    """Copy the package into `folder`, links to tests and plans beside it, and make the edits.

    AssertionError where an edit no longer finds what it replaces.
    """
    # With its byte code, which Python takes by a source's time and size: only what is edited is compiled anew.
    shutil.copytree(PACKAGE, folder / "surgeon")
    for beside in ("tests", "plans", "docs", "benchmarks", "README.md", "pyproject.toml"):
        (folder / beside).symlink_to(ROOT / beside)
    for file, old, new in edits:
        path = folder / "surgeon" / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) >= 1, f"{file} no longer has {old!r}: make this mistake where it stands now"
        path.write_text(text.replace(old, new), encoding="utf-8")


def run_tests(python: Sequence[str], folder: Path, tests: Sequence[str], *, most: int) -> Ran:
    """Run tests on the copy in `folder` until `most` of them have failed."""
    quietly = ("-q", "-n", "0", "-p", "no:cacheprovider", f"--maxfail={most}")
    # What comes with transformers may be a plugin of pytest as well.
    quietly += ("-W", "ignore:Module already imported so cannot be rewritten")
    ran = subprocess.run(
        [*python, "-m", "pytest", *quietly, *tests],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    return Ran(ran.returncode, tuple(failed), ran.stdout + ran.stderr)
