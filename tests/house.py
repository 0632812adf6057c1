"""The house in numbers: `python -m tests.house` prints files, rooms, floors and lines of the package.

A room is a folder of `surgeon/`; a loose module stands beside the rooms. A floor is a level of the rooms' imports:
what imports nothing stands on the first, everything else one above the highest that it imports.
"""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import surgeon

# The package that is tested: the checkout's, or an installed wheel's where the checkout has none.
PACKAGE = Path(surgeon.__file__).resolve().parent


def module_of(file: Path) -> str:
    """`surgeon.apply.write`; a package's `__init__` is the package."""
    name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {module_of(file): file for file in FILES}


def imports(file: Path) -> set[str]:
    """Modules and names that a file imports, inside functions and for types alone too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = node.module or ""
            if node.level:
                above = [*file.relative_to(PACKAGE.parent).parts[: -node.level]]
                home = ".".join([*above, *([home] if home else [])])
            found |= {home, *(f"{home}.{alias.name}" for alias in node.names)}
    return found


def dependencies(file: Path) -> set[str]:
    """The modules of surgeon that a file imports."""
    return {name for name in imports(file) if name in MODULES} - {module_of(file)}


def room_of(module: str) -> str:
    """The room of a module; a file at the top is its own."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def rooms() -> dict[str, set[str]]:
    """Every room (and every loose module) with the others that it imports."""
    graph: dict[str, set[str]] = {}
    for module, file in MODULES.items():
        room = room_of(module)
        graph.setdefault(room, set()).update(room_of(name) for name in dependencies(file))
        graph[room].discard(room)
    return graph


def floors() -> dict[str, int]:
    """The floor of every room, from 1; CycleError where rooms import each other."""
    graph = rooms()
    levels: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        levels[room] = 1 + max((levels[other] for other in graph[room]), default=0)
    return levels


def main() -> None:
    found = floors()
    folders = [room for room in found if (PACKAGE / room).is_dir()]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in FILES)
    print(f"{len(FILES)} files, {lines:,} lines")
    print(f"{len(folders)} rooms, {len(found) - len(folders)} loose modules, {max(found.values())} floors")
    for level in range(max(found.values()), 0, -1):
        print(f"{level:>3}  {', '.join(sorted(room for room in found if found[room] == level))}")


if __name__ == "__main__":
    main()
