"""Dissect a checkpoint: which tensor is which part of which layer, checked against the config.

A checkpoint that carries grafts is read as the native trunk beneath: its `model_type` is `upcycled_<family>`, its
`config.surgery` says which grafts stand where, and its `num_hidden_layers` counts trunk and branches (a branch is a
layer of the tail, so that caches are allocated for it).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from surgeon.checkpoint.header import FLOAT_DTYPES, TensorInfo
from surgeon.errors import BadInput, printable
from surgeon.families import ENCODERS, FAMILIES, family_of
from surgeon.families.family import Family, Part, Sizes, per_layer_lists
from surgeon.runtime.known import GRAFTS, kinds, native_of
from surgeon.runtime.natives import PREFIX
from surgeon.runtime.rules import BRANCH, Kind, read_surgery
from surgeon.runtime.states_rules import BANK


# Only a number right after a family's stem (`layers.`) at the known place is a layer index: renaming changes it
# alone, never a substring.
@cache
def _layer_name() -> re.Pattern[str]:
    families = (*FAMILIES.values(), *ENCODERS.values())
    stems = sorted({f"{prefix}{family.stem}" for family in families for prefix in (family.prefix, "")})
    return re.compile(
        rf"(?P<stem>{'|'.join(map(re.escape, stems))})(?P<index>0|[1-9][0-9]{{0,8}})\.(?P<suffix>.+)", re.DOTALL
    )


# Buffers that old versions of transformers saved; nothing reads them now, so copying them is harmless.
_OLD_BUFFERS = ("self_attn.rotary_emb.inv_freq",)

# The names of LayerNorm's parts in checkpoints older than PyTorch's LayerNorm; transformers accepts both.
OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


@dataclass(frozen=True)
class Anatomy:
    """A base checkpoint by parts.

    `layers[i]` maps a tensor's suffix (`self_attn.q_proj.weight`) to its entry in the header; `outer`
    maps full names outside the layers; `prefix` is the base model's in names (`model.` or nothing). Of a base that
    carries grafts, family, sizes and layers are those of its trunk; `grafted[i]` holds the tensors of a layer's
    grafts, `bank` those of control states, by what follows the prefix.
    """

    family: Family
    sizes: Sizes
    parts: tuple[Part, ...]
    prefix: str
    layers: tuple[dict[str, TensorInfo], ...]
    outer: dict[str, TensorInfo]
    layer_types: list[str] | None
    tied: bool
    grafted: tuple[dict[str, TensorInfo], ...]
    bank: dict[str, TensorInfo]

    def outer_name(self, suffix: str) -> str:
        """The full name of a tensor of the base model that belongs to no layer."""
        return f"{self.prefix}{suffix}"

    def layer_name(self, index: int, suffix: str) -> str:
        """The full name of a layer's tensor."""
        return f"{self.prefix}{self.family.stem}{index}.{suffix}"


def layer_of(name: str) -> tuple[str, int, str] | None:
    """A tensor's name as (text before the number, layer, suffix); None outside the layers."""
    found = _layer_name().fullmatch(name)
    return (found["stem"], int(found["index"]), found["suffix"]) if found else None


def renumbered(name: str, layers: Mapping[int, int]) -> str:
    """The name with its layer's new number, unchanged outside the layers. Raises KeyError where `layers` lacks it."""
    place = layer_of(name)
    if place is None:
        return name
    stem, index, suffix = place
    return f"{stem}{layers[index]}.{suffix}"


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


def dissect(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Anatomy:
    """Sort the tensors of a checkpoint into layers and the rest, and check every shape against the config.

    Raises BadInput naming the first tensor that is missing, unknown or of the wrong shape or dtype.
    """
    carries_grafts = is_grafted(config)
    config = native_config(config)
    family = family_of(config)
    _refuse_quantised(config)
    sizes = family.sizes(config)
    parts = family.layer_parts(config, sizes)
    prefix, layers, outer = _sort(tensors, sizes.layers, family)
    grafted = tuple(_take_grafts(layer) if carries_grafts else {} for layer in layers)
    bank = _take_bank(outer, prefix) if carries_grafts else {}
    _check_layers(layers, parts, f"{prefix}{family.stem}")
    _check_branches(grafted, parts)
    tied = family.tied(config)
    _check_outer(outer, family.outer_parts(config, sizes), prefix)
    if not family.encoder:
        _check_head(outer, sizes, prefix, tied=tied)
    return Anatomy(
        family=family,
        sizes=sizes,
        parts=parts,
        prefix=prefix,
        layers=layers,
        outer=outer,
        layer_types=family.layer_types(config, sizes.layers),
        tied=tied,
        grafted=grafted,
        bank=bank,
    )


def _take_bank(outer: dict[str, TensorInfo], prefix: str) -> dict[str, TensorInfo]:
    """Take the control states' tensors out of those outside layers and return them."""
    names = [name for name in outer if name.startswith(f"{prefix}{BANK}")]
    return {name.removeprefix(prefix): outer.pop(name) for name in names}


def _take_grafts(layer: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Take the grafts' tensors out of a layer's and return them."""
    return {suffix: layer.pop(suffix) for suffix in list(layer) if owner_of(suffix) is not None}


def _check_branches(grafted: tuple[dict[str, TensorInfo], ...], parts: tuple[Part, ...]) -> None:
    shapes = {f"{BRANCH}{part.suffix}": part.shape for part in parts}
    for layer in grafted:
        for suffix, info in layer.items():
            _check_tensor(info, shapes.get(suffix, info.shape))


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    method = config.get("quantization_config")
    if method is not None:
        kind = method.get("quant_method", "unknown method") if isinstance(method, Mapping) else "unknown method"
        raise BadInput(
            f"config.json: the base is quantised ({printable(str(kind))}); surgery needs the full-precision weights,"
            " operate on those and quantise the output"
        )


def _sort(
    tensors: Mapping[str, TensorInfo], count: int, family: Family
) -> tuple[str, tuple[dict[str, TensorInfo], ...], dict[str, TensorInfo]]:
    layers: tuple[dict[str, TensorInfo], ...] = tuple({} for _ in range(count))
    outer: dict[str, TensorInfo] = {}
    known, found = (f"{family.prefix}{family.stem}", family.stem), set()
    for name, info in tensors.items():
        place = layer_of(name)
        if place is None or place[0] not in known:
            outer[name] = info
            continue
        stem, index, suffix = place
        if index >= count:
            raise BadInput(
                f"{printable(name)} ({info.file}): the config has `num_hidden_layers` {count},"
                f" so there is no layer {index}; is config.json another model's?"
            )
        found.add(stem)
        layers[index][suffix] = info
    if len(found) > 1:
        raise BadInput(f"layers are named both `{known[0]}…` and `{known[1]}…`; keep one set of them")
    return ("" if found == {family.stem} else family.prefix), layers, outer


def _check_layers(layers: tuple[dict[str, TensorInfo], ...], parts: tuple[Part, ...], stem: str) -> None:
    expected = {part.suffix: part.shape for part in parts}
    for index, layer in enumerate(layers):
        held = _by_present_names(layer)
        for suffix, shape in expected.items():
            name = f"{stem}{index}.{suffix}"
            info = held.get(suffix)
            if info is None:
                raise BadInput(
                    f"{printable(name)}: the config requires this tensor, no shard has it;"
                    " is config.json another model's?"
                )
            _check_tensor(info, shape)
        for suffix, info in held.items():
            if suffix not in expected and suffix not in _OLD_BUFFERS:
                raise BadInput(
                    f"{printable(info.name)} ({info.file}): a layer of this architecture and config has no such"
                    f" tensor; expected {', '.join(expected)}"
                )


def _by_present_names(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """By the present names of norms' parts; BadInput where one is there under both names."""
    held: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        old = next((old for old in OLD_NORMS if name.endswith(f".{old}")), None)
        present = name if old is None else name.removesuffix(old) + OLD_NORMS[old]
        if present in held:
            raise BadInput(
                f"{printable(info.name)} ({info.file}): stored as {printable(held[present].name)} too; keep one of them"
            )
        held[present] = info
    return held


def _check_outer(outer: Mapping[str, TensorInfo], shapes: Mapping[str, tuple[int, ...]], prefix: str) -> None:
    held = _by_present_names(outer)
    for suffix, shape in shapes.items():
        name = f"{prefix}{suffix}"
        if name not in held:
            raise BadInput(f"{name}: the config requires this tensor, no shard has it; is config.json another model's?")
        _check_tensor(held[name], shape)


def _check_head(outer: Mapping[str, TensorInfo], sizes: Sizes, prefix: str, *, tied: bool) -> None:
    head = "lm_head.weight"
    if head in outer:
        _check_tensor(outer[head], (sizes.vocabulary, sizes.hidden))
    elif prefix and not tied and not any(name.startswith("score.") for name in outer):
        raise BadInput(
            f"{head}: embeddings are not tied (`tie_word_embeddings`), yet no shard has this tensor;"
            " set it to true if the model shares them"
        )


def _check_tensor(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise BadInput(
            f"{printable(info.name)} ({info.file}): shape {list(info.shape)}, the config requires {list(shape)};"
            " is config.json another model's?"
        )
    if info.dtype not in FLOAT_DTYPES:
        raise BadInput(
            f"{printable(info.name)} ({info.file}): dtype {info.dtype}; surgery needs plain floating-point weights"
            f" ({', '.join(sorted(FLOAT_DTYPES))})"
        )


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
