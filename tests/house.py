"""The house in numbers: `python -m tests.house [CHECKOUT]` prints size, rooms and ideas of the package.

With `--calls` it prints the calls between rooms while a plan is applied (house_calls.py). `--pin` lowers the numbers of
size.json to those of the package; a test fails above them. Whoever raises one does it by hand, in a commit of its own.

A room is a folder of `surgeon/`, or of `surgeon/lab/`; a loose module stands beside the rooms; an arrow is a room that
imports another. A floor is a level of the rooms' imports: what imports nothing stands on the first, everything else one
above the highest that it imports. Ideas are counted from the syntax tree alone, so that any checkout can be measured,
importable or not.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path

import surgeon

# The package that is tested: the checkout's, or an installed wheel's where the checkout has none.
PACKAGE = Path(surgeon.__file__).resolve().parent
RECIPES = "surgeon.blueprint.recipes"
# By room: classes that have said "bytes of the base at another place", and the one that replaces them.
BYTE_FORMS = {
    "blueprint": ("Copy", "PerLayer", "Rows", "Joined", "Sliced", "Widened", "Moved"),
    "writing": ("Origin",),
    "manifest": ("Piece", "JoinedPart", "Cut"),
    "checkpoint": ("Pieces",),
}
MOST_LINES, MOST_PARAMETERS = 60, 10
PINS = Path(__file__).with_name("size.json")
# Rooms of operations: the papers', and all others, which stand on these.
OPERATIONS, EDITS = "operations", "edits"
# Classes that every feature could put a field into.
SHARED = (
    "surgeon.blueprint.draft.Draft",
    "surgeon.blueprint.blueprint.Blueprint",
    "surgeon.blueprint.recipes.recipe.Recipe",
    "surgeon.anatomy.derivation.Derivation",
    "surgeon.runtime.rules.Surgery",
)
# What a token count leaves out, beside docstrings: comments and the layout.
_LAYOUT = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
)  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Site:
    """A place in the package: the module, the line, and what stands there."""

    module: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.text}"


@dataclass(frozen=True)
class House:
    """A package `surgeon`, read but never imported."""

    package: Path

    @cached_property
    def modules(self) -> dict[str, Path]:
        """Every module with its file; a package's `__init__` is the package."""
        return {self.module_of(file): file for file in sorted(self.package.rglob("*.py"))}

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Every module's syntax tree."""
        return {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in self.modules.items()}

    def module_of(self, file: Path) -> str:
        """`surgeon.writing.write`; a package's `__init__` is the package."""
        name = ".".join(file.relative_to(self.package.parent).with_suffix("").parts)
        return name.removesuffix(".__init__")

    @cached_property
    def docstrings(self) -> dict[str, list[ast.Constant]]:
        """By module the docstrings of itself, its classes and functions."""
        return {module: [*_docstrings(tree)] for module, tree in self.trees.items()}

    @cached_property
    def code(self) -> dict[str, list[int]]:
        """By module the line of each token, comments, docstrings and layout left out.

        An f-string is one token, as it is before Python 3.12.
        """
        found: dict[str, list[int]] = {}
        # The stub of the facade, which has the public names, counts as well.
        stub = {f"{self.package.name}.__init__": self.package / "__init__.pyi"}
        for module, file in (self.modules | {name: path for name, path in stub.items() if path.is_file()}).items():
            docstrings = {(node.lineno, node.col_offset) for node in self.docstrings.get(module, ())}
            lines, inside = found.setdefault(module, []), 0
            for each in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
                inside -= tokenize.tok_name[each.type] == "FSTRING_END"
                if not inside and each.type not in _LAYOUT and each.start not in docstrings:
                    lines.append(each.start[0])
                inside += tokenize.tok_name[each.type] == "FSTRING_START"
        return found

    @cached_property
    def tokens(self) -> Counter[str]:
        """Python tokens by room."""
        return self._by_room({module: len(lines) for module, lines in self.code.items()})

    @cached_property
    def code_lines(self) -> Counter[str]:
        """Lines by room on which a token begins."""
        return self._by_room({module: len({*lines}) for module, lines in self.code.items()})

    @cached_property
    def literals(self) -> Counter[str]:
        """Bytes of text in string literals by room, docstrings left out."""
        found = {}
        for module, tree in self.trees.items():
            docstrings = set(map(id, self.docstrings[module]))
            texts = (
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
            )
            found[module] = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        return self._by_room(found)

    def _by_room(self, of_modules: dict[str, int]) -> Counter[str]:
        found: Counter[str] = Counter()
        for module, count in of_modules.items():
            found[room_of(module)] += count
        return found

    def members(self, name: str) -> set[str]:
        """What a class, `surgeon.module.Name`, declares or sets of its own: fields, methods, attributes of `self`."""
        home, _, last = name.rpartition(".")
        node = self._definitions[home][last]
        fields = {each.target for each in ast.walk(node) if isinstance(each, ast.AnnAssign)}
        fields |= {target for each in ast.walk(node) if isinstance(each, ast.Assign) for target in each.targets}
        inside = {each for part in node.body if isinstance(part, Function) for each in ast.walk(part)}
        names = {each.id for each in fields - inside if isinstance(each, ast.Name)}
        names |= {each.attr for each in fields if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"}
        return names | {part.name for part in node.body if isinstance(part, Function)}

    def shared_fields(self) -> dict[str, int]:
        """How many members the classes have that everything shares, by their names."""
        found = {name.rpartition(".")[2]: len(self.members(name)) for name in SHARED}
        schema = "surgeon.training.config.schema"
        return {**found, "train schema": sum(len(self.members(f"{schema}.{name}")) for name in self._classes(schema))}

    def reaches(self) -> Iterator[Site]:
        """Imports of one operation's module: an edit's from anywhere, others' from outside these two rooms."""
        owners = {
            module
            for module in self.modules
            if room_of(module) in (OPERATIONS, EDITS)
            and not module.endswith(".operation")
            and any("op" in self.members(f"{module}.{name}") for name in self._classes(module))
        }
        for module in self.modules:
            inside = room_of(module) in (OPERATIONS, EDITS)
            found = {
                name for name in self.dependencies(module) & owners if not (inside and room_of(name) == OPERATIONS)
            }
            yield from (Site(module, 0, name) for name in sorted(found))

    def _classes(self, module: str) -> list[str]:
        return [name for name, node in self._definitions[module].items() if isinstance(node, ast.ClassDef)]

    def sizes(self) -> dict[str, dict[str, int]]:
        """What size.json pins."""
        counts = {"tokens": self.tokens, "text": self.literals}
        return {
            **{name: {"all": found.total(), **dict(sorted(found.items()))} for name, found in counts.items()},
            "tokens in 100 code lines": {"all": 100 * self.tokens.total() // self.code_lines.total()},
            "members": self.shared_fields(),
            "imports of one operation": {"all": sum(1 for _ in self.reaches())},
        }

    def imports(self, module: str) -> set[str]:
        """Modules and names that a module imports, inside functions and for types alone too."""
        found: set[str] = set()
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                home = self._home(module, node)
                found |= {home, *(f"{home}.{alias.name}" for alias in node.names)}
        return found

    def _home(self, module: str, node: ast.ImportFrom) -> str:
        """The absolute name of the module that a `from … import` reads."""
        if not node.level:
            return node.module or ""
        above = self.modules[module].relative_to(self.package.parent).parts[: -node.level]
        return ".".join([*above, *([node.module] if node.module else [])])

    @cached_property
    def homes(self) -> dict[str, str]:
        """The public names (`from surgeon import apply`) and the modules that define them."""
        stub = ast.parse((self.package / "__init__.pyi").read_text(encoding="utf-8"))
        imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
        return {f"surgeon.{alias.name}": str(node.module) for node in imports for alias in node.names}

    def dependencies(self, module: str) -> set[str]:
        """The modules of the package that a module imports; a public name counts as the module that defines it."""
        found = self.imports(module)
        if "surgeon" in found and (public := found & self.homes.keys()):
            found = found - public - {"surgeon"} | {self.homes[name] for name in public}
        return {name for name in found if name in self.modules} - {module}

    @cached_property
    def rooms(self) -> dict[str, set[str]]:
        """Every room (and every loose module) with the others that it imports."""
        graph: dict[str, set[str]] = {}
        for module in self.modules:
            room = room_of(module)
            graph.setdefault(room, set()).update(room_of(name) for name in self.dependencies(module))
            graph[room].discard(room)
        return graph

    def floors(self) -> dict[str, int]:
        """The floor of every room, from 1; CycleError where rooms import each other."""
        levels: dict[str, int] = {}
        for room in TopologicalSorter(self.rooms).static_order():
            levels[room] = 1 + max((levels[other] for other in self.rooms[room]), default=0)
        return levels

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Every function and method, inner ones too, with its module."""
        for module, tree in self.trees.items():
            yield from ((module, node) for node in ast.walk(tree) if isinstance(node, Function))

    @cached_property
    def _definitions(self) -> dict[str, dict[str, ast.ClassDef | ast.expr]]:
        """By module: its classes, and the names that are bound to an expression at its top level."""
        found: dict[str, dict[str, ast.ClassDef | ast.expr]] = {}
        for module, tree in self.trees.items():
            here = found.setdefault(module, {})
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    here[node.name] = node
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    here[node.targets[0].id] = node.value
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                    here[node.target.id] = node.value
                elif isinstance(node, getattr(ast, "TypeAlias", ())):
                    here[node.name.id] = node.value
        return found

    @cached_property
    def _imported(self) -> dict[str, dict[str, str]]:
        """By module: what each imported name stands for, `surgeon.module.Name` or `surgeon.module`."""
        found: dict[str, dict[str, str]] = {}
        for module, tree in self.trees.items():
            here = found.setdefault(module, {})
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    home = self._home(module, node)
                    here |= {alias.asname or alias.name: f"{home}.{alias.name}" for alias in node.names}
                elif isinstance(node, ast.Import):
                    here |= {alias.asname: alias.name for alias in node.names if alias.asname}
        return found

    def resolve(self, module: str, name: str) -> str:
        """Where a name that a module uses is defined, as `surgeon.module.Name`; "" where that is not in the package."""
        for _ in range(len(self.modules)):
            first, _, rest = name.partition(".")
            if name in self._definitions.get(module, {}):
                return f"{module}.{name}"
            target = self._imported.get(module, {}).get(first, "")
            target = f"{target}.{rest}" if rest else target
            module, _, name = target.rpartition(".")
            if module not in self.modules:
                return ""
        return ""

    @cached_property
    def recipe_classes(self) -> set[str]:
        """The classes that `Recipe` stands for: members of the union of this name, and all that derive from them."""
        found: set[str] = set()
        for module, names in self._definitions.items():
            if "Recipe" in names and module.startswith(RECIPES):
                found |= self._members(module, "Recipe")
        bases = {module: self._bases(module) for module in self.modules}
        grown = True
        while grown:
            before = len(found)
            found |= {name for classes in bases.values() for name, above in classes.items() if found & above}
            grown = len(found) > before
        return found

    @property
    def recipes(self) -> set[str]:
        """The recipe classes of which there are instances: without bases that others only derive from."""
        parents = {above for module in self.modules for bases in self._bases(module).values() for above in bases}
        return {name for name in self.recipe_classes if not (name in parents and _is_open(self._class(name)))}

    def _members(self, module: str, name: str, above: frozenset[str] = frozenset()) -> set[str]:
        """The classes that a name stands for, those of a union one by one."""
        found = self.resolve(module, name)
        if not found or found in above:
            return set()
        home, _, last = found.rpartition(".")
        value = self._definitions[home][last]
        if isinstance(value, ast.ClassDef):
            return {found}
        return set().union(*(self._members(home, each, above | {found}) for each in _names(value)))

    def _bases(self, module: str) -> dict[str, set[str]]:
        return {
            f"{module}.{node.name}": {self.resolve(module, name) for base in node.bases for name in _names(base)}
            for node in self._definitions[module].values()
            if isinstance(node, ast.ClassDef)
        }

    def _class(self, name: str) -> ast.ClassDef:
        home, _, last = name.rpartition(".")
        node = self._definitions[home][last]
        assert isinstance(node, ast.ClassDef)
        return node

    def byte_forms(self) -> set[str]:
        """The classes that BYTE_FORMS lists, as far as they are there."""
        return {
            f"{module}.{name}"
            for module, names in self._definitions.items()
            for name, node in names.items()
            if name in BYTE_FORMS.get(room_of(module), ()) and isinstance(node, ast.ClassDef)
        }

    def matches(self, classes: set[str]) -> Iterator[Site]:
        """Where code asks for the type of a value: `isinstance`, `type(x) is` and `case` with one of these classes."""
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                    types: ast.expr | ast.pattern = node.args[1]
                elif isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
                    types = node.comparators[0]
                elif isinstance(node, ast.match_case):
                    types = node.pattern
                else:
                    continue
                if any(classes & self._members(module, name) for name in _names(types)):
                    yield Site(module, types.lineno, ast.unparse(types))

    def forks(self) -> Iterator[Site]:
        """Where code asks whether a type is derived: `derivation` as a condition, `isinstance(x, Composition)`."""
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                    if any(name.rpartition(".")[2] == "Composition" for name in _names(node.args[1])):
                        yield Site(module, node.lineno, ast.unparse(node))
                elif isinstance(node, ast.Compare):
                    none = isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None
                    if none and _is_derivation(node.left):
                        yield Site(module, node.lineno, ast.unparse(node))
                yield from (Site(module, each.lineno, ast.unparse(each)) for each in _truths(node))

    def long_functions(self, *, documented: bool = False) -> Iterator[tuple[int, str, Function]]:
        """Functions of more lines than MOST_LINES, from `def` to the last line; `documented`: docstrings count too."""
        for module, node in self.functions():
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if not documented and ast.get_docstring(node) is not None:
                length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if length > MOST_LINES:
                yield length, module, node

    def wide_functions(self) -> Iterator[tuple[int, str, Function]]:
        """Functions of more parameters than MOST_PARAMETERS, `self` and `cls` not counted."""
        for module, node in self.functions():
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            count = sum(each is not None and each.arg not in ("self", "cls") for each in every)
            if count > MOST_PARAMETERS:
                yield count, module, node


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """The docstrings of a module, its classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            yield first.value


def _names(node: ast.AST) -> Iterator[str]:
    """Names in an expression of types or in a pattern, dotted ones whole: `A | B`, `(A, m.B)`, `case A(B())`."""
    if isinstance(node, ast.Name | ast.Attribute):
        yield ast.unparse(node)
    elif isinstance(node, ast.MatchClass):
        yield from _names(node.cls)
        for pattern in [*node.patterns, *node.kwd_patterns]:
            yield from _names(pattern)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _names(child)


def _is_open(node: ast.ClassDef) -> bool:
    """Whether a class only serves as the base of others: private, a protocol, or with abstract methods."""
    text = ast.unparse(node)
    return node.name in ("Recipe", "Computed") or node.name.startswith("_") or "@abstractmethod" in text


def _is_derivation(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name == "derivation"


def _truths(node: ast.AST) -> Iterator[ast.expr]:
    """Operands of a condition that are `derivation` itself, used as a truth value."""
    tests: list[ast.expr] = []
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        tests = [node.test]
    elif isinstance(node, ast.BoolOp):
        tests = node.values
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        tests = [node.operand]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    yield from (test for test in tests if _is_derivation(test))


def room_of(module: str) -> str:
    """The room of a module; a file at the top is its own, and each folder of the laboratory is one."""
    parts = module.split(".")
    return "/".join(parts[1 : 3 if parts[1:2] == ["lab"] else 2]) or "__init__"


HERE = House(PACKAGE)


def report(house: House, *, sites: bool) -> Iterator[str]:
    """Lines that say how large the house is; with `sites`, where each counted thing stands."""
    rooms = [room for room in house.rooms if (house.package / room).is_dir()]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in house.modules.values())
    functions = list(house.functions())
    classes = sum(isinstance(node, ast.ClassDef) for tree in house.trees.values() for node in ast.walk(tree))
    arrows = sum(len(others) for others in house.rooms.values())
    yield f"{len(house.modules)} files, {lines:,} lines, {len(functions):,} functions, {classes} classes"
    dense = house.tokens.total() / house.code_lines.total()
    text = house.literals
    yield (
        f"{house.tokens.total():,} tokens without comments and docstrings, {dense:.2f} a line of code;"
        f" {text.total():,} bytes of text in literals"
    )
    for room, count in house.tokens.most_common() if sites else ():
        yield f"    {count:,} {room}, {count / house.code_lines[room]:.2f} a line, {text[room]:,} bytes of text"
    yield f"{len(rooms)} rooms, {len(house.rooms) - len(rooms)} loose modules, {arrows} arrows"
    recipes = house.recipes
    forms = house.byte_forms()
    counted = {
        f"{len(recipes)} recipe classes": sorted(recipes),
        "{} matches on them": [*house.matches(house.recipe_classes)],
        f"{len(forms)} forms of bytes": sorted(forms),
        "{} forks on described and derived": [*house.forks()],
    }
    for title, found in counted.items():
        files = {each.module for each in found if isinstance(each, Site)}
        yield title.format(len(found)) + (f" in {len(files)} files" if files else "")
        yield from (f"    {each}" for each in found if sites)
    for what, found in (
        (f"above {MOST_LINES} lines without their docstrings", [*house.long_functions()]),
        (f"above {MOST_LINES} lines with them", [*house.long_functions(documented=True)]),
        (f"above {MOST_PARAMETERS} parameters", [*house.wide_functions()]),
    ):
        commands = [each for each in found if each[1] == "surgeon.cli.commands"]
        yield f"{len(found) - len(commands)} functions {what} ({len(commands)} more in the command line)"
        ordered = sorted(found, key=lambda each: (each[1] == "surgeon.cli.commands", -each[0]))
        yield from (f"    {count} {module}:{node.lineno} {node.name}" for count, module, node in ordered if sites)
    floors = house.floors()
    yield f"{max(floors.values())} floors"
    for level in range(max(floors.values()), 0, -1):
        yield f"{level:>3}  {', '.join(sorted(room for room in floors if floors[room] == level))}"


def within(found: dict[str, dict[str, int]], pinned: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The numbers found, none above what is pinned."""
    return {
        name: {key: min(count, pinned.get(name, {}).get(key, 0)) for key, count in counts.items()}
        for name, counts in found.items()
    }


def main(*arguments: str) -> None:
    """Print the report; with `--calls` the calls between rooms of one `apply` alone."""
    if "--calls" in arguments:
        from tests import house_calls

        house_calls.main()
        return
    if "--pin" in arguments:
        lowered = within(HERE.sizes(), json.loads(PINS.read_text(encoding="utf-8")))
        PINS.write_text(json.dumps(lowered, indent=2) + "\n", encoding="utf-8")
        return
    paths = [Path(each).resolve() for each in arguments if each != "--sites"]
    package = paths[0] if paths else PACKAGE
    package = package / "surgeon" if (package / "surgeon" / "__init__.py").is_file() else package
    if not (package / "__init__.py").is_file():
        raise SystemExit(f"{package}: no package; python -m tests.house [--sites | --calls | --pin] [CHECKOUT]")
    print("\n".join(report(House(package), sites="--sites" in arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
