"""Text that every Python has: the documentation strings of its standard library, and its code."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from pathlib import Path

from surgeon.errors import BadInput, printable

# Folders without prose, and code that is not the library's own.
_LEFT_OUT = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
_SHORTEST = 80
# With less text a model of the demo's size memorises the documents instead of learning the language.
_LEAST_CHARACTERS = 200_000
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, *_DEFINITIONS)
# Every tenth module: some hundred thousand characters, several times what the demo trains on.
_MODULES_APART = 10


def documentation(library: Path | None = None) -> list[str]:
    """The distinct documentation strings of a Python library, in the order of its sorted files.

    `library` is the folder of sources; None means this Python's standard library. Also takes the chapters
    of the language reference that `help()` shows. Sources are parsed, never imported or run.
    Raises BadInput where there is too little text, as in a Python installed without sources.
    """
    root = _root(library)
    found: dict[str, None] = {}
    for path in _sources(root):
        chapters = path.relative_to(root).parts == ("pydoc_data", "topics.py")
        found.update(dict.fromkeys(_texts(path, chapters=chapters)))
    if sum(map(len, found)) < _LEAST_CHARACTERS:
        raise BadInput(
            f"{printable(str(root))}: too little documentation text to make a base from"
            " (is this Python installed without its sources?); use a base of your own instead"
        )
    return list(found)


def code(library: Path | None = None) -> list[str]:
    """The distinct functions and classes at the top of every tenth module, without comments and documentation.

    `library` as for `documentation`; the two share no text.
    """
    found: dict[str, None] = {}
    for path in _sources(_root(library))[::_MODULES_APART]:
        tree = _parsed(path)
        if tree is None:
            continue
        for node in tree.body:
            if isinstance(node, _DEFINITIONS):
                found[ast.unparse(_Undocumented().visit(node))] = None
    return [text for text in found if len(text) >= _SHORTEST]


class _Undocumented(ast.NodeTransformer):
    """Removes documentation strings."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Below definitions too."""
        super().generic_visit(node)
        if isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node


def _root(library: Path | None) -> Path:
    return Path(sysconfig.get_paths()["stdlib"]) if library is None else library


def _sources(root: Path) -> list[Path]:
    """The library's own files, sorted."""
    found = []
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(inner.parts[:-1]) and not inner.name.startswith("test_"):
            found.append(path)
    return found


def _parsed(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            # Warnings about old escapes in other people's source are not for our user.
            warnings.simplefilter("ignore")
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        # Some installations have templates and files for other versions among the sources.
        return None


def _texts(path: Path, *, chapters: bool) -> list[str]:
    tree = _parsed(path)
    if tree is None:
        return []
    if chapters:
        strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        texts = [value.strip() for value in strings if isinstance(value, str)]
    else:
        nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
        texts = [(ast.get_docstring(node) or "").strip() for node in nodes]
    return [text for text in texts if len(text) >= _SHORTEST]
