"""Plugins: what other installed distributions add, by entry points.

Groups: `surgeon.operations` (an operation's spec, by the name it has in plans), `surgeon.families` (a `Family`, by its
`model_type`) and `surgeon.runtime` (what must be found from a config.json alone, since it ships in outputs: the rules
of a graft or of an interpolator, or the `Native` of a model type). Nothing is loaded that the environment did not
install, and nothing before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any, TypeVar

from surgeon.errors import BadInput, printable

T = TypeVar("T")


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
    return tuple(_loaded(entry) for entry in sorted(_installed().select(group=group), key=lambda entry: entry.name))


@cache
def _installed() -> Any:
    """Those of all distributions: finding them takes as long as many a command, so the groups share it."""
    return entry_points()


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


class Registry(Mapping[str, T]):
    """Built-in things by name, and those of plugins, which are read at the first look.

    `admit` gives the value that a plugin adds, None for one that belongs to another registry of the group, or raises
    BadInput where it is of no use. The first look raises BadInput where a plugin is broken or has another's name.
    """

    def __init__(self, group: str, built_in: Mapping[str, T], admit: Callable[[Plugin], T | None]) -> None:
        self._group = group
        self._built_in = dict(built_in)
        self._admit = admit

    @cached_property
    def _all(self) -> dict[str, T]:
        return self._built_in | {name: value for name, (_, value) in self._plugged.items()}

    @cached_property
    def _plugged(self) -> dict[str, tuple[Plugin, T]]:
        found: dict[str, tuple[Plugin, T]] = {}
        for plugin in plugins(self._group):
            value = self._admit(plugin)
            if value is None:
                continue
            if plugin.name in self._built_in or plugin.name in found:
                raise BadInput(
                    f"plugin {plugin.shown}: `{printable(plugin.name)}` of `{self._group}` is the name of another;"
                    " uninstall one of them"
                )
            found[plugin.name] = (plugin, value)
        return found

    def plugin_of(self, name: str) -> Plugin | None:
        """The plugin that brought it; None for a built-in one."""
        found = self._plugged.get(name)
        return None if found is None else found[0]

    def __getitem__(self, name: str) -> T:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def wrong_kind(plugin: Plugin, group: str, needed: str) -> BadInput:
    """The error for an entry point that names a thing of another kind, or one with another name."""
    return BadInput(f"plugin {plugin.shown}: its entry point `{printable(plugin.name)}` of `{group}` must be {needed}")


def missing_plugins(named: object) -> list[str]:
    """Of a manifest's `plugins` (distribution → version, not yet checked), those that are not installed, as shown."""
    found = []
    for name, wanted in named.items() if isinstance(named, Mapping) else ():
        try:
            version(str(name))
        except (PackageNotFoundError, ValueError):
            found.append(printable(f"{name} {wanted}"))
    return found
