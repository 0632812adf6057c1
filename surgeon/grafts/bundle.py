"""Joining the runtime's modules into the one file that ships next to weights: `modeling_surgeon.py`.

config.json determines which modules it contains and which classes are composed from them, so the same bytes can be
joined again anywhere. Modules are included whole, ordered by what they need, then by name. Their imports are collected
at the top; imports of one another are dropped.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from surgeon.errors import BadInput
from surgeon.grafts.classes import WIDTH, Use, classes_of, spans_of, uses_of
from surgeon.grafts.composition import Composition, composition_of

CODE_FILE = "modeling_surgeon.py"
_PACKAGE = "surgeon.runtime"

_HEADER = '''"""{title} with what `surgery` in config.json describes beside its native layers.

surgeon joined this file from its modules, only those that this model needs. It imports torch and transformers alone.
"""

from __future__ import annotations

'''


@dataclass(frozen=True)
class Part:
    """One module: its docstring, its code, the names that it defines, what it imports, and the parts it needs.

    `imports` are (module, name in it), or (module, "") for a module itself; a renamed import contains ` as `.
    """

    module: str
    doc: str
    code: str
    names: tuple[str, ...]
    imports: tuple[tuple[str, str], ...]
    needs: tuple[str, ...]


def bundle(config: Mapping[str, Any]) -> bytes:
    """Return the file that ships next to the weights of a checkpoint with this config.

    Raises KeyError for a model type that has no upcycled classes, BadInput where a plugin is broken.
    """
    native = composition_of(config)
    if native is None:
        raise KeyError(config["model_type"])
    return _joined(native, _uses(config, native))


def grafts_in(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the grafts whose code is in the file for this config."""
    native = composition_of(config)
    return () if native is None else tuple(use.rules.name for use in _uses(config, native))


def _uses(config: Mapping[str, Any], native: Composition) -> tuple[Use, ...]:
    """Return the grafts that a config's `surgery` asks for, as far as the model can carry them."""
    raw = config.get("surgery")
    return uses_of(raw if isinstance(raw, Mapping) else {}, native)


def roots_of(native: Composition, uses: tuple[Use, ...]) -> list[str]:
    """Return the modules that a joined file needs directly, sorted by name."""
    asked = {
        "spans": bool(spans_of(native, uses)),
        "twins": any(use.twins for use in uses),
        "crossing": any(use.crosses for use in uses),
        "closing": any(use.gates for use in uses),
    }
    roots = {f"{_PACKAGE}.{name}" for name in ("graft", "heads", *(name for name, there in asked.items() if there))}
    return sorted(roots | {use.rules.part for use in uses} | {part for use in uses for _, part, _ in use.taken or ()})


@cache
def _joined(native: Composition, uses: tuple[Use, ...]) -> bytes:
    """Return the content of the file: header, imports, and the code of all parts that it needs."""
    classes = part_of(f"{_PACKAGE}.classes", classes_of(native, uses))
    parts = [*ordered(roots_of(native, uses)), classes]
    homes: dict[str, str] = {}
    for part in parts:
        for name in part.names:
            assert name not in homes, f"`{name}` stands in {part.module} and in {homes[name]}"
            homes[name] = part.module
    imports = _import_lines({each for part in parts for each in part.imports})
    code = (f"\n\n{_heading(part)}{part.code}\n" for part in parts)
    return "".join([_HEADER.format(title=native.name), imports, *code]).encode()


def _heading(part: Part) -> str:
    """Return the comment above a part whose docstring has more than one line; empty for other parts."""
    told = part.doc.strip()
    if "\n" not in told:
        return ""
    rule = f"# --- {part.module.rpartition('.')[2]} ".ljust(WIDTH, "-")
    return f"{rule}\n{textwrap.indent(told, '# ', lambda line: True)}\n\n\n".replace("# \n", "#\n")


def ordered(roots: Iterable[str]) -> list[Part]:
    """Return the roots and all parts that they need, each after the parts it needs; otherwise ordered by name."""
    found: dict[str, Part] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = read_part(name)
            waiting.extend(found[name].needs)
    placed: dict[str, Part] = {}
    while len(placed) < len(found):
        free = sorted(n for n, part in found.items() if n not in placed and set(part.needs) <= placed.keys())
        assert free, f"parts need each other in a circle: {sorted(set(found) - set(placed))}"
        placed[free[0]] = found[free[0]]
    return list(placed.values())


@cache
def read_part(module: str) -> Part:
    """Read a module as a part; only its source is read, and nothing in it is run."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None, module
    return part_of(module, Path(found.origin).read_text(encoding="utf-8"))


def part_of(module: str, source: str) -> Part:
    """Split a module's source into a part."""
    tree, lines = ast.parse(source), source.splitlines()
    imports: set[tuple[str, str]] = set()
    needs: set[str] = set()
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            imports |= {(f"{alias.name} as {alias.asname}" if alias.asname else alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (sibling := _sibling(module, node)) is not None:
            needs.add(sibling)
            renamed = [alias.asname for alias in node.names if alias.asname]
            assert not renamed, f"{module} renames {renamed} of {sibling}, which no joined file can"
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            _check_ships(module, node)
            imports |= {(node.module or "", ast.unparse(alias)) for alias in node.names}
        elif not (_is_docstring(node) or _only_for_types(node) or isinstance(node, ast.ImportFrom)):
            names += _defined(node)
            continue
        # Blank the lines that go to the top of the joined file, or are left out.
        lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or 0) - node.lineno + 1)
    imports.discard(("typing", "TYPE_CHECKING"))
    code = "\n".join(lines).strip("\n")
    return Part(module, ast.get_docstring(tree) or "", code, tuple(names), tuple(imports), tuple(sorted(needs)))


def _defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement at the top level of a module defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [inner.id for each in targets for inner in ast.walk(each) if isinstance(inner, ast.Name)]
    return []


def _sibling(module: str, node: ast.ImportFrom) -> str | None:
    """Return the part that an import names; None for a module outside the runtime."""
    if node.level == 1 and node.module:
        return f"{module.rpartition('.')[0]}.{node.module}"
    if node.level == 0 and node.module and node.module.startswith(f"{_PACKAGE}."):
        return node.module
    return None


def _check_ships(module: str, node: ast.ImportFrom) -> None:
    """Raise BadInput for an import of the module's own package, or of surgeon's, that is none of a runtime file."""
    package = (node.module or "").partition(".")[0]
    if node.level or package in (_PACKAGE.partition(".")[0], module.partition(".")[0]):
        raise BadInput(
            f"{module}: `{ast.unparse(node)}` does not ship; a runtime file imports its siblings by `from .x import Y`,"
            f" and surgeon's runtime files by `from {_PACKAGE}.x import Y`"
        )


def _is_docstring(node: ast.stmt) -> bool:
    """Return whether a statement is only a text."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _only_for_types(node: ast.stmt) -> bool:
    """Return whether a statement is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _import_lines(imports: Iterable[tuple[str, str]]) -> str:
    """Return the import statements: first `import` of modules, then one `from` import per module."""
    made = "".join(f"import {module}\n" for module, name in sorted(imports) if not name)
    by_module: dict[str, list[str]] = {}
    for module, name in sorted(imports):
        by_module.setdefault(module, []).extend([name] * bool(name))
    for module, names in by_module.items():
        line = f"from {module} import {', '.join(names)}"
        broken = f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
        made += f"{line if len(line) <= WIDTH else broken}\n" if names else ""
    return made


def import_bundle(config: Mapping[str, Any]) -> ModuleType:
    """Import the source `bundle(config)` as a module; the same content is imported only once per process."""
    return _imported(bundle(config))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return the temporary folder of joined files, which exists as long as the process: saving a model copies them."""
    return tempfile.TemporaryDirectory(prefix="surgeon-runtime-")


@cache
def _imported(content: bytes) -> ModuleType:
    """Write a joined file into a temporary package of its own, import the file as a module and return it."""
    package = f"surgeon_joined_{hashlib.sha256(content).hexdigest()[:16]}"
    file = Path(_folder().name) / package / CODE_FILE
    file.parent.mkdir()
    file.write_bytes(content)
    # Saved models name their code by the last part of the module's name; pickles find the module by its full name.
    parent = ModuleType(package)
    parent.__path__ = [str(file.parent)]
    sys.modules[package] = parent
    name = f"{package}.{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
