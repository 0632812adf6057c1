"""Configs and tensor names of checkpoints that carry grafts, read as those of the native trunk beneath.

A grafted checkpoint's `model_type` is `upcycled_<family>`, its `config.surgery` says which grafts stand where, and its
`num_hidden_layers` counts trunk and branches (a branch is a layer of the tail, so that caches are allocated for it).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from surgeon.errors import BadInput, printable
from surgeon.families.family import per_layer_lists
from surgeon.runtime.natives import NATIVES, PREFIX
from surgeon.runtime.surgery import read_surgery

# The last two are of the whole model: which layers carry control states is said by the layers, how they mix is not.
GraftKind = Literal["control", "adapters", "experts", "expert_router", "control_states", "mixture"]

BRANCH = "expanded."
ADAPTER = "mlp.adapter."
INTERPOLATOR = "interpolator."
ROUTER = "expert_router."
# Not of a layer: stands beside `layers.` in names.
BANK = "control_bank."

_SLOT = re.compile(r"(?P<target>.+)\.slots\.(?P<slot>0|[1-9][0-9]{0,5})\.lora_[AB]")
_COLUMN = re.compile(r"expert_router\.slots\.(?P<slot>0|[1-9][0-9]{0,5})\.(weight|mass)")


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
    known = NATIVES.get(native["model_type"])
    native["architectures"] = [
        str(name) if known is None else known.native_class(str(name).removeprefix(known.prefix))
        for name in native.get("architectures") or ()
    ]
    del native["surgery"]
    native.pop("auto_map", None)
    return native


@dataclass(frozen=True, slots=True)
class Owner:
    """The graft that a layer's tensor belongs to; `slot` and `target` where several of its kind stand in one layer."""

    kind: GraftKind
    in_branch: bool = False
    slot: int | None = None
    target: str = ""


def owner_of(suffix: str) -> Owner | None:
    """Which graft a layer's tensor belongs to; None for a native one."""
    if column := _COLUMN.fullmatch(suffix):
        return Owner("expert_router", slot=int(column["slot"]))
    in_branch = suffix.startswith(BRANCH)
    inner = suffix.removeprefix(BRANCH)
    if slot := _SLOT.fullmatch(inner):
        return Owner("experts", in_branch, int(slot["slot"]), slot["target"])
    if inner.startswith(ADAPTER):
        return Owner("adapters", in_branch)
    if in_branch or suffix.startswith(INTERPOLATOR):
        return Owner("control")
    return None


def _trunk_layers(config: Mapping[str, Any]) -> int:
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(layers, bool) or not isinstance(config.get("surgery"), dict):
        raise BadInput("config.json: a model type of surgeon's, yet no `surgery` or `num_hidden_layers` in it")
    types = config.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        raise BadInput(f"config.json: `layer_types` must list one name for each of the {layers} layers")
    stated = SimpleNamespace(num_hidden_layers=layers, surgery=config["surgery"], layer_types=types)
    try:
        trunk = read_surgery(stated).trunk_layers
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"config.json: `surgery` cannot be read: {printable(str(error))}") from None
    if not isinstance(trunk, int) or isinstance(trunk, bool) or not 0 < trunk <= layers:
        raise BadInput(f"config.json: `surgery.trunk_layers` is {printable(repr(trunk))}, of {layers} layers")
    return trunk
