"""Dissect a checkpoint: which tensor is which part of which layer, checked against the config.

Of a model type that a family describes, from headers and config alone; of any other, what transformers builds of the
config is taken apart and probed (derived.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surgeon.checkpoint.header import FLOAT_DTYPES, TensorInfo
from surgeon.checkpoint.own_code import OwnCode
from surgeon.checkpoint.trust import refuse_quantised
from surgeon.checkpoint.weights import quantisation
from surgeon.errors import BadInput, printable
from surgeon.families import ENCODERS, FAMILIES, family_of
from surgeon.families.anatomy import (
    OLD_NORMS,
    Anatomy,
    LayerKind,
    doubled,
    is_grafted,
    layer_of,
    native_config,
    owner_of,
)
from surgeon.families.family import Family, Part, Sizes, listed_layer_types
from surgeon.families.settings import check_settings
from surgeon.runtime.natives import PREFIX
from surgeon.runtime.rules import BRANCH
from surgeon.runtime.states_rules import BANK

# Buffers that old versions of transformers saved; nothing reads them now, so copying them is harmless.
_OLD_BUFFERS = ("self_attn.rotary_emb.inv_freq",)


def dissect(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], own: OwnCode | None = None) -> Anatomy:
    """Sort the tensors of a checkpoint into layers and the rest, and check every shape against the config.

    `own` is the code that its model is built of where it brings some: what a model type is called says nothing then.
    Raises BadInput naming the first tensor that is missing, unknown or of the wrong shape or dtype.
    """
    own = own if own is not None and own.builds_models else None
    carries_grafts, derived = is_grafted(config), is_derived(config) or own is not None
    config = native_config(config)
    if derived:
        return _dissect_derived(config, tensors, own, carries_grafts=carries_grafts)
    family = family_of(config)
    refuse_quantised(config, passed=False)
    if config.get("per_layer_config"):
        raise BadInput(
            "config.json: `per_layer_config` gives single layers other sizes or settings, which this family does not"
            " have; take it out, if the model does not need it"
        )
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
        kinds=(LayerKind(parts, family.silence(parts)),),
        kind_of=(0,) * sizes.layers,
        prefix=prefix,
        layers=layers,
        outer=outer,
        layer_types=family.layer_types(config, sizes.layers),
        tied=tied,
        grafted=grafted,
        bank=bank,
        idle=tuple(_idle(outer, [f"{prefix}{suffix}" for suffix in family.outer_parts(config, sizes)], family)),
    )


def is_derived(config: Mapping[str, Any]) -> bool:
    """Whether no family describes this model type, so that what can be known of it is found out.

    Families describe layers in full precision: a quantised checkpoint's are found out too. With grafts such a one has
    the `anatomy` in its config by which its classes were composed.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return False
    native = model_type.removeprefix(PREFIX)
    found_out = "anatomy" in config if is_grafted(config) else quantisation(config) is not None
    described = native in FAMILIES and not found_out
    return not described and native not in ENCODERS


def _dissect_derived(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], own: OwnCode | None, *, carries_grafts: bool
) -> Anatomy:
    # Imports torch and transformers, which reading a family's checkpoint does without.
    from surgeon.families.derived import anatomy_of

    return anatomy_of(config, tensors, own, carries_grafts=carries_grafts)


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
