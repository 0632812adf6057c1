"""Mistakes that nobody chose: an operator, a bound, a constant or a `not` of a room's code, drawn by a seed.

Messages and annotations stay as they are, so that a mistake changes what is computed.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator

from tests.house import PACKAGE
from tests.mutations.by_room import Mistake

_OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def drawn(count: int, seed: int, rooms: list[str]) -> Iterator[Mistake]:
    """Draw so many mistakes in the code of these rooms, each in a function; the same ones for the same code."""
    draws = random.Random(seed)
    files = sorted(file for room in rooms for file in (PACKAGE / room).rglob("*.py"))
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    sites = [(file, number) for file, tree in trees.items() for number, _ in enumerate(_places(tree))]
    for file, number in draws.sample(sites, min(count, len(sites))):
        changed = copy.deepcopy(trees[file])
        node = list(_places(changed))[number]
        before = ast.unparse(node)
        _change(node)
        where = file.relative_to(PACKAGE).as_posix()
        words = f"{where}:{getattr(node, 'lineno', 0)} `{before}` becomes `{ast.unparse(node)}`"
        yield Mistake(where.split("/")[0], words, ((where, file.read_text(encoding="utf-8"), ast.unparse(changed)),))


def _places(tree: ast.AST, *, inside: bool = False) -> Iterator[ast.AST]:
    """Every expression below that can be changed, in functions alone, without messages and annotations."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Raise | ast.JoinedStr | ast.arg | ast.AnnAssign):
            continue
        within = inside or isinstance(child, ast.FunctionDef)
        if within and _changes(child):
            yield child
        yield from _places(child, inside=within)


def _changes(node: ast.AST) -> bool:
    match node:
        case ast.Compare(ops=[op]) | ast.BoolOp(op=op) | ast.BinOp(op=op):
            return type(op) in _OTHER
        case ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in _CALLS
        case ast.Constant(value=bool() | int()):
            return True
    return False


def _change(node: ast.AST) -> None:
    """Make the mistake in place."""
    match node:
        case ast.Compare(ops=[op]):
            node.ops = [_OTHER[type(op)]()]  # type: ignore[list-item]
        case ast.BoolOp(op=op) | ast.BinOp(op=op):
            node.op = _OTHER[type(op)]()  # type: ignore[assignment]
        case ast.UnaryOp():
            # `not not x` is x, as a truth.
            node.operand = ast.UnaryOp(op=ast.Not(), operand=node.operand)
        case ast.Call(func=ast.Name(id=name)):
            node.func.id = _CALLS[name]  # type: ignore[attr-defined]
        case ast.Constant(value=bool(value)):
            node.value = not value
        case ast.Constant(value=int(value)):
            node.value = value + 1
