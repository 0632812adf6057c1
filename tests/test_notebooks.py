"""The notebooks run from top to bottom, without a network, where nobody has run them before, and are stored unrun."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.warm import warm

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "tutorial").glob("*.ipynb"))
# It puts a plugin on the path before surgeon looks for any, so it has a process of its own.
APART = "your-own-operation"
RUN = "import sys; from pathlib import Path; from tests.test_notebooks import run; run(Path(sys.argv[1]))"


def cells(notebook: Path) -> list[dict[str, Any]]:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    found: list[dict[str, Any]] = content["cells"]
    return found


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_a_notebook_without_outputs(notebook: Path) -> None:
    held = cells(notebook)
    assert len({cell["id"] for cell in held}) == len(held)
    for cell in held:
        assert cell["cell_type"] in ("markdown", "code")
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
    assert held[0]["source"][0].startswith("# ")
    assert f"(tutorial/{notebook.name})" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def run(notebook: Path) -> None:
    """Every code cell, one after the other."""
    names = {"__name__": "__main__"}
    for cell in cells(notebook):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}: {cell['id']}", "exec"), names)


@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(path, marks=pytest.mark.slow) if path.stem == "a-new-language" else path
        for path in NOTEBOOKS
        if path.stem != APART
    ],
    ids=lambda path: path.stem,
)
# Trainer's default, on a machine without an accelerator.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_it_runs(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(notebook)
    assert capsys.readouterr().out.strip()


def test_an_operation_of_ones_own_runs(tmp_path: Path) -> None:
    notebook = ROOT / "docs" / "tutorial" / f"{APART}.ipynb"
    ran = subprocess.run(
        [*warm(), "-c", RUN, str(notebook)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "identical=True" in ran.stdout
