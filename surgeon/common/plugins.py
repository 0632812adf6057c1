"""Plugins: what other installed distributions add, by entry points.

Groups: `surgeon.operations` (an operation's spec, by the name it has in plans), `surgeon.families` (a `Family`, by its
`model_type`) and `surgeon.runtime` (what must be found from a config.json alone, since it ships in outputs: the rules
of a graft or of an interpolator, or the `Native` of a model type). Nothing is loaded that the environment did not
install, and nothing before it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from surgeon.errors import BadInput, printable


@dataclass(frozen=True)
class Plugin:
    """One loaded entry point: its name, what it names, and the distribution that brought it."""

    name: str
    value: Any
    distribution: str
    version: str

    @property
    def shown(self) -> str:
        """The distribution as messages call it."""
        return printable(f"{self.distribution} {self.version}")


@cache
def plugins(group: str) -> tuple[Plugin, ...]:
    """All entry points of a group, loaded, by name. Raises BadInput naming the distribution of one that is broken."""
    return tuple(_loaded(entry) for entry in sorted(entry_points(group=group), key=lambda entry: entry.name))


def _loaded(entry: EntryPoint) -> Plugin:
    assert entry.dist is not None
    distribution, version = str(entry.dist.name), str(entry.dist.version)
    try:
        value = entry.load()
    except Exception as error:  # whatever a plugin's import may raise
        line = printable((str(error).splitlines() or [""])[0], limit=300)
        raise BadInput(
            f"plugin {printable(f'{distribution} {version}')}: its entry point `{printable(entry.name)}` of"
            f" `{entry.group}` cannot be loaded ({type(error).__name__}: {line}); repair or uninstall it"
        ) from error
    return Plugin(entry.name, value, distribution, version)


def with_plugins(built_in: dict[str, Any], found: tuple[Plugin, ...], what: str) -> dict[str, Any]:
    """Built-ins and plugins by name. Raises BadInput where two have one name."""
    both = dict(built_in)
    for plugin in found:
        if plugin.name in both:
            raise BadInput(
                f"plugin {plugin.shown}: its {what} `{printable(plugin.name)}` has the name of another; uninstall one"
            )
        both[plugin.name] = plugin.value
    return both
