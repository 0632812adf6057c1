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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from .classes import WIDTH, Use, classes_of, sites_of, spans_of, uses_of
from .composition import Composition, composition_of
from .folding import QUESTIONS, folded
from .needed import Definition, definitions_of, needed, source_of
from .rules import Surgery
from .spread import for_each_layer

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
    return next(bundles(config))


def bundles(config: Mapping[str, Any]) -> Iterator[bytes]:
    """As `bundle`; of a config whose losses nobody can read, which is refused where it is read, all that it may be."""
    native = composition_of(config)
    if native is None:
        raise KeyError(config["model_type"])
    raw = config.get("surgery")
    raw = raw if isinstance(raw, Mapping) else {}
    uses = uses_of(raw, native)
    for losses in _losses(raw, uses):
        yield _joined(native, uses, present_in(raw, native, uses, losses))


def grafts_in(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the grafts whose code is in the file that belongs to a config."""
    native, raw = composition_of(config), config.get("surgery")
    uses = () if native is None else uses_of(raw if isinstance(raw, Mapping) else {}, native)
    return tuple(use.rules.name for use in uses)


def roots_of(native: Composition, uses: tuple[Use, ...]) -> list[str]:
    """The modules that are needed for their own sake."""
    asked = {
        "spans": bool(spans_of(native, uses)),
        "twins": any(use.twins for use in uses),
        "crossing": any(use.crosses for use in uses),
        "closing": any(use.gates for use in uses),
    }
    roots = {f"{_PACKAGE}.{name}" for name in ("graft", "heads", *(name for name, there in asked.items() if there))}
    return sorted(roots | {use.rules.part for use in uses} | {part for use in uses for _, part, _ in use.taken or ()})


def present_in(
    raw: Mapping[str, Any], native: Composition, uses: tuple[Use, ...], losses: frozenset[str] | None = None
) -> frozenset[str]:
    """What of `present` a model has: what its grafts bring, and what their modules do (their hooks, by name)."""
    sites, spans = sites_of(native, uses), spans_of(native, uses)
    losses = _losses(raw, uses)[0] if losses is None else losses
    hooks = {name for use in uses for name in _members(use.rules.module, use.rules.part)}
    found = {
        "TWINS": any(use.twins for use in uses),
        "CROSSES": any(use.crosses for use in uses),
        "BEFORE": "before" in hooks,
        "AFTER": "after" in hooks,
        "COMPLETES": "complete" in hooks,
        "LOSSES": bool(losses),
        "INSERTED": any(raw.get(key) for key in ("new_layers", "older_layers")),
        "REPLACES": "replaces" in hooks or bool(spans),
        "SITES": bool(sites or spans),
        "SEATS": bool(spans) or any(site.block != site.role for site in sites),
        "SPANS": bool(spans),
        "PARTS": bool(native.path),
    }
    brought = {each for use in uses for each in use.rules.brings}
    return frozenset({name for name, there in found.items() if there} | brought | losses)


def _losses(raw: Mapping[str, Any], uses: tuple[Use, ...]) -> list[frozenset[str]]:
    """Whether a loss applies in training whatever the batch, or where domains are known, or tells these apart.

    All cases where nobody can read that.
    """
    rules = tuple(use.rules for use in uses if use.rules.losses)
    try:
        said = for_each_layer(raw) if rules else {"trunk_layers": 0}
        surgery = Surgery(said["trunk_layers"], rules, {each.name: each.read(said) for each in rules})
        found = {
            "MEASURES": any(each.measures(surgery) for each in rules),
            "DOMAINS": any(each.needs_domains(surgery) for each in rules),
            "CLASSIFIES": any(each.classifies(surgery) for each in rules),
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        domains: tuple[tuple[str, ...], ...] = (("DOMAINS", "CLASSIFIES"), ("DOMAINS",), ())
        return [frozenset({*first, *then}) for first in (("MEASURES",), ()) for then in domains]
    return [frozenset(name for name, there in found.items() if there)]


def _members(name: str, module: str) -> Iterator[str]:
    """What a class of a part and its bases in parts define; of `Graft` and `GraftRules` nothing."""
    for part in () if name in ("Graft", "GraftRules") else ordered([module]):
        for each in part.definitions:
            if each.name == name:
                yield from (member.name for member in each.members)
                for base in each.bases:
                    yield from _members(base, part.module)


@cache
def _joined(native: Composition, uses: tuple[Use, ...], present: frozenset[str]) -> bytes:
    classes = part_of(f"{_PACKAGE}.classes", classes_of(native, uses))
    parts = [*ordered(roots_of(native, uses), present), classes]
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
        text.append(f"\n\n{_heading(part)}{source_of(kept[part.module])}\n")
    return "".join(text).encode()


def _heading(part: Part) -> str:
    """What stands above a part that says of itself more than a line."""
    told = part.doc.strip()
    if "\n" not in told:
        return ""
    rule = f"# --- {part.module.rpartition('.')[2]} ".ljust(WIDTH, "-")
    return f"{rule}\n{textwrap.indent(told, '# ', lambda line: True)}\n\n\n".replace("# \n", "#\n")


def chosen(parts: Iterable[Part], classes: Part) -> dict[str, list[Definition]]:
    """What a joined file has of each of its parts, by module: all of the composed classes, and what those need."""
    others = [each for part in parts if part is not classes for each in part.definitions]
    roots = [member for each in classes.definitions for member in (each.head, *each.members)]
    found = {each.name: each for each in needed(others, roots)}
    kept = {part.module: [found[d.name] for d in part.definitions if d.name in found] for part in parts}
    return kept | {classes.module: list(classes.definitions)}


def ordered(roots: Iterable[str], present: frozenset[str] = QUESTIONS) -> list[Part]:
    """The roots and all that they need, each after what it needs; where that leaves a choice, by name.

    Each reads as where of what models may have only `present` is there.
    """
    found: dict[str, Part] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = read_part(name, present)
            waiting.extend(found[name].needs)
    placed: dict[str, Part] = {}
    while len(placed) < len(found):
        free = sorted(n for n, part in found.items() if n not in placed and set(part.needs) <= placed.keys())
        assert free, f"parts need each other in a circle: {sorted(set(found) - set(placed))}"
        placed[free[0]] = found[free[0]]
    return list(placed.values())


@cache
def read_part(module: str, present: frozenset[str]) -> Part:
    """A module as a part; only its source is read, nothing of it runs."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None, module
    return part_of(module, folded(Path(found.origin).read_text(encoding="utf-8"), present))


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
            if sibling == f"{_PACKAGE}.present":
                continue
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
