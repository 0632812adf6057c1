"""What of a module's source a joined file needs: its definitions, and of plain classes the members that are asked for.

A definition is needed where something needed has its name. Of a class that nothing outside of the parts calls (neither
it nor its bases come from torch or transformers), a method or a class attribute is needed where something needed asks
any object for an attribute of its name, or it is one that Python itself calls; but not where all classes that derive
from it have their own. So what only a planner asks of a graft's rules does not ship. Annotations without a value, which
only type checkers read, stay in dataclasses alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Member:
    """A statement of a module or class, with the comments above it: its lines, and what it names and asks for.

    `name` is empty where it defines nothing. `spaced`: it is a class or function, which stands apart by empty lines.
    `names` are the names that it has, `asked` the attributes that it asks objects for, `called` names that it calls and
    "super().name" where it calls that. What `stays` is needed wherever
    its class is; a `typed` one is nothing but an annotation.
    """

    name: str
    lines: tuple[str, ...]
    spaced: bool
    names: frozenset[str]
    asked: frozenset[str]
    called: frozenset[str]
    stays: bool = True
    typed: bool = False


@dataclass(frozen=True)
class Definition:
    """A statement at a module's top level. Of a class `head` are its lines up to the docstring, `members` the rest."""

    head: Member
    bases: tuple[str, ...] = ()
    members: tuple[Member, ...] = ()

    @property
    def name(self) -> str:
        """What it defines."""
        return self.head.name


def definitions_of(body: Sequence[ast.stmt], lines: Sequence[str]) -> list[Definition]:
    """The definitions among a module's statements; `lines` are the file's, those of other statements empty."""
    found: list[Definition] = []
    end = 0
    for node in body:
        above = lines[end : node.lineno - 1 - _decorators(node)]
        start = len(lines[:end]) + len(above) - _comments_at_end(above)
        end = node.end_lineno or 0
        if isinstance(node, ast.ClassDef):
            found.append(_class(node, start, lines))
        else:
            found.append(Definition(_member(node, lines[start:end])))
    return found


def _class(node: ast.ClassDef, start: int, lines: Sequence[str]) -> Definition:
    """A class, its members apart from its head."""
    documented = ast.get_docstring(node) is not None
    first = node.body[0]
    members: list[Member] = []
    end = (first.end_lineno or 0) if documented else first.lineno - 1 - _decorators(first)
    if not documented:
        end -= _comments_at_end(lines[start:end])
    head = lines[start:end]
    while head and not head[-1].strip():
        head = head[:-1]
    for each in node.body[documented:]:
        above = lines[end : each.lineno - 1 - _decorators(each)]
        own = len(lines[:end]) + len(above) - _comments_at_end(above)
        end = each.end_lineno or 0
        member = _member(each, lines[own:end])
        if node.decorator_list or not member.typed:
            members.append(member)
    named = [*node.bases, *(keyword.value for keyword in node.keywords), *node.decorator_list]
    own_bases = tuple(ast.unparse(base) for base in node.bases)
    return Definition(Member(node.name, tuple(head), True, *_named(named)), own_bases, tuple(members))


def _member(node: ast.stmt, lines: Sequence[str]) -> Member:
    name = ""
    match node:
        case ast.FunctionDef(name=defined) | ast.ClassDef(name=defined):
            name = defined
        case ast.Assign(targets=[ast.Name(id=defined)]) | ast.AnnAssign(target=ast.Name(id=defined)):
            name = defined
    spaced = isinstance(node, ast.FunctionDef | ast.ClassDef)
    dunder = name.startswith("__") and name.endswith("__")
    annotated = isinstance(node, ast.AnnAssign) and not ast.unparse(node.annotation).startswith("ClassVar")
    stays = not name or dunder or annotated
    typed = isinstance(node, ast.AnnAssign) and node.value is None
    return Member(name, tuple(lines), spaced, *_named([node]), stays, typed)


def _named(nodes: Iterable[ast.AST]) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The names that nodes have anywhere, the attributes that they ask for, and what they call."""
    names: set[str] = set()
    asked: set[str] = set()
    called: set[str] = set()
    for node in (inner for each in nodes for inner in ast.walk(each)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            asked.add(node.attr)
            if isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()":
                called.add(f"super().{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    return frozenset(names), frozenset(asked), frozenset(called)


def _decorators(node: ast.stmt) -> int:
    """How many lines of decorators stand above a definition's own first one."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return node.lineno - min((each.lineno for each in decorators), default=node.lineno)


def _comments_at_end(lines: Sequence[str]) -> int:
    """How many lines of comments end `lines`, with nothing below them."""
    count = 0
    for line in reversed(lines):
        if not line.lstrip().startswith("#"):
            break
        count += 1
    return count


def needed(definitions: Sequence[Definition], roots: Sequence[Member]) -> list[Definition]:
    """The definitions that `roots` need, directly or not, in their order, each with the members that are needed."""
    by_name = {each.name: each for each in definitions}
    plain = {each.name for each in definitions if each.head.spaced and _is_plain(each, by_name)}
    # Members of others are left out by what derives from them, which is known once all classes are.
    whole = _found(definitions, roots, plain, set())
    members = [
        *roots,
        *(member for each in definitions for member in each.members if member.name in whole.get(each.name, ())),
    ]
    called = {name for member in members for name in member.called}
    hidden = {
        (each.name, member.name)
        for each in definitions
        for member in each.members
        if each.name in plain and _is_hidden(each, member, whole, by_name, called)
    }
    kept = _found(definitions, roots, plain, hidden)
    found = [
        Definition(each.head, each.bases, tuple(m for m in each.members if m.name in kept[each.name]))
        for each in definitions
        if each.name in kept
    ]
    named = {name for each in found for member in each.members for name in member.names}
    named |= {name for root in roots for name in root.names}
    named |= {name for each in found for name in each.head.names - set(each.bases)}
    empty = {each.name for each in found if each.name in plain and not each.members} - named
    return [_without_bases(each, empty) for each in found if each.name not in empty]


def _without_bases(definition: Definition, empty: set[str]) -> Definition:
    """A class whose bases that have nothing are left out."""
    if not empty & set(definition.bases):
        return definition
    bases = tuple(base for base in definition.bases if base not in empty)
    opened = f"class {definition.name}({', '.join(definition.bases)}):"
    lines = tuple(
        line.replace(opened, f"class {definition.name}({', '.join(bases)}):" if bases else f"class {definition.name}:")
        for line in definition.head.lines
    )
    return Definition(replace(definition.head, lines=lines), bases, definition.members)


def _found(
    definitions: Sequence[Definition], roots: Iterable[Member], plain: set[str], hidden: set[tuple[str, str]]
) -> dict[str, set[str]]:
    """The names of definitions that are needed, each with those of its members that are; none that is `hidden`."""
    names = {name for root in roots for name in root.names}
    asked = {name for root in roots for name in root.asked}
    kept: dict[str, set[str]] = {}
    changed = True
    while changed:
        changed = False
        for each in definitions:
            if each.name not in names:
                continue
            if each.name not in kept:
                kept[each.name], changed = set(), True
                names |= each.head.names
                asked |= each.head.asked
            for member in each.members:
                wanted = each.name not in plain or member.stays or member.name in asked
                if wanted and member.name not in kept[each.name] and (each.name, member.name) not in hidden:
                    kept[each.name].add(member.name)
                    names |= member.names
                    asked |= member.asked
                    changed = True
    return kept


def _is_hidden(
    definition: Definition, member: Member, kept: Mapping[str, Any], by_name: Mapping[str, Definition], called: set[str]
) -> bool:
    """Whether every class that derives from a plain one has a member of its own in the place of this one.

    `called` are names that something calls, by which objects are made or, as "super().name", such members found.
    """
    heirs = [name for name in kept if name != definition.name and definition.name in _order(name, by_name)]
    if not heirs or definition.name in called or f"super().{member.name}" in called or member.stays:
        return False
    lasts = [name for name in heirs if not any(name in by_name[other].bases for other in heirs)]
    owners = ([n for n in _order(name, by_name) if member.name in _own(by_name[n])] for name in lasts)
    return all(owner[0] != definition.name for owner in owners)


def _own(definition: Definition) -> set[str]:
    return {member.name for member in definition.members}


def _order(name: str, by_name: Mapping[str, Definition]) -> list[str]:
    """A class and those it derives from, in the order in which Python looks for a member; those known alone."""
    below = [n for base in by_name[name].bases if base in by_name for n in _order(base, by_name)]
    return [name, *(n for nth, n in enumerate(below) if n not in below[nth + 1 :])]


def _is_plain(definition: Definition, by_name: dict[str, Definition]) -> bool:
    """Whether a class has no base from elsewhere, which might call what it defines."""
    return all(base in by_name and _is_plain(by_name[base], by_name) for base in definition.bases)


def source_of(definitions: Sequence[Definition]) -> str:
    """The definitions as written, members and definitions apart as ruff has them."""
    lines: list[str] = []
    before: Member | None = None
    for each in definitions:
        lines += [""] * _gap(before, each.head, 2)
        lines += each.head.lines
        inner: Member | None = None
        for nth, member in enumerate(each.members):
            # After a docstring, which the head of a class ends with, stands one.
            documented = each.head.lines[-1].rstrip().endswith('"""')
            lines += [""] * (int(documented) if nth == 0 else _gap(inner, member, 1))
            lines += member.lines
            inner = member
        before = each.head
    return "\n".join(lines)


def _gap(before: Member | None, member: Member, most: int) -> int:
    """How many empty lines stand between two statements."""
    if before is None:
        return 0
    return most if before.spaced or member.spaced else 0
