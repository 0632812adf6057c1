"""Options of a command line, derived from a function's parameters, as typer expects them.

A public function's parameters are read from its module's source, without importing the module. So a parameter's name,
type and default are defined in one place, and `surgeon apply --help` does not wait for the imports of `apply`.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

_TYPES = {"bool": bool, "int": int, "float": float, "str": str, "str | Path": Path, "Path": Path}
# Types of parameters that a program can pass to a function, but a command line cannot.
_FOR_PROGRAMS = ("Listener", "Ranks", "Callable[")


# Marks a default that is an expression, for example a name of the module.
COMPUTED: Final = object()


@dataclass(frozen=True)
class Parameter:
    """A parameter: its name, annotation as text, whether it is keyword-only or required, and its default if literal."""

    name: str
    annotation: str
    keyword: bool
    required: bool
    default: Any = None


def parameters_of(module: str, function: str) -> list[Parameter]:
    """Return the parameters of a function of surgeon, in order; `module` is its name in `surgeon` (`writing.apply`)."""
    source = pkgutil.get_data("surgeon", f"{module.replace('.', '/')}.py")
    assert source is not None
    # Take the last definition: overloads for type checkers come before it.
    *_, defined = (
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function
    )
    given = defined.args
    places = [*given.posonlyargs, *given.args]
    missing = [None] * (len(places) - len(given.defaults))
    return [
        *(_parameter(*pair, keyword=False) for pair in zip(places, [*missing, *given.defaults], strict=True)),
        *(_parameter(*pair, keyword=True) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)),
    ]


def _parameter(written: ast.arg, default: ast.expr | None, *, keyword: bool) -> Parameter:
    """Return a parameter from its definition in source; a default that is no literal becomes `COMPUTED`."""
    assert written.annotation is not None
    annotation = ast.unparse(written.annotation)
    if default is None:
        return Parameter(written.arg, annotation, keyword, required=True)
    try:
        value = ast.literal_eval(default)
    except ValueError:
        value = COMPUTED
    return Parameter(written.arg, annotation, keyword, required=False, default=value)


@dataclass(frozen=True)
class Spelling:
    """The facts about an option that its function's signature does not contain.

    `option` is its name where that differs, or where the parameter is positional. `kind` is its type where a path may
    also be a name. `convert` converts the given words to the function's value. `default` replaces a computed default.
    `off` marks a flag that switches off a default behaviour of the function.
    """

    help: str
    metavar: str | None = None
    option: str = ""
    kind: type | None = None
    least: float | None = None
    most: float | None = None
    complete: Callable[[str], list[str]] | None = None
    convert: Callable[[Any], Any] | None = None
    default: str | None = None
    off: bool = False

    def value(self, words: Any) -> Any:
        """Return the function's value for the given words. Raises BadInput where they cannot be converted."""
        if self.off:
            return not words
        return words if self.convert is None else self.convert(words)


def parameters_given(module: str, function: str) -> list[Parameter]:
    """Return the parameters of a function of surgeon that a command line can set."""
    found = parameters_of(module, function)
    return [parameter for parameter in found if not parameter.annotation.startswith(_FOR_PROGRAMS)]


def as_option(parameter: Parameter, spelling: Spelling) -> inspect.Parameter:
    """Return a parameter for typer's signature: an argument where it is positional, else an option."""
    plain = parameter.annotation.removesuffix(" | None")
    repeated = "Sequence[" in plain or "Mapping[" in plain
    kind: Any = list[str] if repeated else spelling.kind or _TYPES[plain]
    default = spelling.default if repeated or parameter.default is COMPUTED else parameter.default
    if spelling.off:
        default = not default
    details: dict[str, Any] = {
        "help": spelling.help,
        "metavar": spelling.metavar,
        "min": spelling.least,
        "max": spelling.most,
        "autocompletion": spelling.complete,
    }
    if parameter.keyword or spelling.option:
        # Without an explicit name typer would add an opposite flag: --no-link.
        name = spelling.option or f"--{parameter.name.replace('_', '-')}"
        info = typer.Option(name, **details)
    else:
        info = typer.Argument(**details)
    if not parameter.required and default is None:
        kind = kind | None
    return inspect.Parameter(
        parameter.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if parameter.required else default,
        annotation=Annotated[kind, info],
    )
