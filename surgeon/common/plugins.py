"""Plugins: what other installed distributions add, by entry points.

Groups: `surgeon.operations` (an operation's spec, by the name it has in plans), `surgeon.families` (a `Hint`, by its
`model_type`) and `surgeon.runtime` (what must be found from a config.json alone, since it ships in outputs: the rules
of a graft, or an interpolator). Nothing is loaded that the environment did not
install, nothing whose metadata lies in the working directory, and nothing before it is asked for.

Whatever a plugin's code raises, SystemExit too, is the plugin's: it is named, and the command is refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distributions, version
from traceback import walk_tb
from typing import Any, TypeVar

from surgeon.common.interrupting import is_interruption
from surgeon.errors import BadInput, SurgeonError, printable

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
    found = (entry for entry in _installed() if entry.group == group)
    return tuple(_loaded(entry) for entry in sorted(found, key=lambda entry: entry.name))


def any_installed() -> bool:
    """Whether a distribution brings something to surgeon: its code may change without its version."""
    return any(entry.group.startswith("surgeon.") for entry in _installed())


@cache
def _installed() -> tuple[EntryPoint, ...]:
    """Those of all distributions: finding them takes as long as many a command, so the groups share it.

    Of two distributions of one name the first on the path counts, as Python has it.
    """
    here = os.path.realpath(os.curdir)
    # In a notebook, say, the working directory is on the path, and that may be a stranger's folder.
    path = [entry for entry in sys.path if entry and os.path.realpath(entry) != here]
    named: dict[str, Distribution] = {}
    for found in distributions(path=path):
        # By the folder's name where that says it: reading every METADATA takes long.
        named.setdefault(getattr(found, "_normalized_name", None) or found.name, found)
    return tuple(entry for found in named.values() for entry in found.entry_points)


def _loaded(entry: EntryPoint) -> Plugin:
    assert entry.dist is not None
    distribution, version = str(entry.dist.name), str(entry.dist.version)
    _MODULES[entry.module.partition(".")[0]] = f"{distribution} {version}"
    with _of_plugin(f"{distribution} {version}", f"its entry point `{entry.name}` of `{entry.group}` cannot be loaded"):
        return Plugin(entry.name, entry.load(), distribution, version)


# The distributions of plugins that were loaded, as shown, by the packages that they name.
_MODULES: dict[str, str] = {}


@contextmanager
def _of_plugin(plugin: str, what: str) -> Iterator[None]:
    """BadInput for whatever a plugin's code raises in this block, but for an interruption and for BadInput."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, SurgeonError) or is_interruption(error):
            raise
        raise _refusal(plugin, what, error) from error


def _refusal(plugin: str, what: str, error: BaseException) -> BadInput:
    line = printable((str(error).splitlines() or [""])[0], limit=300)
    return BadInput(
        f"plugin {printable(plugin)}: {printable(what)} ({type(error).__name__}: {line}); repair or uninstall it"
    )


def blamed(error: BaseException) -> BadInput | None:
    """The refusal of the plugin whose code an error went through; None where it is nobody's, or was meant for the user.

    So a plugin's SystemExit(0) ends no command as if it were done.
    """
    if isinstance(error, SurgeonError) or is_interruption(error):
        return None
    modules = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    plugin = next((_MODULES[name] for name in reversed(modules) if name in _MODULES and name != "surgeon"), None)
    return None if plugin is None else _refusal(plugin, "its code failed", error)


class Registry(Mapping[str, T]):
    """Built-in things by name, and those of plugins, which are read at the first look.

    `admit` gives the value that a plugin adds, None for one that belongs to another registry of the group, or raises
    BadInput where it is of no use. The first look raises BadInput where a plugin is broken or has another's name.
    """

    def __init__(
        self,
        group: str,
        built_in: Mapping[str, T] | Callable[[], Mapping[str, T]],
        admit: Callable[[Plugin], T | None],
    ) -> None:
        self._group = group
        self._given = built_in
        self._admit = admit

    @cached_property
    def _built_in(self) -> dict[str, T]:
        return dict(self._given() if callable(self._given) else self._given)

    @cached_property
    def _all(self) -> dict[str, T]:
        return self._built_in | {name: value for name, (_, value) in self._plugged.items()}

    @cached_property
    def _plugged(self) -> dict[str, tuple[Plugin, T]]:
        found: dict[str, tuple[Plugin, T]] = {}
        for plugin in plugins(self._group):
            with _of_plugin(
                f"{plugin.distribution} {plugin.version}", f"its `{plugin.name}` of `{self._group}` is of no use"
            ):
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
    """Return those of a manifest's `plugins` (distribution → version, unchecked) that are not installed, printable."""
    found = []
    for name, recorded in named.items() if isinstance(named, Mapping) else ():
        try:
            version(str(name))
        except (PackageNotFoundError, ValueError):
            found.append(printable(f"{name} {recorded}"))
    return found
