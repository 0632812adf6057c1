"""Plugins: extensions by other installed distributions, through entry points.

Groups: `surgeon.operations` (an operation's spec, by its name in plans), `surgeon.families` (a `Hint`, by its
`model_type`) and `surgeon.runtime` (parts that must be found from a config.json only, since they ship in outputs: the
rules of a graft, or an interpolator). Only installed distributions are loaded, none whose metadata is in the working
directory, and each only when it is needed.

Any exception of a plugin's code, SystemExit included, is attributed to the plugin by name, and the command is refused.
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
    """One loaded entry point: its name, its value, and the distribution that provides it."""

    name: str
    value: Any
    distribution: str
    version: str

    @property
    def shown(self) -> str:
        """The distribution's name and version in messages."""
        return printable(f"{self.distribution} {self.version}")


@cache
def plugins(group: str) -> tuple[Plugin, ...]:
    """Return all entry points of a group, loaded, sorted by name.

    Raises BadInput, which names the distribution, for an entry point that cannot be loaded.
    """
    found = (entry for entry in _installed() if entry.group == group)
    return tuple(_loaded(entry) for entry in sorted(found, key=lambda entry: entry.name))


def any_installed() -> bool:
    """Return whether any distribution extends surgeon: its code may change without a change of its version."""
    return any(entry.group.startswith("surgeon.") for entry in _installed())


@cache
def _installed() -> tuple[EntryPoint, ...]:
    """Return the entry points of all distributions. The search is slow, so all groups share the result.

    Of two distributions with one name, the first on the path counts, as in Python.
    """
    here = os.path.realpath(os.curdir)
    # In a notebook, for example, the working directory is on the path, and it may be an untrusted folder.
    path = [entry for entry in sys.path if entry and os.path.realpath(entry) != here]
    named: dict[str, Distribution] = {}
    for found in distributions(path=path):
        # Use the folder's name where possible, because reading every METADATA file is slow.
        named.setdefault(getattr(found, "_normalized_name", None) or found.name, found)
    return tuple(entry for found in named.values() for entry in found.entry_points)


def _loaded(entry: EntryPoint) -> Plugin:
    """Import an entry point and return its plugin. Raises BadInput, which names the plugin, where that fails."""
    assert entry.dist is not None
    distribution, version = str(entry.dist.name), str(entry.dist.version)
    _MODULES[entry.module.partition(".")[0]] = f"{distribution} {version}"
    with _of_plugin(f"{distribution} {version}", f"its entry point `{entry.name}` of `{entry.group}` cannot be loaded"):
        return Plugin(entry.name, entry.load(), distribution, version)


# The loaded plugins' distributions (name and version), by the packages that contain their code.
_MODULES: dict[str, str] = {}


@contextmanager
def _of_plugin(plugin: str, what: str) -> Iterator[None]:
    """Convert any exception of a plugin's code in this block to BadInput, except interruptions and surgeon's errors."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, SurgeonError) or is_interruption(error):
            raise
        raise _refusal(plugin, what, error) from error


def _refusal(plugin: str, what: str, error: BaseException) -> BadInput:
    """Return the error that names a plugin, `what` failed, and the exception's first line."""
    line = printable((str(error).splitlines() or [""])[0], limit=300)
    return BadInput(
        f"plugin {printable(plugin)}: {printable(what)} ({type(error).__name__}: {line}); repair it (--debug"
        " shows where) or uninstall it"
    )


def blamed(error: BaseException) -> BadInput | None:
    """Return the refusal of the plugin whose code raised an error; None if there is none, or the error is for the user.

    So a plugin's SystemExit(0) cannot end a command as if it were done.
    """
    if isinstance(error, SurgeonError) or is_interruption(error):
        return None
    modules = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    plugin = next((_MODULES[name] for name in reversed(modules) if name in _MODULES and name != "surgeon"), None)
    return None if plugin is None else _refusal(plugin, "its code failed", error)


class Registry(Mapping[str, T]):
    """A mapping of built-in values by name and of plugins' values, which are loaded at first access.

    `admit` returns the value that a plugin adds, or None for a value that belongs to another registry of the group, or
    raises BadInput where it is unusable. The first access raises BadInput where a plugin is broken or its name is
    taken.
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
        """The built-in values by name, made at first access."""
        return dict(self._given() if callable(self._given) else self._given)

    @cached_property
    def _all(self) -> dict[str, T]:
        """The built-in and the plugins' values by name."""
        return self._built_in | {name: value for name, (_, value) in self._plugged.items()}

    @cached_property
    def _plugged(self) -> dict[str, tuple[Plugin, T]]:
        """Each plugin with the value that it adds, by name.

        Raises BadInput where a plugin is broken or its name is taken.
        """
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
                    f"plugin {plugin.shown}: `{printable(plugin.name)}` of `{self._group}` is taken already; uninstall"
                    " this plugin, or the other of that name"
                )
            found[plugin.name] = (plugin, value)
        return found

    def plugin_of(self, name: str) -> Plugin | None:
        """Return the plugin that provides a name; None for a built-in value."""
        found = self._plugged.get(name)
        return None if found is None else found[0]

    def __getitem__(self, name: str) -> T:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def wrong_kind(plugin: Plugin, group: str, needed: str) -> BadInput:
    """Return the error for an entry point whose value has the wrong kind, or the wrong name."""
    return BadInput(f"plugin {plugin.shown}: its entry point `{printable(plugin.name)}` of `{group}` must be {needed}")


def missing_plugins(named: object) -> list[str]:
    """Return the distributions in a manifest's `plugins` (name → version, unchecked) not installed here, printable."""
    found = []
    for name, recorded in named.items() if isinstance(named, Mapping) else ():
        try:
            version(str(name))
        except (PackageNotFoundError, ValueError):
            found.append(printable(f"{name} {recorded}"))
    return found
