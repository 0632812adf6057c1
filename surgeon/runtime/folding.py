"""A module's source with the questions of `present` answered: only the branches stay that a model takes.

A question is the test of an `if`: a name of `present`, several with `and`, `or` and `not`, or such ones and then, by
`and`, something else, which stays. Imports inside functions, by which planners read a module without torch, move to
the top. Lines are moved and left out, none is written anew, but for the tests that stay.
"""

from __future__ import annotations

import ast
from collections.abc import Set
from itertools import takewhile

from . import present as _present

QUESTIONS = frozenset(name for name in vars(_present) if name.isupper())


class _Lines:
    """Lines of a source: which go, by how much others move left, and what is written in place of one."""

    def __init__(self, source: str) -> None:
        self.lines = source.splitlines()
        self.gone: set[int] = set()
        self.left = dict.fromkeys(range(len(self.lines)), 0)
        self.imports: list[str] = []

    def drop(self, first: int, last: int) -> None:
        """Leave lines out; both are counted from 1."""
        self.gone |= set(range(first - 1, last))

    def unindent(self, first: int, last: int) -> None:
        """Move lines a step to the left."""
        for number in range(first - 1, last):
            self.left[number] += 4

    def above(self, line: int) -> int:
        """The first of the comments that stand right above a line; the line itself where none does."""
        while self.lines[line - 2].lstrip().startswith("#"):
            line -= 1
        return line

    def text(self) -> str:
        """The lines that stay, what was imported in functions first."""
        kept = []
        for number, line in enumerate(self.lines):
            if number not in self.gone:
                indent = len(line) - len(line.lstrip())
                kept.append(line[min(self.left[number], indent) :])
        if self.imports:
            at = kept.index("from __future__ import annotations") + 1
            kept[at:at] = ["", *dict.fromkeys(self.imports)]
        return "\n".join(kept) + "\n"


def folded(source: str, present: Set[str]) -> str:
    """The source as it reads where of what models may have only `present` is there."""
    lines = _Lines(source)
    _statements(ast.parse(source).body, lines, present, inside=False)
    return lines.text()


def _statements(body: list[ast.stmt], lines: _Lines, present: Set[str], *, inside: bool) -> None:
    """Answer the questions in statements; what follows a return goes."""
    for nth, node in enumerate(body):
        if isinstance(node, ast.If) and (found := _answer(node.test, present)) is not None:
            taken = _decided(node, lines, present, found, inside=inside)
            if taken and isinstance(taken[-1], ast.Return | ast.Raise | ast.Continue) and body[nth + 1 :]:
                rest = body[nth + 1 :]
                lines.drop(_begin(rest[0], lines), rest[-1].end_lineno or 0)
                return
        elif isinstance(node, ast.Import | ast.ImportFrom) and inside:
            _hoist(node, lines)
        else:
            _inner(node, lines, present, inside=inside)


def _inner(node: ast.AST, lines: _Lines, present: Set[str], *, inside: bool) -> None:
    """Answer the questions in what a statement holds."""
    inside = inside or isinstance(node, ast.FunctionDef)
    if isinstance(node, ast.If) and isinstance(node.test, ast.BoolOp) and _asks(node.test.values[0]):
        _shorten(node.test, lines)
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        held = getattr(node, name, None)
        if name in ("handlers", "cases"):
            for each in held or ():
                _inner(each, lines, present, inside=inside)
        elif isinstance(held, list):
            _statements(held, lines, present, inside=inside)


def _decided(node: ast.If, lines: _Lines, present: Set[str], taken: bool, *, inside: bool) -> list[ast.stmt]:
    """Keep the branch that is taken, and return it."""
    assert node.test.lineno == node.test.end_lineno, f"a question over several lines: {ast.unparse(node.test)}"
    last, first = node.body[-1].end_lineno or 0, node.lineno
    other = next((n for n in range(last + 1, node.end_lineno or 0) if lines.lines[n - 1].strip() == "else:"), last)
    assert not node.orelse or other > last, f"an elif after a question: {ast.unparse(node.test)}"
    if taken:
        lines.drop(first, first)
        lines.drop(last + 1, node.end_lineno or 0)
        lines.unindent(first + 1, last)
        _statements(node.body, lines, present, inside=inside)
        return node.body
    lines.drop(first if node.orelse else lines.above(first), max(last, other))
    lines.unindent(other + 1, node.end_lineno or 0)
    _statements(node.orelse, lines, present, inside=inside)
    return node.orelse


def _asks(test: ast.expr) -> bool:
    """Whether a test is of names of `present` alone."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _asks(test.operand)
    if isinstance(test, ast.BoolOp):
        return all(_asks(each) for each in test.values)
    return isinstance(test, ast.Name) and test.id in QUESTIONS


def _answer(test: ast.expr, present: Set[str]) -> bool | None:
    """Whether a test holds as far as it can be known; None where it depends on something else."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and not _asks(test):
        return None if all(_answer(each, present) for each in _questions(test)) else False
    if not _asks(test):
        return None
    if isinstance(test, ast.UnaryOp):
        return not _answer(test.operand, present)
    if isinstance(test, ast.BoolOp):
        known = [bool(_answer(each, present)) for each in test.values]
        return all(known) if isinstance(test.op, ast.And) else any(known)
    return isinstance(test, ast.Name) and test.id in present


def _shorten(test: ast.BoolOp, lines: _Lines) -> None:
    """Take the question that a test begins with away."""
    first, stays = test.values[0], test.values[len(_questions(test))]
    assert first.lineno == stays.lineno, f"a question over several lines: {ast.unparse(test)}"
    line = lines.lines[first.lineno - 1]
    begin = first.col_offset - line[: first.col_offset].endswith("(")
    end = stays.col_offset - line[: stays.col_offset].endswith("(")
    lines.lines[first.lineno - 1] = line[:begin] + line[end:]


def _questions(test: ast.BoolOp) -> list[ast.expr]:
    """The questions that a test begins with."""
    return list(takewhile(_asks, test.values))


def _begin(node: ast.stmt, lines: _Lines) -> int:
    return lines.above(min((each.lineno for each in getattr(node, "decorator_list", ())), default=node.lineno))


def _hoist(node: ast.Import | ast.ImportFrom, lines: _Lines) -> None:
    """Move an import to the top, with the empty line below it."""
    end = node.end_lineno or node.lineno
    lines.imports.append(ast.unparse(node))
    lines.drop(node.lineno, end + (not lines.lines[end].strip()))
