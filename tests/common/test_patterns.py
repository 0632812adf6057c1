"""Patterns that files bring: matched as `re` matches them, with work that a file cannot choose, and nowhere else."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from itertools import product

import pytest

from surgeon.common import patterns
from surgeon.common.patterns import Matcher
from surgeon.errors import BadInput
from tests.house import HERE

PARTS = ["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", r"\d", "^", "$", r"\b", "(?=a)", "(?!b)"]
REPEATS = ["*", "+", "?", "*?", "+?", "{1,3}", "{2}", "{2,}"]
NAMES = ["".join(letters) for length in range(1, 5) for letters in product("ab.1", repeat=length)]


def _drawn(chance: random.Random, depth: int) -> str:
    kind = chance.random()
    if depth == 0 or kind < 0.4:
        return chance.choice(PARTS)
    if kind < 0.6:
        return _drawn(chance, depth - 1) + _drawn(chance, depth - 1)
    if kind < 0.75:
        return f"({_drawn(chance, depth - 1)}|{_drawn(chance, depth - 1)})"
    return f"(?:{_drawn(chance, depth - 1)}){chance.choice(REPEATS)}"


def test_matches_what_re_matches() -> None:
    chance = random.Random(0)
    for _ in range(1_500):
        pattern = _drawn(chance, 4)
        if not re.fullmatch(r"[\w.-]+", pattern):
            for name in chance.sample(NAMES, 8):
                ends = Matcher("here").ends(pattern, name)
                assert (len(name) in ends) == bool(re.fullmatch(pattern, name)), (pattern, name)
                assert bool(ends) == bool(re.match(pattern, name)), (pattern, name)


@pytest.mark.parametrize(
    "pattern", [r"(\w+\.?)+X", "(a|a)*X", "((a*)*)*X", "(.*.*)*X", "(?:a?){9999999}X", "(a+){2,}X"]
)
def test_no_pattern_takes_more_than_its_share(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_MOST_STEPS", 20_000)
    assert not Matcher("here").ends(pattern, "a." * 10 + "a" * 40)


def test_the_patterns_of_a_file_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_MOST_STEPS", 5_000)
    matcher = Matcher("config.json: `ignore`")
    with pytest.raises(BadInput, match=r"config.json: `ignore`: its patterns take too long"):
        for number in range(10_000):
            matcher.ends(f"layers.{number}.q_proj", "model.layers.0.q_proj")


@pytest.mark.parametrize("pattern", ["(a", r"(a)\1", "(?i)a.", "(?i:a.)", "(?<=a)b", "(?>a)b", "(" * 20_000])
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(BadInput, match=r"here: the pattern .* cannot be read \(.*write names of modules"):
        Matcher("here").ends(pattern, "aab")


# What is compiled elsewhere is ours, or by module of what is no file of a model.
OTHERS = {
    "surgeon.common.library": "transformers' classes",
    "surgeon.common.disk_space": "numbers of errors",
    "surgeon.runtime.heads": "names of grafts",
}


def test_nothing_else_compiles_a_pattern_of_a_file() -> None:
    found = [
        f"{module}:{call.lineno}"
        for module, tree in HERE.trees.items()
        if module not in (*OTHERS, "surgeon.common.patterns")
        for call in _calls(tree)
        if not _is_ours(call.args[0], tree)
    ]
    assert not found


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of `re` and `regex` that take a pattern."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("re" | "regex"), attr=name)) if name not in ("escape",):
                yield node
            case ast.ImportFrom(module="re" | "regex"):
                raise AssertionError("import `re` whole, so that its calls are seen")


def _is_ours(pattern: ast.AST, tree: ast.AST) -> bool:
    """Whether a pattern is written here, but for what `re.escape` made of a text, and constants."""
    match pattern:
        case ast.Constant():
            return True
        case ast.JoinedStr(values=parts):
            return all(_is_ours(part, tree) for part in parts)
        case ast.FormattedValue(value=value):
            return _is_ours(value, tree)
        case ast.BinOp(left=left, right=right):
            return _is_ours(left, tree) and _is_ours(right, tree)
        case ast.Call(func=ast.Attribute(value=ast.Name("re"), attr="escape")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[ast.GeneratorExp(elt=made)]):
            return _is_ours(made, tree)
        case ast.Name(id=name):
            given = [each.value for each in ast.walk(tree) if isinstance(each, ast.Assign) and _names(each) == {name}]
            return bool(given) and all(_is_ours(each, tree) for each in given)
    return False


def _names(assigned: ast.Assign) -> set[str]:
    return {node.id for target in assigned.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
