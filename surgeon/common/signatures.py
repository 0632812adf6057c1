"""A public function's parameters, read from its module's source: nothing of the module is imported.

The command line takes its options from here, so that a parameter has its name, type and default in one place and
`surgeon apply --help` does not wait for what `apply` imports.
"""

from __future__ import annotations

import ast
import pkgutil
from dataclasses import dataclass
from typing import Any, Final

# A default that is an expression: a name of the module, say.
COMPUTED: Final = object()


@dataclass(frozen=True)
class Parameter:
    """A parameter: its name, its annotation as written, whether it has a default, and the default where it is plain."""

    name: str
    annotation: str
    keyword: bool
    required: bool
    default: Any = None


def parameters_of(module: str, function: str) -> list[Parameter]:
    """The parameters of a function of surgeon, in order; `module` is its name below `surgeon` (`apply.preview`)."""
    source = pkgutil.get_data("surgeon", f"{module.replace('.', '/')}.py")
    assert source is not None
    # Its overloads, which are for type checkers, stand before it.
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
    assert written.annotation is not None
    annotation = ast.unparse(written.annotation)
    if default is None:
        return Parameter(written.arg, annotation, keyword, required=True)
    try:
        value = ast.literal_eval(default)
    except ValueError:
        value = COMPUTED
    return Parameter(written.arg, annotation, keyword, required=False, default=value)
