"""The grafts, interpolators and model types that can be named: the built-in ones and those of plugins. Not shipped."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from surgeon.common.plugins import Plugin, plugins, with_plugins
from surgeon.errors import BadInput

from .adapters_rules import AdapterRules
from .control_rules import INTERPOLATORS, ControlRules, InterpolatorRule
from .experts_rules import ExpertRules
from .natives import NATIVES, PREFIX, Native
from .rules import GraftRules, Kind
from .states_rules import StatesRules

GROUP = "surgeon.runtime"


@cache
def _plugged(kind: type[Any]) -> tuple[Plugin, ...]:
    """The plugins of one type. Raises BadInput for one that is of no type that ships."""
    for plugin in plugins(GROUP):
        if not isinstance(plugin.value, GraftRules | InterpolatorRule | Native):
            raise BadInput(
                f"plugin {plugin.shown}: its entry point `{plugin.name}` of `{GROUP}` is a"
                f" {type(plugin.value).__name__}; GraftRules, InterpolatorRule or Native is needed"
            )
    return tuple(plugin for plugin in plugins(GROUP) if isinstance(plugin.value, kind))


@cache
def interpolators() -> dict[str, InterpolatorRule]:
    """Interpolators by their key in plans. Raises BadInput for a plugin that is broken or has another's name."""
    return with_plugins({rule.key: rule for rule in INTERPOLATORS}, _plugged(InterpolatorRule), "interpolator")


@cache
def natives() -> dict[str, Native]:
    """Model types that have upcycled classes. Raises BadInput for a plugin that is broken or has another's name."""
    return with_plugins(NATIVES, _plugged(Native), "model type")


@cache
def grafts() -> dict[str, GraftRules]:
    """The rules of all grafts, in the order in which layers ask them. Raises BadInput for a broken plugin."""
    built_in = (ControlRules(interpolators().values()), AdapterRules(), ExpertRules(), StatesRules())
    found: dict[str, GraftRules] = with_plugins(
        {rules.name: rules for rules in built_in}, _plugged(GraftRules), "graft"
    )
    keys = [key for rules in found.values() for key in rules.keys]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise BadInput(f"plugins: two grafts have the key `{twice[0]}` of config.surgery; uninstall one")
    return found


@cache
def kinds() -> dict[str, Kind]:
    """The kinds of all grafts by their key in `config.surgery`."""
    return {kind.key: kind for rules in grafts().values() for kind in rules.kinds}


def native_of(config: Mapping[str, Any]) -> Native | None:
    """The native of a config's model type, upcycled or not; None for a model type that has no upcycled classes."""
    return natives().get(str(config.get("model_type")).removeprefix(PREFIX))


def plugins_in(config: Mapping[str, Any]) -> dict[str, str]:
    """The distributions (with versions) whose code is joined into what ships beside weights of this config."""
    raw = config.get("surgery")
    raw = raw if isinstance(raw, Mapping) else {}
    native = native_of(config)
    used: set[Any] = {native.model_type} if native is not None else set()
    named = {name for name, rules in grafts().items() if rules.present(raw)}
    parts = {part for name in named for _, part, _ in grafts()[name].uses(raw) or ()}
    found: dict[str, str] = {}
    for plugin in plugins(GROUP):
        value = plugin.value
        takes_part = (
            (isinstance(value, Native) and value.model_type in used)
            or (isinstance(value, GraftRules) and value.name in named)
            or (isinstance(value, InterpolatorRule) and value.part in parts)
        )
        if takes_part:
            found[plugin.distribution] = plugin.version
    return found
