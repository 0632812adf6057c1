"""The directions in which the rooms may depend on each other (DESIGN), and what may be imported when."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "surgeon"

# Room → what it must never import. Function-local imports count too: they are dependencies all the same.
FORBIDDEN = {
    "transport": (
        "surgeon.plan",
        "surgeon.operations",
        "surgeon.blueprint",
        "surgeon.checkpoint",
        "surgeon.families",
    ),
    "checkpoint": (
        "surgeon.plan",
        "surgeon.operations",
        "surgeon.blueprint",
        "surgeon.families",
        "torch",
        "numpy",
    ),
    "families": ("surgeon.plan", "surgeon.operations", "surgeon.blueprint", "torch", "transformers"),
    "runtime": ("surgeon",),
    "plan": ("torch", "numpy", "transformers", "surgeon.execute", "surgeon.compute", "surgeon.transport"),
    "operations": (
        "torch",
        "numpy",
        "transformers",
        "surgeon.execute",
        "surgeon.compute",
        "surgeon.transport",
    ),
    "blueprint.py": ("torch", "numpy", "surgeon.execute", "surgeon.compute", "surgeon.plan"),
    "recipes.py": ("torch", "numpy", "surgeon"),
    "undoing.py": ("torch", "numpy", "transformers", "surgeon.api", "surgeon.plan", "surgeon.operations"),
    "deltas.py": ("torch", "numpy", "transformers", "huggingface_hub", "surgeon.api", "surgeon.plan"),
    "sharing.py": ("torch", "numpy", "transformers", "huggingface_hub", "surgeon.api", "surgeon.plan"),
    "exporting.py": ("torch", "numpy", "transformers", "surgeon.api", "surgeon.operations", "surgeon.execute"),
    "comparing.py": ("torch", "numpy", "transformers", "surgeon.api", "surgeon.plan", "surgeon.execute"),
    "metadata.py": ("torch", "numpy", "huggingface_hub", "surgeon.api", "surgeon.execute"),
    "views/card.py": ("torch", "numpy", "huggingface_hub", "surgeon.api", "surgeon.execute"),
    "api": ("surgeon.cli",),
    "results": ("torch", "numpy", "transformers", "surgeon.api", "surgeon.cli", "surgeon.views"),
    "verification": ("surgeon.api", "surgeon.cli", "surgeon.views"),
    "training": ("surgeon.api", "surgeon.cli", "surgeon.views", "surgeon.plan", "surgeon.operations"),
    "evaluation": ("surgeon.api", "surgeon.cli", "surgeon.views", "surgeon.plan", "surgeon.operations"),
    "tasks": ("surgeon.api", "surgeon.cli", "surgeon.views"),
    "tasks/config.py": ("torch", "numpy", "transformers"),
    "tasks/metrics.py": ("torch", "numpy", "transformers", "surgeon"),
    "training/names.py": ("torch", "numpy", "transformers"),
    "training/config.py": ("torch", "numpy", "transformers"),
    "strict_yaml.py": ("surgeon.plan", "surgeon.training", "torch"),
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("room", FORBIDDEN)
def test_rooms_depend_downwards_only(room: str) -> None:
    place = PACKAGE / room
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            for forbidden in FORBIDDEN[room]:
                assert not (name == forbidden or name.startswith(f"{forbidden}.")), f"{file} imports {name}"


def test_only_the_command_line_prints_or_exits() -> None:
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.name == "cli.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "sys.exit", "exit", "quit"), f"{file}:{node.lineno} calls {called}"


def test_runtime_is_flat_and_knows_only_its_siblings() -> None:
    """Parts know their siblings by `from .x import Y` and nothing else, so that they can be joined."""
    runtime = PACKAGE / "runtime"
    shipped = [path for path in runtime.glob("*.py") if path.name != "__init__.py"]
    for file in shipped:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1
                assert node.module, f"{file}: `from . import x` does not load as remote code"
                assert (runtime / f"{node.module}.py").exists()
                assert "." not in node.module


def imported_by(code: str) -> set[str]:
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(ran.stdout.split())


def test_bytes_only_work_imports_neither_torch_nor_the_hub() -> None:
    """What keeps `apply` of a copying plan at the memory and start-up of a file copy."""
    code = "import surgeon.api, surgeon.execute, surgeon.verification.static, surgeon.views.terminal"
    loaded = imported_by(code)
    assert "surgeon.execute" in loaded
    for heavy in ("torch", "numpy", "transformers", "huggingface_hub", "safetensors", "scipy", "ot"):
        assert heavy not in loaded, heavy


def test_help_imports_no_more_than_the_command_line() -> None:
    loaded = imported_by("import surgeon.cli")
    for heavy in ("pydantic", "yaml", "torch", "surgeon.api"):
        assert heavy not in loaded, heavy
