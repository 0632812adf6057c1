"""Configs and tensor names of checkpoints that carry grafts, read as those of the native trunk beneath.

A grafted checkpoint's `model_type` is `upcycled_<family>`, its `config.surgery` says which grafts stand where, and its
`num_hidden_layers` counts trunk and branches (a branch is a layer of the tail, so that caches are allocated for it).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from surgeon.errors import BadInput, printable
from surgeon.families.family import per_layer_lists
from surgeon.runtime.known import GRAFTS, kinds, native_of
from surgeon.runtime.natives import PREFIX
from surgeon.runtime.rules import BRANCH, Kind, read_surgery


def is_grafted(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a checkpoint with grafts."""
    return str(config.get("model_type", "")).startswith(PREFIX)


def native_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the trunk alone: native model type, no surgery, per-layer lists without the branches' tail.

    A native config comes back as it is (a copy). BadInput where `surgery` does not fit the rest.
    """
    native = copy.deepcopy(dict(config))
    if not is_grafted(config):
        return native
    trunk = _trunk_layers(config)
    for key, values in per_layer_lists(native, native["num_hidden_layers"]).items():
        native[key] = values[:trunk]
    native["num_hidden_layers"] = trunk
    native["model_type"] = str(config["model_type"]).removeprefix(PREFIX)
    known = native_of(native)
    native["architectures"] = [
        str(name) if known is None else known.native_class(str(name).removeprefix(known.prefix))
        for name in native.get("architectures") or ()
    ]
    del native["surgery"]
    native.pop("auto_map", None)
    return native


def owner_of(suffix: str) -> Kind | None:
    """Which kind of graft a layer's tensor belongs to, by what follows `layers.{i}.`; None for a native one."""
    claiming = [kind for kind in kinds().values() if kind.claims(suffix)]
    # A twin's tensors are the twin's where no graft inside it claims them.
    return next((kind for kind in claiming if not kind.branching), next(iter(claiming), None))


def in_branch(suffix: str) -> bool:
    """Whether a layer's tensor stands in its expanded twin."""
    return suffix.startswith(BRANCH)


def _trunk_layers(config: Mapping[str, Any]) -> int:
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(layers, bool) or not isinstance(config.get("surgery"), dict):
        raise BadInput("config.json: a model type of surgeon's, yet no `surgery` or `num_hidden_layers` in it")
    types = config.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        raise BadInput(f"config.json: `layer_types` must list one name for each of the {layers} layers")
    stated = SimpleNamespace(num_hidden_layers=layers, surgery=config["surgery"], layer_types=types)
    try:
        trunk = read_surgery(stated, GRAFTS.values()).trunk_layers
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"config.json: `surgery` cannot be read: {printable(str(error))}") from None
    if not isinstance(trunk, int) or isinstance(trunk, bool) or not 0 < trunk <= layers:
        raise BadInput(f"config.json: `surgery.trunk_layers` is {printable(repr(trunk))}, of {layers} layers")
    return trunk
