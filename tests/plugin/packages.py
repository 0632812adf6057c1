"""A package of somebody else, installed into a folder of its own, and code that runs with it on the path."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.warm import warm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMAND = "from surgeon.cli import main; main()"


def install(site: Path, *, name: str = "surgeon_scale", entry_points: str | None = None, code: str = "") -> Path:
    """What installing the package leaves behind; `code` is that of another one than those that lie here."""
    if (HERE / name).is_dir():
        shutil.copytree(HERE / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    info = site / f"{name}-0.1.dist-info"
    info.mkdir(parents=True)
    if code:
        (site / f"{name}.py").write_text(code, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(entry_points or (HERE / f"{name}.txt").read_text())
    return site


def run(code: str, *arguments: object, site: Path | None, expect: int = 0) -> str:
    """Run code that uses surgeon, with the package installed in `site` or without it; its output, or its error."""
    path = os.pathsep.join(map(str, [ROOT] if site is None else [site, ROOT]))
    ran = subprocess.run(
        [*warm(), "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == expect, ran.stderr[-3000:]
    return ran.stdout if expect == 0 else ran.stderr
