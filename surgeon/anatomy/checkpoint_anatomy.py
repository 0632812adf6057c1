"""Building the anatomy of a checkpoint: its tensors are matched as transformers would load them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from surgeon.anatomy.anatomy import Anatomy, LayerKind, in_branch, layer_of, owner_of
from surgeon.anatomy.compressed import OF_ACTIVATIONS, packs_of, unpacked
from surgeon.anatomy.decoders import HINTS
from surgeon.anatomy.derivation import Derivation
from surgeon.anatomy.derived import Derived, derive
from surgeon.anatomy.family import Family, Packed, Part
from surgeon.anatomy.growth import layer_axis
from surgeon.anatomy.mixture import groups_of
from surgeon.anatomy.names import Names, made_of, match, saved_names, under_base
from surgeon.anatomy.own_classes import trusted
from surgeon.anatomy.quantised import check_stored, is_scale, packed_of, quantizer_of
from surgeon.anatomy.roles import InMemory, with_roles
from surgeon.anatomy.seen import Seen
from surgeon.anatomy.silence import Silence
from surgeon.anatomy.skeleton import Skeleton, is_known
from surgeon.checkpoint.damages import ANOTHER
from surgeon.checkpoint.header import FLOAT_DTYPES, QUANTISED_DTYPES, TensorInfo
from surgeon.checkpoint.own_code import OwnCode
from surgeon.checkpoint.trust import refuse_quantised
from surgeon.common.library import has_type
from surgeon.errors import BadInput, printable
from surgeon.runtime.states_rules import BANK


def anatomy_of(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    own: OwnCode | None = None,
    *,
    carries_grafts: bool = False,
) -> Anatomy:
    """Dissect a checkpoint; for one with grafts, `config` is the config of its trunk.

    `own` is the checkpoint's own code, which is run here. Raises BadInput where its model cannot be built, or naming
    the first tensor that does not fit.
    """
    config = trusted(config, own)
    if not is_known(config):
        raise _unknown(config)
    refuse_quantised(config, passed=own is None)
    found = derive(config)
    _check_part(config, found.skeleton)
    tensors, grafts, bank = _without_grafts(tensors) if carries_grafts else (tensors, {}, {})
    check_stored(config, tensors)
    branches = sum(any(map(in_branch, held)) for held in grafts.values())
    names = _names(config, _of_trunk(tensors, found, branches=branches), found)
    if (named := next(filter(_of_bank, tensors), None)) is not None:
        raise BadInput(
            f"{printable(named)} ({tensors[named].file}): the name of control states, which this checkpoint has none"
            " of; take the tensor out"
        )
    _check_stems(names, (*tensors, *(info.name for graft in grafts.values() for info in graft.values())))
    _check_numbers(names, tensors)
    _check_floats(names, {n: info for n, info in tensors.items() if not is_scale(config, n)}, found.skeleton)
    count = len(found.kind_of)
    layers = tuple({s: tensors[f"{names.stem}{index}.{s}"] for s in names.layers[index]} for index in range(count))
    packed = tuple(packed_of(config, names.layers[first], layers[first]) for first in found.firsts)
    sizes = found.skeleton.sizes
    prefix = _prefix(names.stem, found.skeleton)
    _check_grafts(grafts, bank, count, prefix)
    kinds = tuple(
        _kind(found, kind, first, names, config, layers[first], packed[kind]) for kind, first in enumerate(found.firsts)
    )
    seen = Seen(config, found, names, packed, tuple(kind.parts for kind in kinds))
    return Anatomy(
        family=Family(str(config["model_type"]), names.stem, found.skeleton.encoder),
        sizes=sizes,
        kinds=kinds,
        kind_of=found.kind_of,
        prefix=prefix,
        layers=layers,
        outer={name: tensors[name] for name in names.outer},
        layer_types=[found.titles[kind] for kind in found.kind_of] if len(found.titles) > 1 else None,
        tied=bool(found.skeleton.model.all_tied_weights_keys),
        grafted=tuple(grafts.get(index, {}) for index in range(count)),
        bank={name.removeprefix(prefix): info for name, info in bank.items()},
        idle=tuple(name for name, target in names.outer.items() if not target),
        beyond=tuple(
            {suffix: tensors[f"{names.stem}{index}.{suffix}"] for suffix in suffixes}
            for index, suffixes in names.beyond.items()
        ),
        derivation=Derivation(lambda: seen),
    )


def _of_trunk(tensors: Mapping[str, TensorInfo], found: Derived, *, branches: int) -> Mapping[str, TensorInfo]:
    """Return a checkpoint's tensors with the shapes that they would have without its `branches` expanded twins.

    Outside the layers some tensors hold one part per layer, with the twins' parts behind those of the trunk's layers.
    """
    if not branches:
        return tensors
    model, count = found.skeleton.model, len(found.kind_of)
    made = dict(tensors)
    for name, info in tensors.items():
        shape = found.skeleton.shapes.get(under_base(model, name))
        if shape is not None and layer_axis(shape, info.shape, count, count + branches) is not None:
            made[name] = replace(info, shape=shape)
    return made


def _names(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], found: Derived) -> Names:
    """Return the names of a checkpoint's tensors; a matrix stored as several tensors has several names."""
    packs = packs_of(config, tensors)
    names = match(found.skeleton, found.kind_of, unpacked(tensors, packs), quantizer_of(config))
    beside = (name for name in tensors if packs and name.endswith(OF_ACTIVATIONS))
    return names.with_parts({pack.name: pack.all for pack in packs.values()}).with_unread(beside)


def _check_stems(names: Names, stored: Iterable[str]) -> None:
    """Raise BadInput where surgeon's pattern for layers' tensor names and this checkpoint's names disagree."""
    for name in stored:
        place = layer_of(name)
        if (place is not None and place[0]) != (name.startswith(names.stem) and names.stem):
            raise BadInput(
                f"{printable(name)}: layers of this checkpoint are called `{printable(names.stem)}…`, a name that"
                " surgeon does not know layers by; save the model with transformers once, and operate on that"
            )


def _check_floats(names: Names, tensors: Mapping[str, TensorInfo], skeleton: Skeleton) -> None:
    """Raise BadInput where a tensor holds integers but the model has floating-point weights in its place.

    A tensor of a layer that nothing reads, or one outside the layers without such a place, may hold integers.
    """
    held = skeleton.model.state_dict(keep_vars=True)
    for index, layer in enumerate(names.layers):
        for suffix, targets in layer.items():
            if (info := tensors.get(f"{names.stem}{index}.{suffix}")) is not None:
                _check_float(info, whole=not targets)
    for name, target in names.outer.items():
        if name in tensors:
            _check_float(tensors[name], whole=target not in held or not held[target].is_floating_point())


def _check_float(info: TensorInfo, *, whole: bool) -> None:
    """Raise BadInput where a dtype is neither floating-point nor quantised; with `whole` accept every dtype."""
    if not whole and info.dtype not in (*FLOAT_DTYPES, *QUANTISED_DTYPES):
        raise BadInput(
            f"{printable(info.name)} ({info.file}): dtype {info.dtype}; surgery needs plain floating-point weights"
            f" ({', '.join(sorted(FLOAT_DTYPES))})"
        )


def _check_numbers(names: Names, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise BadInput for a tensor that is named like a layer's tensor, but not with a layer number in plain digits."""
    above, _, own = names.stem.removesuffix(".").rpartition(".")
    for name, place in names.outer.items():
        if not place and name.startswith((names.stem, *((f"{own}.",) if above else ()))):
            raise BadInput(
                f"{printable(name)} ({tensors[name].file}): not the name of a layer's tensor; layers are numbered 0,"
                f" 1, 2, … in plain digits (`{names.stem}0.…`): rename it, or get the model's own files"
            )


def _unknown(config: Mapping[str, Any]) -> BadInput:
    """Return the error for a model type that neither transformers nor the checkpoint's own code has."""
    named = str(config["model_type"])
    if has_type(named.lower()):
        known = repr(named.lower())
        return BadInput(f"config.json: model_type is {printable(repr(named))}; transformers writes it {known}: do so")
    wraps = isinstance(config.get("text_config"), Mapping)
    hint = "; it wraps a text model: save that alone (its `text_config` and language_model tensors)" if wraps else ""
    return BadInput(
        f"config.json: model_type {printable(named)!r} is no text decoder or encoder of the"
        f" installed transformers{hint}; update transformers, or use a model that it has"
    )


def _without_grafts(
    tensors: Mapping[str, TensorInfo],
) -> tuple[dict[str, TensorInfo], dict[int, dict[str, TensorInfo]], dict[str, TensorInfo]]:
    """Split a checkpoint's tensors: native ones; grafts', by layer and suffix; those of the bank of control states."""
    native: dict[str, TensorInfo] = {}
    grafts: dict[int, dict[str, TensorInfo]] = {}
    bank: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        place = layer_of(name)
        if place is not None and owner_of(place[2]) is not None:
            held = grafts.setdefault(place[1], {}).setdefault(place[2], info)
            if held is not info:
                raise BadInput(
                    f"{printable(name)} ({info.file}): to transformers the same tensor as {printable(held.name)}; keep"
                    " one of them"
                )
        elif _of_bank(name):
            bank[name] = info
        else:
            native[name] = info
    return native, grafts, bank


def _of_bank(name: str) -> bool:
    """Return whether a tensor belongs to the bank of control states, by its name."""
    return layer_of(name) is None and (name.startswith(BANK) or f".{BANK}" in name)


def _prefix(stem: str, skeleton: Skeleton) -> str:
    """Return the prefix of tensor names outside the layers, such as those of a decoder's control states.

    It is the layers' stem without the name of their list, whose path may have several words: `bert.` for
    `bert.encoder.layer.`. Where transformers would not find control states under this prefix, return the
    prefix under which transformers saves them, or else their prefix in memory.
    """
    model, own = skeleton.model, skeleton.stack.removeprefix(f"{skeleton.holder}.")
    prefix = "".join(f"{word}." for word in stem.split(".")[: -1 - len(own.split("."))])
    base, home = f"{model.base_model_prefix}.", f"{skeleton.holder}.".removeprefix(".")
    place = f"{home}{BANK}"
    made = made_of(model, tried := [f"{prefix}{BANK}", *saved_names(model, place)])
    found = (name for name in tried if made[name].names[0].removeprefix(base) == place.removeprefix(base))
    return next(found, place).removesuffix(BANK)


def _check_grafts(
    grafts: Mapping[int, Mapping[str, TensorInfo]], bank: Mapping[str, TensorInfo], count: int, prefix: str
) -> None:
    """Raise BadInput for a graft's tensor whose layer, or whose decoder, does not exist."""
    for index, held in grafts.items():
        if index >= count:
            info = next(iter(held.values()))
            raise BadInput(
                f"{printable(info.name)} ({info.file}): the config has {count} layers, so there is no layer {index};"
                f" {ANOTHER}"
            )
    for name, info in bank.items():
        if not name.startswith(f"{prefix}{BANK}"):
            raise BadInput(
                f"{printable(name)} ({info.file}): control states stand at `{printable(prefix)}{BANK}…` here; {ANOTHER}"
            )


def _check_part(config: Mapping[str, Any], skeleton: Skeleton) -> None:
    """Raise BadInput where the text settings are outside their part of config.json and transformers still finds them.

    Surgery would write changed settings into that part, and the settings outside it would no longer be read.
    """
    if not skeleton.path or isinstance(config.get(skeleton.path[0]), Mapping):
        return
    left_out = type(skeleton.text)().to_dict()
    told = skeleton.text.to_dict()
    if any(told[key] != left_out.get(key) for key in told if key not in ("dtype", "transformers_version")):
        raise BadInput(
            f"config.json: the text's settings do not stand in `{skeleton.path[0]}`, a layout of this type that surgeon"
            " does not know; save the config with transformers once (AutoConfig.from_pretrained(…).save_pretrained(…))"
        )


def _kind(
    found: Derived,
    kind: int,
    first: int,
    names: Names,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    packed: Mapping[str, Packed],
) -> LayerKind:
    """Return the contents of a kind of layers; layer `first` is the lowest of this kind."""
    silence = found.silence[kind]
    # A scale is copied together with the tensor that it scales.
    stored = {suffix: targets for suffix, targets in names.layers[first].items() if not is_scale(config, suffix)}
    parts: list[Part] = []
    for suffix, targets in stored.items():
        info = tensors[suffix]
        if not targets:
            continue
        parts.append(
            Part(suffix, info.shape, _part_kind(targets[0], info, silence), (), silence.identities.get(targets[0]))
        )
    values, reason = _on_disk(silence.values, stored)
    # Quantised tensors cannot be aligned, so they get no roles.
    hint = HINTS.get(str(found.skeleton.model.config.model_type))
    hinted, sizes = hint.roles if hint is not None else {}, found.skeleton.sizes
    known = parts if packed else with_roles(parts, sizes, values, _in_memory(found, kind, first, names), hinted)
    refusal, groups = silence.reason or reason, groups_of(found.skeleton.text)
    return LayerKind(tuple(known), values, refusal, found.titles[kind], packed, groups)


def _in_memory(found: Derived, kind: int, first: int, names: Names) -> InMemory:
    """Return layer `first`, the lowest layer of this kind, as it is in memory."""
    held = found.skeleton.layers[first].state_dict(keep_vars=True)
    stem = f"{names.stem}{first}."
    return InMemory(
        targets=names.layers[first],
        shapes={name: tuple(value.shape) for name, value in held.items()},
        converted={
            suffix: names.converted[f"{stem}{suffix}"]
            for suffix in names.layers[first]
            if f"{stem}{suffix}" in names.converted
        },
        mixture=found.mixture[kind],
    )


def _part_kind(target: str, info: TensorInfo, silence: Silence) -> Any:
    """Return what the tensor `target` (its name in memory) is: `norm`, `bias`, `weight` (a matrix) or `other`."""
    if target in silence.identities:
        return "norm"
    if target.endswith("bias") or (target.removesuffix(".bias") + ".weight") in silence.identities:
        return "bias"
    return "weight" if len(info.shape) > 1 else "other"


def _on_disk(values: Mapping[str, float], stored: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, float], str]:
    """Return the values that silence a layer, by suffix on disk; or why they cannot be stored."""
    found: dict[str, float] = {}
    for suffix, targets in stored.items():
        silent = [target for target in targets if target in values]
        if silent and (len(silent) < len(targets) or len({values[target] for target in silent}) > 1):
            other = next((target for target in targets if target not in values), targets[0])
            return {}, f"{suffix} is stored in one tensor with {other}, which must not be silent"
        if silent:
            found[suffix] = values[silent[0]]
    # In the order in which modules run, whatever the order of tensors in the checkpoint.
    runs = {name: index for index, name in enumerate(values)}
    return dict(sorted(found.items(), key=lambda each: min(runs[name] for name in stored[each[0]]))), ""
