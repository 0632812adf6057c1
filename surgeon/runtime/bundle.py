"""Joining the runtime's modules into the one file that ships beside weights: `modeling_surgeon.py`.

Which modules it takes, and which classes are composed of them, follows from config.json alone, so the same bytes can be
joined again anywhere. Modules stand in the order in which they need each other, then by name; what they import is
collected at the top, and imports of one another fall away. `derived.template` is the named classes of a model type,
composed of the modules and transformers' own classes, with names to be filled in.
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
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

from .composition import TORCH_CLASSES, Composition, short_name, upcycled
from .known import GRAFTS, native_of
from .natives import PREFIX
from .rules import GraftRules

CODE_FILE = "modeling_surgeon.py"
_PACKAGE = "surgeon.runtime"
_WIDTH = 120

_HEADER = '''"""{title} with what `surgery` in config.json describes beside its native layers.

surgeon joined this file from its modules, only those that this model needs. It imports torch and transformers alone.
"""

from __future__ import annotations
'''

_TEXT_CONFIG = """
    def to_dict(self) -> dict[str, Any]:
        \"""As the native config's.\"""
        return without_surgery(super().to_dict(), {path})


class {text}({native}):
    \"""The native config of the text decoder, with the `surgery` of the whole.\"""

    encoder_surgery: ClassVar[bool] = False
    grafts: ClassVar[tuple[Graft, ...]] = {config}.grafts
"""

_SITE = """

class {upcycled}(DerivedSite, {native}):
    \"""The native block, able to carry grafts.\"""
"""

_LAYER = """

class {upcycled}Branch(DerivedBranch, {native}):
    \"""The expanded twin of a trunk layer.\"""

    activation_field = "{activation}"
    sites: ClassVar[Any] = GRAFT_SITES


class {upcycled}(DerivedLayer, FirstOutput, {native}):
    \"""A layer of the trunk.\"""

    activation_field = "{activation}"
    sites: ClassVar[Any] = GRAFT_SITES
    branch_of = {upcycled}Branch
"""

_SPAN_LAYER = """

class {upcycled}(DerivedEncoderLayer, FirstOutput, {native}):
    \"""A layer.\"""

    spans: ClassVar[Any] = GRAFT_SITES
"""

# The class at a block's end, at its beginning, or at both: what it is called after the native one, and is composed of.
_SPAN_PARTS = {
    "Start": ("SpanStart", "able to keep what the block reads"),
    "End": ("SpanEnd", "able to carry grafts"),
    "Block": ("SpanEnd, SpanStart", "able to carry grafts"),
}

_SPAN = """

class {upcycled}({mixed_in}, {native}):
    \"""The native module, {able}.\"""
"""

_PLACES = (
    "Blocks that can carry grafts: their name in a layer, their class, what grafts call them, their class with grafts."
)
_SPAN_PLACES = "Blocks that can carry grafts: path, class and class with grafts of beginning and end; their usual name."

_OUTPUT = """

@dataclass
class {upcycled}({native}):
    \"""The native output, and in training the auxiliary losses before their weights (None where they are off).{losses}
"""

_HEAD = """

class {upcycled}(DerivedHead, {native}):
    \"""{what}.\"""

    config_class = {config}
    stack = "{stack}"
    decoder_class = {text}
    output_class = {output}
    by_token = {by_token}
    forward = head_forward({native}.forward)
"""

_OUTER = """

class {model}(DerivedOuter, {native}):
    \"""The model without a head.\"""

    config_class = {config}
    stack = "{stack}"
    decoder_class = {text}
"""


@dataclass(frozen=True)
class Use:
    """A graft in a joined file: its rules, and what it takes by name from other parts (key, module, name)."""

    rules: GraftRules
    taken: tuple[tuple[str, str, str], ...] | None

    @property
    def source(self) -> str:
        """How the config class makes it: `ControlGraft({"lerp": Lerp})`."""
        if self.taken is None:
            return f"{self.rules.module}()"
        taken = ", ".join(f'"{key}": {name}' for key, _, name in self.taken)
        return f"{self.rules.module}({{{taken}}})"


@dataclass(frozen=True)
class Part:
    """One module: its docstring, its code without imports, what it imports from elsewhere, and the parts it needs.

    `imports` maps the names that its code uses to (module, name there), or to (module, "") for a module itself.
    """

    module: str
    doc: str
    code: str
    imports: Mapping[str, tuple[str, str]]
    needs: tuple[str, ...]
    defines: frozenset[str]


def bundle(config: Mapping[str, Any]) -> bytes:
    """The file that belongs beside the weights of a checkpoint with this config.

    Raises KeyError for a model type that has no upcycled classes, BadInput where a plugin is broken.
    """
    native = native_of(config)
    if native is None:
        raise KeyError(config["model_type"])
    raw = config.get("surgery")
    return _joined(native, uses_of(raw if isinstance(raw, Mapping) else {}, native))


def uses_of(raw: Mapping[str, Any], native: Composition) -> tuple[Use, ...]:
    """The grafts that a `config.surgery` asks for, as far as such a model can carry them."""
    rules = [rules for rules in GRAFTS.values() if rules.present(raw) and (rules.on_encoders or not native.encoder)]
    return tuple(Use(each, each.uses(raw)) for each in rules)


def roots_of(native: Composition, uses: tuple[Use, ...]) -> list[str]:
    """The modules that are needed for their own sake."""
    mixed_in = "derived_encoders" if native.encoder else "derived"
    roots = {f"{_PACKAGE}.{mixed_in}", f"{_PACKAGE}.graft"}
    return sorted(roots | {use.rules.part for use in uses} | {part for use in uses for _, part, _ in use.taken or ()})


@cache
def _joined(native: Composition, uses: tuple[Use, ...]) -> bytes:
    parts = [*ordered(roots_of(native, uses)), part_of(f"{_PACKAGE}.classes", derived_classes(native, uses))]
    imports: dict[str, tuple[str, str]] = {}
    defined: dict[str, str] = {}
    for part in parts:
        for name, source in part.imports.items():
            assert imports.setdefault(name, source) == source, f"{part.module} imports another `{name}`: {source}"
        for name in part.defines:
            assert name not in defined, f"`{name}` stands in {part.module} and in {defined[name]}"
            defined[name] = part.module
    assert not set(imports) & set(defined), set(imports) & set(defined)
    text = [_HEADER.format(title=native.title or native.name), _import_lines(imports)]
    for nth, part in enumerate(parts):
        name = part.module.rpartition(".")[2]
        note = part.doc
        told = textwrap.indent(note.strip(), "# ", lambda line: True).replace("# \n", "#\n")
        rule = f"# --- {name} ".ljust(_WIDTH, "-")
        # ruff takes a comment right after imports for theirs, with one empty line between.
        text.append(f"{chr(10) if nth else ''}\n{rule}\n{told}{chr(10) if told else ''}\n\n{part.code.strip()}\n")
    return "".join(text).encode()


def derived_classes(native: Composition, uses: tuple[Use, ...]) -> str:
    """The source of a derived model type's classes with these grafts, its imports before it."""
    several = native.text_config != native.config
    config, text_config = upcycled(native.config), upcycled(native.text_config)
    model, text = upcycled(native.model), upcycled(native.text)
    own_heads = (native.head, *(head.native for head in native.heads))
    outer = list(dict.fromkeys((native.text, native.model, *own_heads)))
    spans = [told for span in native.spans for told in (span.reader, span.writer)]
    imports: dict[str, set[str]] = {}
    for each in (*native.classes, *spans):
        module, _, name = each.rpartition(".")
        imports.setdefault(module if each in TORCH_CLASSES else f"transformers.{module}", set()).add(name)
    layer_classes = "".join(f"\n        {short_name(each)}: {upcycled(each)}," for each in native.layers)
    sites, places = _spans(native) if native.encoder else _sites(native)
    layer = _SPAN_LAYER if native.encoder else _LAYER
    found_by = {**dict.fromkeys(native.autos, native.head), **{head.auto: head.native for head in native.heads}}
    template = (files(__package__) / "derived.template").read_text(encoding="utf-8")
    return template.format(
        imports="\n".join(_from_line(name, sorted(held, key=_import_order)) for name, held in sorted(imports.items())),
        Config=config,
        NativeConfig=short_name(native.config),
        TextConfig=text_config,
        text_config=_TEXT_CONFIG.format(
            config=config, text=text_config, native=short_name(native.text_config), path=native.path
        )
        if several
        else "",
        model_type=PREFIX + native.model_type,
        encoder=native.encoder,
        grafts=f"{uses[0].source}," if len(uses) == 1 else _listed(uses),
        sites=sites,
        places_are=_SPAN_PLACES if native.encoder else _PLACES,
        places="".join(f"\n    {place}," for place in places) + ("\n" if places else ""),
        layers="".join(
            layer.format(upcycled=upcycled(each), native=short_name(each), activation=native.activation)
            for each in native.layers
        ),
        Text=text,
        NativeText=short_name(native.text),
        text_is="The model without a head" if native.encoder else "The text decoder",
        stack=native.stack,
        layer_classes=f"{layer_classes}\n    ",
        unsplit=", ".join(f'"{upcycled(each)}"' for each in native.layers),
        model=_OUTER.format(model=model, native=short_name(native.model), config=config, stack=native.stack, text=text)
        if native.model not in (native.text, native.head)
        else "",
        Model=model,
        heads=_heads(native, uses),
        registered="\n".join(f'{upcycled(told)}.register_for_auto_class("{auto}")' for auto, told in found_by.items()),
        conversions="\n".join(f"carry_conversions({upcycled(each)}, {short_name(each)})" for each in outer),
    )


def _sites(native: Composition) -> tuple[str, list[str]]:
    """The classes of a decoder's blocks with grafts, and where they stand."""
    kinds = dict.fromkeys(site.native for site in native.sites)
    return "".join(_SITE.format(upcycled=upcycled(each), native=short_name(each)) for each in kinds), [
        f'("{site.block}", {short_name(site.native)}, "{site.role}", {upcycled(site.native)})' for site in native.sites
    ]


def _spans(native: Composition) -> tuple[str, list[str]]:
    """The same of an encoder's."""
    found: dict[tuple[str, str], None] = {}
    places: list[str] = []
    for span in native.spans:
        parts = ("Block", "Block") if span.reads == span.writes else ("Start", "End")
        ends = tuple(zip((span.reader, span.writer), parts, strict=True))
        found |= dict.fromkeys(ends)
        (reader, start), (writer, end) = ends
        first = f'"{span.reads}", {short_name(reader)}, {upcycled(reader)}{start}'
        last = f'"{span.writes}", {short_name(writer)}, {upcycled(writer)}{end}'
        placed = f'({first}, {last}, "{span.role}")'
        # As ruff formats what is longer than a line.
        long = len(placed) > _WIDTH - 5
        places.append(f"(\n        {placed[1:-1].replace(', ', f',{chr(10)}        ')},\n    )" if long else placed)
    classes = ""
    for told, part in found:
        mixed_in, able = _SPAN_PARTS[part]
        classes += _SPAN.format(upcycled=upcycled(told) + part, mixed_in=mixed_in, native=short_name(told), able=able)
    return classes, places


def _heads(native: Composition, uses: tuple[Use, ...]) -> str:
    """The classes of heads, and of what they return."""
    outputs = {native.output: "UpcycledOutput"}
    outputs |= {head.output: upcycled(head.output) for head in native.heads if head.output != native.output}
    losses = _losses({name: what for use in uses for name, what in use.rules.losses.items()})
    made = "".join(
        _OUTPUT.format(upcycled=own, native=short_name(told), losses=losses) for told, own in outputs.items()
    )
    all_heads = [(native.head, native.output), *((head.native, head.output) for head in native.heads)]
    return made + "".join(
        _HEAD.format(
            upcycled=upcycled(told),
            native=short_name(told),
            what="The model with its head" if told == native.head else "The model with another head",
            config=upcycled(native.config),
            stack=native.stack,
            text=upcycled(native.text),
            output=outputs[output],
            by_token=told == native.head and not native.encoder,
        )
        for told, output in all_heads
    )


def _listed(uses: tuple[Use, ...]) -> str:
    """The grafts one a line, as a tuple that ends with a comma stays."""
    return "".join(f"\n        {use.source}," for use in uses) + ("\n    " if uses else "")


def _losses(fields: Mapping[str, str]) -> str:
    """The rest of an output class from its docstring on: what its own fields are, and they themselves."""
    if not fields:
        return '"""'
    told = "".join(f"\n    {name}: {what}." for name, what in fields.items())
    held = "".join(f"\n    {name}: torch.FloatTensor | None = None" for name in fields)
    return f'\n{told}\n    """\n{held}'


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
    defines: set[str] = set()
    for node in tree.body:
        if _is_docstring(node) or isinstance(node, ast.Import | ast.ImportFrom) or _only_for_types(node):
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or 0) - node.lineno + 1)
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
        else:
            defines |= _defined(node)
    imports.pop("TYPE_CHECKING", None)
    return Part(module, doc, "\n".join(lines), imports, tuple(sorted(needs)), frozenset(defines))


def _sibling(module: str, node: ast.ImportFrom) -> str | None:
    """The part that an import names; None for what comes from elsewhere."""
    if node.level == 1 and node.module:
        return f"{module.rpartition('.')[0]}.{node.module}"
    if node.level == 0 and node.module and node.module.startswith(f"{_PACKAGE}."):
        return node.module
    return None


def _defined(node: ast.stmt) -> set[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef():
            return {node.name}
        case ast.Assign():
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


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
    if len(line) <= _WIDTH:
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
