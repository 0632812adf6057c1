"""Names on disk and names in memory: matched by transformers' own renaming, on the meta device, without weights.

A checkpoint of a mixture of experts may hold one tensor per expert where the model has one for all, or use other words
in its names. transformers knows how each stored tensor becomes the model's. This module asks transformers, and converts
shapes as it does.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surgeon.anatomy.shared import shared_in, within
from surgeon.anatomy.skeleton import Skeleton
from surgeon.checkpoint.damages import ANOTHER, around
from surgeon.checkpoint.header import TensorInfo
from surgeon.common.library import LOAD_FAILURES, first_line, passed_over, quiet_transformers
from surgeon.errors import BadInput, printable


@dataclass(frozen=True)
class Names:
    """The names of a checkpoint's tensors: those of layer `i` are `{stem}{i}.{suffix}`.

    `layers[i]` maps a suffix on disk to the names in memory, below the layer, of the tensors made from it (none for a
    tensor that nothing reads). `outer` maps a full name on disk to the full name in memory, or to an empty text: for
    tensors outside the layers, and for blocks that layers share (shared.py), which have a name in one layer. `beyond`
    are layers above the stack that the text model does not run (for predicting several tokens), by number. `converted`
    lists the tensors of layers that change in more than name, by full name, with the conversions applied to them.
    """

    stem: str
    layers: tuple[dict[str, tuple[str, ...]], ...]
    outer: dict[str, str]
    beyond: dict[int, tuple[str, ...]]
    converted: dict[str, tuple[str, ...]]

    def with_parts(self, parts: Mapping[str, tuple[str, ...]]) -> Names:
        """Return these names where some tensors are stored as several: `parts` maps a tensor to their names on disk."""
        if not parts:
            return self

        def spread(stem: str, held: Mapping[str, Any]) -> dict[str, Any]:
            """Return `held` with each tensor that is stored as several parts replaced by these parts' names."""
            named = ((parts.get(stem + name, (stem + name,)), target) for name, target in held.items())
            return {name.removeprefix(stem): target for names, target in named for name in names}

        return replace(
            self,
            layers=tuple(spread(f"{self.stem}{index}.", held) for index, held in enumerate(self.layers)),
            outer=spread("", self.outer),
            beyond={
                index: tuple(spread(f"{self.stem}{index}.", dict.fromkeys(held))) for index, held in self.beyond.items()
            },
            converted=spread("", self.converted),
        )

    def with_unread(self, names: Iterable[str]) -> Names:
        """Return these names together with tensors that nothing reads, given by full names on disk."""
        layers, outer = [dict(held) for held in self.layers], dict(self.outer)
        for name in names:
            index, _, suffix = name.removeprefix(self.stem).partition(".")
            if name.startswith(self.stem) and index.isdecimal() and int(index) < len(layers):
                layers[int(index)][suffix] = ()
            else:
                outer[name] = ""
        return replace(self, layers=tuple(layers), outer=outer)


def match(skeleton: Skeleton, kinds: Sequence[int], tensors: Mapping[str, TensorInfo], quantizer: Any = None) -> Names:
    """Match a checkpoint's tensors with a model's; `kinds` holds the number of each layer's kind.

    For a quantised checkpoint, transformers' `quantizer` determines what quantised tensors and their scales become.
    Raises BadInput naming the first tensor that is missing, stored twice, without a place in a layer, or of another
    shape.
    """
    made = made_of(skeleton.model, tensors, quantizer)
    if twice := stored_twice(skeleton.model, made):
        first, second = twice
        raise BadInput(
            f"{printable(second)} ({tensors[second].file}): to transformers the same tensor as {printable(first)};"
            " keep one of them"
        )
    renamed = {name: each.names for name, each in made.items()}
    below = re.compile(rf"{re.escape(skeleton.stack)}\.(\d+)\.(.+)", re.DOTALL)
    places = {name: found for name, targets in renamed.items() if (found := below.fullmatch(targets[0]))}
    if not places:
        above, dot, own = skeleton.stack.rpartition(".")
        one = f"{own}.0.{next(iter(skeleton.layers[0].state_dict()))}"
        raise BadInput(f"no tensor belongs to a layer of `{skeleton.stack}`; {around(tensors, above + dot, one)}")
    stem = _stem({name: int(found[1]) for name, found in places.items()})
    count = len(kinds)
    layers: list[dict[str, tuple[str, ...]]] = [{} for _ in range(count)]
    outer: dict[str, str] = {}
    beyond: dict[int, list[str]] = {}
    inside = re.compile(rf"{re.escape(stem)}(0|[1-9]\d{{0,8}})\.(.+)", re.DOTALL)
    held, shared = skeleton.shapes, shared_in(skeleton)
    for name, targets in renamed.items():
        on_disk = inside.fullmatch(name)
        if on_disk is None:
            outer[name] = targets[0] if targets[0] in held else ""
            continue
        index, suffix = int(on_disk[1]), on_disk[2]
        if index >= count:
            beyond.setdefault(index, []).append(suffix)
            continue
        known = [found[2] for target in targets if target in held and (found := below.fullmatch(target))]
        if known and all(within(each, shared) for each in known):
            outer[name] = targets[0]
        else:
            layers[index][suffix] = tuple(known)
    _check_beyond(beyond, layers, stem, tensors)
    ignored = passed_over(skeleton.model)
    read = [
        {suffix: targets for suffix, targets in layer.items() if targets or not ignored(f"{stem}{index}.{suffix}")}
        for index, layer in enumerate(layers)
    ]
    _check_alike(read, kinds, stem, tensors)
    _check_loads(skeleton, kinds, stem, renamed, layers, outer, tensors, quantizer)
    return Names(
        stem=stem,
        layers=tuple(layers),
        outer=outer,
        beyond={index: tuple(found) for index, found in sorted(beyond.items())},
        converted={name: each.operations for name, each in made.items() if each.converted and name not in outer},
    )


@dataclass(frozen=True)
class Made:
    """The tensors in memory, by name, made from a tensor on disk; its values are unchanged unless `converted`.

    `operations` are the names of the transformers conversions applied to it.
    """

    names: tuple[str, ...]
    converted: bool
    operations: tuple[str, ...] = ()


def made_of(model: Any, names: Iterable[str], quantizer: Any = None) -> dict[str, Made]:
    """Return, for every name on disk, what transformers makes of that tensor when it loads `model`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    held = model.state_dict(keep_vars=True)
    prefix = model.base_model_prefix

    def asked(name: str) -> Made:
        """Return what transformers makes of the tensor `name` on disk."""
        name = under_base(model, name)
        target, pattern = rename_source_key(name, renamings, converters, prefix, held)
        if target not in held and name in held:
            target, pattern = rename_source_key(name, [], [], prefix, held)
        converter = of_pattern[pattern] if pattern is not None else None
        first, *others = converter.target_patterns if converter is not None else [""]
        targets = (target, *(target.replace(first, other) for other in others))
        operations = tuple(type(each).__name__ for each in converter.operations) if converter is not None else ()
        return Made(targets, converter is not None, operations)

    found: dict[str, Made] = dict.fromkeys(names, Made((), False))
    for group in _by_expert(found):
        known = {name: asked(name) for name in (group[0], group[-1])}
        # For thousands of experts only the first and the last are resolved. If both go to one place, those between do
        # too.
        together = known[group[0]] == known[group[-1]]
        found |= {name: known[group[0]] if together else known.get(name) or asked(name) for name in group}
    return found


def under_base(model: Any, name: str) -> str:
    """Return a name on disk with `model`'s own base prefix, where the config's head class uses another base prefix.

    Heads for question answering use another one: `transformer.layers.0…` in place of `model.layers.0…`.
    """
    own = model.base_model_prefix
    named = next(iter(getattr(model.config, "architectures", None) or ()), None)
    head = getattr(sys.modules[type(model).__module__], str(named), None)
    other = getattr(head, "base_model_prefix", own) or own
    return name if other == own or not name.startswith(f"{other}.") else f"{own}.{name.removeprefix(f'{other}.')}"


def stored_twice(model: Any, made: Mapping[str, Made]) -> tuple[str, str] | None:
    """Return two names on disk that transformers loads into one tensor, or None. It would silently keep the last one.

    transformers adds and drops the base model's prefix as needed, and knows the words of old checkpoints. `made` is the
    result of `made_of` for the names.
    """
    held, prefix = model.state_dict(keep_vars=True), f"{model.base_model_prefix}."

    def bare(name: str) -> str:
        """Return a name without the base model's prefix, also where the prefix is repeated."""
        while len(prefix) > 1 and name.startswith(prefix):
            name = name.removeprefix(prefix)
        return name

    named: dict[str, str] = {}
    placed: dict[str, str] = {}
    for name, each in made.items():
        other = named.setdefault(bare(name), name)
        # A converted tensor may be made from several tensors on disk.
        if other == name and not each.converted and each.names[0] in held:
            other = placed.setdefault(bare(each.names[0]), name)
        if other != name:
            return other, name
    for name, each in made.items():
        for place in map(bare, each.names if each.converted else ()):
            if place in placed:
                return placed[place], name
    return None


_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def _by_expert(names: Iterable[str]) -> Iterable[list[str]]:
    """Return the names in groups that differ only in an expert's number; every other name is a group by itself."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_EXPERT.sub("*", name, count=1), []).append(name)
    return groups.values()


def stored_name(model: Any, place: str, *, as_in_memory: bool) -> str:
    """Return a name that a checkpoint may use for the tensor at `place` in a model.

    With `as_in_memory` the model's own name is preferred. Raises BadInput where transformers would not find the tensor
    under any such name.
    """
    saved = saved_names(model, place, model.state_dict()[place].shape)
    tried = [place, *saved] if as_in_memory else [*saved, place]
    found: str | None = next((n for n in tried if made_of(model, [n])[n] == Made((place,), False)), None)
    if found is None:
        raise BadInput(f"{printable(place)}: transformers has no name on disk for this tensor; leave the operation out")
    return found


def saved_names(model: Any, place: str, shape: Sequence[int] = ()) -> list[str]:
    """Return the names under which transformers saves the tensor at `place` in a model."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    return list(revert_weight_conversion(model, {place: torch.empty(tuple(shape), device="meta")}))


def as_loaded(model: Any, tensors: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return what transformers makes of `tensors` (by names on disk), by names in `model`, which stays unchanged.

    `names` are the tensors to return; request a tied tensor by its partner's name.
    """
    import torch
    from torch import nn

    owners = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names}
    before = {name: owner._parameters[key] for name, (owner, key) in owners.items()}
    # Load in the widest stored dtype; the caller decides in which dtype the model computes.
    kind = functools.reduce(torch.promote_types, (value.dtype for value in tensors.values()))
    for name, (owner, key) in owners.items():
        empty = before[name]
        assert empty is not None, name
        owner._parameters[key] = nn.Parameter(torch.empty(empty.shape, dtype=kind, device="meta"), requires_grad=False)
    try:
        _load(model, tensors, "cpu", kind)
        return {name: owner._parameters[key].data for name, (owner, key) in owners.items()}
    finally:
        for name, (owner, key) in owners.items():
            owner._parameters[key] = before[name]


def _load(model: Any, tensors: Mapping[str, Any], device: str, dtype: Any, quantizer: Any = None) -> Any:
    """Have transformers load `tensors` (by names on disk) into `model`, and return its report."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    mapping = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    options = LoadStateDictConfig(device_map={"": device}, dtype=dtype, hf_quantizer=quantizer, weight_mapping=mapping)
    with quiet_transformers():
        return convert_and_load_state_dict_in_model(model, dict(tensors), options, None)[0]


def _base(model: Any) -> str:
    """Return the prefix of the base model's tensor names in memory."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


def _stem(places: Mapping[str, int]) -> str:
    """Return the text before a layer's number in names on disk.

    Raises BadInput where it is not the same in all names.
    """
    found: dict[str, str] = {}
    for name, index in places.items():
        parts = name.split(".")
        if str(index) not in parts:
            raise BadInput(
                f"{printable(name)}: transformers reads it as a tensor of layer {index}, whose number is not in the"
                " name; surgeon cannot renumber such layers"
            )
        stem = "".join(f"{part}." for part in parts[: parts.index(str(index))])
        found.setdefault(stem, name)
    if len(found) > 1:
        first, second, *_ = found.values()
        raise BadInput(f"layers are named both as {printable(first)} and as {printable(second)}; keep one set of them")
    return next(iter(found))


def _check_beyond(
    beyond: Mapping[int, list[str]], layers: Sequence[Mapping[str, Any]], stem: str, tensors: Mapping[str, TensorInfo]
) -> None:
    """Raise BadInput unless layers above the stack follow without a gap and hold other tensors than the last layer."""
    count, numbers = len(layers), sorted(beyond)
    same = (index for index in numbers if {*beyond[index]} == layers[-1].keys())
    apart = (index for nth, index in enumerate(numbers) if index != count + nth)
    if (index := next(same, next(apart, None))) is not None:
        name = f"{stem}{index}.{beyond[index][0]}"
        raise BadInput(
            f"{printable(name)} ({tensors[name].file}): the config has `num_hidden_layers` {count}, so there is no"
            f" layer {index}; {ANOTHER}"
        )


def _check_alike(
    layers: Sequence[Mapping[str, Any]],
    kinds: Sequence[int],
    stem: str,
    tensors: Mapping[str, TensorInfo],
) -> None:
    """Raise BadInput unless layers of one kind hold the same tensors in the same shapes."""
    first: dict[int, int] = {}
    for index, kind in enumerate(kinds):
        like = first.setdefault(kind, index)
        if extra := min(layers[like].keys() ^ layers[index].keys(), default=None):
            if not layers[index]:
                lacking = printable(f"{stem}{index}.{extra}")
                raise BadInput(f"{lacking}: the config requires this tensor, no shard has it; {ANOTHER}")
            has, lacks = (index, like) if extra in layers[index] else (like, index)
            raise BadInput(
                f"{printable(f'{stem}{has}.{extra}')}: layer {lacks}, which is of the same kind, has no such tensor;"
                f" was it lost in a download or a merge? {ANOTHER}"
            )
        for suffix in layers[index]:
            here, there = tensors[f"{stem}{index}.{suffix}"], tensors[f"{stem}{like}.{suffix}"]
            if here.shape != there.shape:
                raise BadInput(
                    f"{printable(here.name)} ({here.file}): shape {list(here.shape)}, layer {like}'s has"
                    f" {list(there.shape)}; {ANOTHER}"
                )


# Prefixes of decoder heads that do not return logits over the vocabulary.
_OTHER_HEADS = ("score.", "classifier.", "qa_outputs.")


def words_of(model: Any) -> tuple[str, ...]:
    """Return the prefixes of the names of the output head's tensors."""
    head = model.get_output_embeddings()
    return tuple(f"{name}." for name, module in model.named_modules() if head is not None and module is head)


def _check_loads(
    skeleton: Skeleton,
    kinds: Sequence[int],
    stem: str,
    renamed: Mapping[str, tuple[str, ...]],
    layers: Sequence[Mapping[str, tuple[str, ...]]],
    outer: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
    quantizer: Any,
) -> None:
    """Have transformers load, as shapes without values, the tensors outside the layers and one layer of each kind.

    Raises BadInput naming the first tensor that is missing, of another shape, or without a place in its layer.
    """
    model = skeleton.model
    firsts = sorted({kinds.index(kind) for kind in set(kinds)})
    names = [*outer, *(f"{stem}{index}.{suffix}" for index in firsts for suffix in layers[index])]
    loaded = _loaded(model, {under_base(model, name): tensors[name] for name in names}, quantizer)
    vocabulary = model.config.get_text_config().vocab_size
    for target, *_ in sorted(loaded.mismatched_keys):
        name = next(name for name, targets in renamed.items() if target in targets)
        found, required = tensors[name].shape, skeleton.shapes[target]
        padded = name in outer and required == (vocabulary, *found[1:])
        raise BadInput(
            f"{printable(name)} ({tensors[name].file}): shape {list(found)}, the config requires {list(required)}; "
            + (f"write `vocab_size` {found[0]}, if embeddings and head are padded to it both" if padded else ANOTHER)
        )
    for target, reason in sorted(loaded.conversion_errors.items()):
        raise BadInput(
            f"{printable(target)}: transformers cannot make it of the tensors stored ({printable(str(reason))});"
            f" {ANOTHER}"
        )
    _check_all_there(skeleton, firsts, loaded.missing_keys, tensors)
    ignored = passed_over(model)
    for index in firsts:
        for suffix, targets in layers[index].items():
            name = f"{stem}{index}.{suffix}"
            if not targets and not ignored(name):
                known = [each for each, made in layers[index].items() if made]
                expected = dict.fromkeys(_EXPERT.sub("…", each, count=1) for each in known)
                raise BadInput(
                    f"{printable(name)} ({tensors[name].file}): a layer of this architecture and config has no such"
                    f" tensor; expected {printable(', '.join(expected))}: {ANOTHER}"
                )


def _loaded(model: Any, infos: Mapping[str, TensorInfo], quantizer: Any) -> Any:
    """Return transformers' report on loading tensors of these shapes, given by the names that `model` has for them.

    Raises BadInput where transformers cannot load them.
    """
    import torch

    quantised = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I8": torch.int8}
    given = {
        name: torch.empty(info.shape, dtype=quantised.get(info.dtype), device="meta") for name, info in infos.items()
    }
    try:
        return _load(model, given, "meta", torch.float32, quantizer)
    except LOAD_FAILURES as error:
        raise BadInput(f"transformers cannot load these tensors ({first_line(error)}); {ANOTHER}") from error


def _check_all_there(
    skeleton: Skeleton, firsts: Sequence[int], missing: Collection[str], tensors: Mapping[str, TensorInfo]
) -> None:
    """Raise BadInput for a tensor outside the layers, or of the layers `firsts`, that no shard contains."""
    model = skeleton.model
    ours = tuple(f"{skeleton.stack}.{index}." for index in firsts)
    others = f"{skeleton.stack}."
    tied = set(model.all_tied_weights_keys)
    base, words = _base(model), words_of(model)
    # Saved without a head, or with one that returns no logits over the vocabulary.
    without_words = not any(name.startswith(base) for name in tensors)
    without_words |= any(name.startswith(_OTHER_HEADS) for name in tensors)
    for target in sorted(set(missing) - tied):
        # An encoder may lack its head, and only a head reads the pooler.
        if skeleton.encoder and (not target.startswith(base) or "pooler." in target):
            continue
        if without_words and target.startswith(words):
            continue
        if target.startswith(words) and model.config.get_text_config().tie_word_embeddings is False:
            raise BadInput(
                f"{printable(target)}: embeddings are not tied (`tie_word_embeddings`), yet no shard has this tensor;"
                " set it to true if the model shares them"
            )
        if not target.startswith(others) or target.startswith(ours):
            raise BadInput(f"{printable(target)}: the config requires this tensor, no shard has it; {ANOTHER}")
