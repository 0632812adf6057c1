"""Joining the runtime's modules into the one file that ships beside weights: `modeling_surgeon.py`.

Which modules it takes, and which classes are composed of them, follows from config.json alone, so the same bytes can be
joined again anywhere. Modules stand in the order in which they need each other, then by name; of each there is what
those classes need. What that imports is collected at the top, and imports of one another fall away.
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

from .classes import WIDTH, Use, classes_of, uses_of
from .composition import Composition, composition_of
from .needed import Definition, definitions_of, needed, source_of

CODE_FILE = "modeling_surgeon.py"
_PACKAGE = "surgeon.runtime"

_HEADER = '''"""{title} with what `surgery` in config.json describes beside its native layers.

surgeon joined this file from its modules, only those that this model needs. It imports torch and transformers alone.
"""

from __future__ import annotations
'''


@dataclass(frozen=True)
class Part:
    """One module: its docstring, its definitions, what it imports from elsewhere, and the parts it needs.

    `imports` maps the names that its code uses to (module, name there), or to (module, "") for a module itself.
    """

    module: str
    doc: str
    definitions: tuple[Definition, ...]
    imports: Mapping[str, tuple[str, str]]
    needs: tuple[str, ...]


def bundle(config: Mapping[str, Any]) -> bytes:
    """The file that belongs beside the weights of a checkpoint with this config.

    Raises KeyError for a model type that has no upcycled classes, BadInput where a plugin is broken.
    """
    native = composition_of(config)
    if native is None:
        raise KeyError(config["model_type"])
    raw = config.get("surgery")
    return _joined(native, uses_of(raw if isinstance(raw, Mapping) else {}, native))


def grafts_in(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the grafts whose code is in the file that belongs to a config."""
    native, raw = composition_of(config), config.get("surgery")
    uses = () if native is None else uses_of(raw if isinstance(raw, Mapping) else {}, native)
    return tuple(use.rules.name for use in uses)


def roots_of(native: Composition, uses: tuple[Use, ...]) -> list[str]:
    """The modules that are needed for their own sake."""
    asked = {
        "spans": bool(native.spans),
        "twins": any(use.twins for use in uses),
        "crossing": any(use.crosses for use in uses),
        "closing": any(use.gates for use in uses),
    }
    roots = {f"{_PACKAGE}.{name}" for name in ("graft", "heads", *(name for name, there in asked.items() if there))}
    return sorted(roots | {use.rules.part for use in uses} | {part for use in uses for _, part, _ in use.taken or ()})


@cache
def _joined(native: Composition, uses: tuple[Use, ...]) -> bytes:
    classes = part_of(f"{_PACKAGE}.classes", classes_of(native, uses))
    parts = [*ordered(roots_of(native, uses)), classes]
    imports: dict[str, tuple[str, str]] = {}
    homes: dict[str, str] = {}
    for part in parts:
        for name, source in part.imports.items():
            assert imports.setdefault(name, source) == source, f"{part.module} imports another `{name}`: {source}"
        for each in part.definitions:
            assert not each.name or each.name not in homes, f"`{each.name}` stands in {part.module} and elsewhere"
            homes[each.name] = part.module
    assert not set(imports) & set(homes), set(imports) & set(homes)
    kept = chosen(parts, classes)
    members = [member for each in kept.values() for one in each for member in (one.head, *one.members)]
    named = {name for member in members for name in member.names}
    used = {name: source for name, source in imports.items() if name in named}
    text = [_HEADER.format(title=native.name), _import_lines(used)]
    for part in parts:
        if not kept[part.module]:
            continue
        name = part.module.rpartition(".")[2]
        note = part.doc
        told = textwrap.indent(note.strip(), "# ", lambda line: True).replace("# \n", "#\n")
        rule = f"# --- {name} ".ljust(WIDTH, "-")
        # ruff takes a comment right after imports for theirs, with one empty line between.
        above = chr(10) if len(text) > 2 else ""
        text.append(f"{above}\n{rule}\n{told}{chr(10) if told else ''}\n\n{source_of(kept[part.module])}\n")
    return "".join(text).encode()


def chosen(parts: Iterable[Part], classes: Part) -> dict[str, list[Definition]]:
    """What a joined file has of each of its parts, by module: all of the composed classes, and what those need."""
    others = [each for part in parts if part is not classes for each in part.definitions]
    roots = [member for each in classes.definitions for member in (each.head, *each.members)]
    found = {each.name: each for each in needed(others, roots)}
    kept = {part.module: [found[d.name] for d in part.definitions if d.name in found] for part in parts}
    return kept | {classes.module: list(classes.definitions)}


def ordered(roots: Iterable[str]) -> list[Part]:
    """The roots and all that they need, each after what it needs; where that leaves a choice, by name."""
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
    """A module as a part; only its source is read, nothing of it runs."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None, module
    return part_of(module, Path(found.origin).read_text(encoding="utf-8"))


def part_of(module: str, source: str) -> Part:
    """A module's source taken apart."""
    tree = ast.parse(source)
    lines = source.splitlines()
    doc = ast.get_docstring(tree) or ""
    imports: dict[str, tuple[str, str]] = {}
    needs: set[str] = set()
    body: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            imports |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            sibling = _sibling(module, node)
            if sibling is not None:
                needs.add(sibling)
                renamed = [alias.asname for alias in node.names if alias.asname]
                assert not renamed, f"{module} renames {renamed} of {sibling}, which no joined file can"
            elif node.module != "__future__":
                assert node.level == 0 and node.module, f"{module} imports `{ast.unparse(node)}`, which does not ship"
                imports |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif not (_is_docstring(node) or _only_for_types(node)):
            body.append(node)
    imports.pop("TYPE_CHECKING", None)
    return Part(module, doc, tuple(definitions_of(body, lines)), imports, tuple(sorted(needs)))


def _sibling(module: str, node: ast.ImportFrom) -> str | None:
    """The part that an import names; None for what comes from elsewhere."""
    if node.level == 1 and node.module:
        return f"{module.rpartition('.')[0]}.{node.module}"
    if node.level == 0 and node.module and node.module.startswith(f"{_PACKAGE}."):
        return node.module
    return None


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _only_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _import_lines(imports: Mapping[str, tuple[str, str]]) -> str:
    """Import statements as ruff would sort them: the standard library first, then the rest."""
    plain = sorted((module, name) for name, (module, what) in imports.items() if not what)
    by_module: dict[str, list[str]] = {}
    for name, (module, what) in imports.items():
        if what:
            by_module.setdefault(module, []).append(what if what == name else f"{what} as {name}")
    blocks = []
    for ours in (True, False):
        lines = [
            f"import {module}" + (f" as {name}" if name != module else "")
            for module, name in plain
            if (module.partition(".")[0] in sys.stdlib_module_names) is ours
        ]
        for module in sorted(by_module):
            if (module.partition(".")[0] in sys.stdlib_module_names) is ours:
                named = sorted(by_module[module], key=_import_order)
                # What gets another name stands in a statement of its own.
                own = [name for name in named if " as " not in name]
                lines += [_from_line(module, own)] * bool(own)
                lines += [_from_line(module, [name]) for name in named if " as " in name]
        blocks.append("\n".join(lines))
    return "\n" + "\n\n".join(block for block in blocks if block) + "\n"


def _import_order(name: str) -> tuple[int, str]:
    """Constants, classes, the rest, each by name: the order of isort."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, name


def _from_line(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def import_bundle(config: Mapping[str, Any]) -> ModuleType:
    """The module that `bundle(config)` is; imported once in a process for each content."""
    return _imported(bundle(config))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where joined files lie as long as the process runs: saving a model copies its file from there."""
    return tempfile.TemporaryDirectory(prefix="surgeon-runtime-")


@cache
def _imported(content: bytes) -> ModuleType:
    package = f"surgeon_joined_{hashlib.sha256(content).hexdigest()[:16]}"
    file = Path(_folder().name) / package / CODE_FILE
    file.parent.mkdir()
    file.write_bytes(content)
    # Saved models name their code by the module's last name, and pickles find the module by its whole one.
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
