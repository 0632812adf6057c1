"""Dissect a checkpoint: which tensor is which part of which layer, checked against the config.

A checkpoint that carries grafts is read as the native trunk beneath: its `model_type` is `upcycled_<family>`, its
`config.surgery` says which grafts stand where, and its `num_hidden_layers` counts trunk and branches (a branch is a
layer of the tail, so that caches are allocated for it).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from surgeon.checkpoint.header import FLOAT_DTYPES, TensorInfo
from surgeon.checkpoint.trust import refuse_quantised
from surgeon.errors import BadInput, printable
from surgeon.families import ENCODERS, FAMILIES, family_of
from surgeon.families.family import MOST_LAYERS, Family, Part, Sizes, listed_layer_types, per_layer_lists
from surgeon.families.settings import check_settings
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
    grafts, `bank` those of control states, by what follows the prefix. `idle` are tensors outside the layers that no
    model of this config has a place for: they are copied like any other, and compute nothing.
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
    idle: tuple[str, ...]

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
    check_settings(config)
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
    refuse_quantised(config)
    sizes = family.sizes(config)
    check_settings(config)
    listed_layer_types(config, sizes.layers)
    parts = family.layer_parts(config, sizes)
    prefix, layers, outer = _sort(tensors, sizes.layers, family)
    grafted = tuple(_take_grafts(layer) if carries_grafts else {} for layer in layers)
    bank = _take_bank(outer, prefix) if carries_grafts else {}
    _check_free(outer, tensors, prefix, family)
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
        idle=tuple(_idle(outer, [f"{prefix}{suffix}" for suffix in family.outer_parts(config, sizes)], family)),
    )


# Heads of encoders, which come and go: which of them are used is a matter of the class that loads them.
_ENCODER_HEADS = ("lm_head.", "cls.", "classifier.", "score.", "pooler.", "lm_predictions.", "mask_predictions.")
_DECODER_HEADS = ("lm_head.weight", "score.weight")
_POSITIONS = "embeddings.position_ids"


def _idle(outer: Mapping[str, TensorInfo], parts: Sequence[str], family: Family) -> Iterator[str]:
    for name, info in _by_present_names(outer).items():
        bare = name.removeprefix(family.prefix)
        head = bare.startswith(_ENCODER_HEADS) if family.encoder else name in _DECODER_HEADS
        if name not in parts and not head and bare != _POSITIONS:
            yield info.name


def without_a_place(names: Sequence[str]) -> str:
    """A line that names tensors which the model has no place for."""
    shown = ", ".join(printable(name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the model has no place for {shown}{more}: carried along byte for byte, computing nothing"


def _check_free(
    outer: Mapping[str, TensorInfo], tensors: Mapping[str, TensorInfo], prefix: str, family: Family
) -> None:
    """Raise BadInput for a tensor outside the layers under a name that control states or another tensor has."""
    for name, info in outer.items():
        if name.startswith(f"{prefix}{BANK}"):
            raise BadInput(
                f"{printable(name)} ({info.file}): the name of control states, which this checkpoint has none of;"
                " take the tensor out"
            )
    if twice := doubled(tensors, family.prefix):
        first, second = twice
        raise BadInput(
            f"{printable(second)} ({tensors[second].file}): to transformers the same tensor as {printable(first)};"
            " keep one of them"
        )


def doubled(names: Iterable[str], prefix: str) -> tuple[str, str] | None:
    """Two names that transformers takes for one: it adds and drops the base model's `prefix` as it needs."""
    found: dict[str, str] = {}
    for name in names:
        bare = name
        while prefix and bare.startswith(prefix):
            bare = bare.removeprefix(prefix)
        if bare in found:
            return found[bare], name
        found[bare] = name
    return None


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


def _sort(
    tensors: Mapping[str, TensorInfo], count: int, family: Family
) -> tuple[str, tuple[dict[str, TensorInfo], ...], dict[str, TensorInfo]]:
    layers: tuple[dict[str, TensorInfo], ...] = tuple({} for _ in range(count))
    outer: dict[str, TensorInfo] = {}
    known, found = (f"{family.prefix}{family.stem}", family.stem), set()
    for name, info in tensors.items():
        place = layer_of(name)
        if place is None or place[0] not in known:
            if name.startswith(known):
                raise BadInput(
                    f"{printable(name)} ({info.file}): not the name of a layer's tensor; layers are numbered 0,"
                    f" 1, 2, … in plain digits (`{known[0]}0.…`): rename it, or get the model's own files"
                )
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
                    f" tensor; expected {', '.join(expected)}: is config.json another model's?"
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
        raise BadInput(
            "config.json: a model type of surgeon's, yet no `surgery` or `num_hidden_layers` in it; get the"
            " output's own config.json"
        )
    # Before anything is counted out that long.
    if not 0 < layers <= MOST_LAYERS:
        raise BadInput(
            f"config.json: `num_hidden_layers` is {layers}; 1 to {MOST_LAYERS} are read; get the output's own"
            " config.json"
        )
    types = listed_layer_types(config, layers)
    stated = SimpleNamespace(num_hidden_layers=layers, surgery=config["surgery"], layer_types=types)
    try:
        trunk = read_surgery(stated, GRAFTS.values()).trunk_layers
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(
            f"config.json: `surgery` cannot be read: {printable(str(error))}; get the output's own config.json"
        ) from None
    if not isinstance(trunk, int) or isinstance(trunk, bool) or not 0 < trunk <= layers:
        raise BadInput(
            f"config.json: `surgery.trunk_layers` is {printable(repr(trunk), 60)}, of {layers} layers; get the"
            " output's own config.json"
        )
    return trunk
