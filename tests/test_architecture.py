"""The plan of the house: the order of the rooms, in which every import runs down, and what may be imported when.

Imports inside functions and for types alone count: they are dependencies all the same.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "surgeon"

# Top-down, in the order in which data flows; a room imports rooms that stand below it here, and nothing else.
ORDER = (
    "__main__",
    "cli",
    "__init__",
    "demo",
    "share",
    "report",
    "continual",
    "evaluate",
    "train",
    "rework",
    "data",
    "verify",
    "apply",
    "models",
    "manifest",
    "plan",
    "operations",
    "blueprint",
    "families",
    "transport",
    "checkpoint",
    "runtime",
    "common",
    "errors",
    "_version",
)

# What rooms that work on bytes and data alone never import, not even inside a function, and where else that holds.
WITHOUT = {
    "plan": ("torch", "numpy", "transformers"),
    "operations": ("torch", "numpy", "transformers"),
    "blueprint": ("torch", "numpy", "transformers"),
    "manifest": ("torch", "numpy", "transformers"),
    "families": ("torch", "numpy", "transformers"),
    "checkpoint": ("torch", "numpy", "transformers"),
    "transport": ("surgeon.checkpoint", "surgeon.runtime", "transformers"),
    "rework": ("torch", "numpy", "transformers"),
    "share": ("torch", "numpy", "transformers"),
    "train/config.py": ("torch", "numpy", "transformers"),
    "continual/config.py": ("torch", "numpy", "transformers"),
    "continual/metrics.py": ("torch", "numpy", "transformers", "surgeon"),
    "common/yaml.py": ("torch", "numpy", "transformers"),
}

FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(file: Path) -> str:
    """`surgeon.apply.write`; a package's `__init__` is the package."""
    name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


def imports(file: Path) -> set[str]:
    """Modules and names that a file imports, wherever it does."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = node.module or ""
            if node.level:
                home = ".".join([*module_of(file).split(".")[: -node.level], *([home] if home else [])])
            found |= {home, *(f"{home}.{alias.name}" for alias in node.names)}
    return found


def dependencies(file: Path) -> set[str]:
    """The modules of surgeon that a file imports."""
    return {name for name in imports(file) if name in MODULES} - {module_of(file)}


def room_of(module: str) -> str:
    """The room of a module; a file at the top is its own."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_every_room_has_its_place_in_the_order() -> None:
    assert {room_of(module) for module in MODULES} == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("room", ORDER)
def test_imports_run_down(room: str) -> None:
    below = ORDER[ORDER.index(room) + 1 :]
    for module, file in MODULES.items():
        if room_of(module) == room:
            up = {name for name in dependencies(file) if room_of(name) not in (room, *below)}
            assert not up, f"{module} imports {sorted(up)}: up, or beside"


def test_no_module_imports_in_a_circle() -> None:
    """CycleError names the circle. A package's own `__init__` holds no code that its modules need."""
    graph = {module: dependencies(file) for module, file in MODULES.items()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("place", WITHOUT)
def test_what_works_on_data_alone_imports_nothing_heavy(place: str) -> None:
    path = PACKAGE / place
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            for forbidden in WITHOUT[place]:
                assert not (name == forbidden or name.startswith(f"{forbidden}.")), f"{file} imports {name}"


def test_only_the_command_line_prints_or_exits() -> None:
    for file in FILES:
        if file.name == "cli.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "sys.exit", "exit", "quit"), f"{file}:{node.lineno} calls {called}"


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
    loaded = imported_by("import surgeon.apply.apply, surgeon.verify.static, surgeon.rework.revert")
    assert "surgeon.apply.write" in loaded
    for heavy in ("torch", "numpy", "transformers", "huggingface_hub", "safetensors", "scipy", "ot"):
        assert heavy not in loaded, heavy


def test_help_imports_no_more_than_the_command_line() -> None:
    loaded = imported_by("import surgeon.cli")
    for heavy in ("pydantic", "yaml", "torch", "surgeon.apply", "surgeon.plan"):
        assert heavy not in loaded, heavy
