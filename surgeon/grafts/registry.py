"""The grafts and interpolators that plans can name: the built-in ones and those of plugins."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from surgeon.common.plugins import Plugin, Registry, wrong_kind
from surgeon.errors import BadInput, printable
from surgeon.grafts.adapters import KnownAdapters, KnownRouted
from surgeon.grafts.control import KnownControl
from surgeon.grafts.experts import KnownExperts
from surgeon.grafts.gate import KnownGate
from surgeon.grafts.kinds import Kind, KnownGraft
from surgeon.grafts.states import KnownStates
from surgeon.runtime.interpolators import INTERPOLATORS as BUILT_IN
from surgeon.runtime.interpolators import Interpolation

GROUP = "surgeon.runtime"


def _of(kind: type[Any], key: str) -> Any:
    """Return a function that accepts plugins of `kind`, if their attribute `key` equals the plugin's name."""

    def admit(plugin: Plugin) -> Any:
        """Return a plugin's object; None where it is of another kind. Raises BadInput for one of no known kind."""
        if not isinstance(plugin.value, KnownGraft | Interpolation):
            raise wrong_kind(plugin, GROUP, "a KnownGraft or an Interpolation")
        if not isinstance(plugin.value, kind):
            return None
        if getattr(plugin.value, key) != plugin.name:
            raise wrong_kind(plugin, GROUP, f"called as its {key}, `{printable(getattr(plugin.value, key))}`")
        return plugin.value

    return admit


# Interpolators by their key in plans, grafts by name. The order of grafts is the order in which they are consulted.
INTERPOLATORS: Registry[Interpolation] = Registry(
    GROUP, {rule.key: rule for rule in BUILT_IN}, _of(Interpolation, "key")
)
GRAFTS: Registry[KnownGraft] = Registry(
    GROUP,
    {
        rules.name: rules
        for rules in (
            KnownControl(INTERPOLATORS),
            KnownAdapters(),
            KnownRouted(),
            KnownExperts(),
            KnownStates(),
            KnownGate(),
        )
    },
    _of(KnownGraft, "name"),
)


@cache
def kinds() -> dict[str, Kind]:
    """Return the kinds of all grafts by their key in `config.surgery`.

    Raises BadInput where two grafts have one key.
    """
    keys = [key for rules in GRAFTS.values() for key in rules.keys]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise BadInput(f"plugins: two grafts have the key `{printable(twice[0])}` of config.surgery; uninstall one")
    return {kind.key: kind for rules in GRAFTS.values() for kind in rules.kinds}


def plugins_in(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the plugin distributions (with versions) whose code is joined into the shipped file for this config."""
    raw = config.get("surgery")
    raw = raw if isinstance(raw, Mapping) else {}
    used: dict[str, Plugin | None] = {}
    for name, rules in GRAFTS.items():
        if rules.present(raw):
            used[name] = GRAFTS.plugin_of(name)
            used |= {key: INTERPOLATORS.plugin_of(key) for key, _, _ in rules.uses(raw) or ()}
    return {plugin.distribution: plugin.version for plugin in used.values() if plugin is not None}
