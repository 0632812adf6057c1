"""Names on disk and names in memory: matched by transformers' own renaming, on the meta device, without weights.

A checkpoint of a mixture of experts may hold a tensor for each expert where the model has one for all, or other words
in its names. transformers knows how each becomes the model's; here it is asked, and shapes are converted as it does.
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
    """How a checkpoint's tensors are called: layer `i`'s as `{stem}{i}.{suffix}`.

    `layers[i]` maps a suffix on disk to the names in memory, below the layer, of what it becomes (none for a tensor
    that nothing reads); `outer` maps a whole name on disk to the whole name in memory, or to nothing: what stands
    beside the layers, and blocks that layers share (shared.py), by their name in a layer. `beyond` are layers above the
    stack that the text model does not run (for predicting several tokens), by their number.
    `converted` has the tensors of layers that become others in more than name, by whole name, and what is done to them.
    """

    stem: str
    layers: tuple[dict[str, tuple[str, ...]], ...]
    outer: dict[str, str]
    beyond: dict[int, tuple[str, ...]]
    converted: dict[str, tuple[str, ...]]

    def with_parts(self, parts: Mapping[str, tuple[str, ...]]) -> Names:
        """The same where some tensors are stored as several, whose whole names on disk `parts` has by the tensor's."""
        if not parts:
            return self

        def spread(stem: str, held: Mapping[str, Any]) -> dict[str, Any]:
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
        """The same with tensors that nothing reads, by whole names on disk."""
        layers, outer = [dict(held) for held in self.layers], dict(self.outer)
        for name in names:
            index, _, suffix = name.removeprefix(self.stem).partition(".")
            if name.startswith(self.stem) and index.isdecimal() and int(index) < len(layers):
                layers[int(index)][suffix] = ()
            else:
                outer[name] = ""
        return replace(self, layers=tuple(layers), outer=outer)


def match(skeleton: Skeleton, kinds: Sequence[int], tensors: Mapping[str, TensorInfo], quantizer: Any = None) -> Names:
    """Match a checkpoint's tensors with a model's; `kinds` are numbers of the layers' kinds.

    Of a quantised checkpoint, transformers' `quantizer` says what it makes of quantised tensors and their scales.
    Raises BadInput naming the first tensor that is missing, there twice, without a place in a layer, or of another
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
    held, shared = skeleton.model.state_dict(keep_vars=True), shared_in(skeleton)
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
        if shared is not None and known and all(within(each, shared.paths) for each in known):
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
    """What transformers makes of a tensor on disk: tensors in memory, by name; as it is, unless `converted`.

    `operations` are the names of transformers' conversions that it goes through.
    """

    names: tuple[str, ...]
    converted: bool
    operations: tuple[str, ...] = ()


def made_of(model: Any, names: Iterable[str], quantizer: Any = None) -> dict[str, Made]:
    """Every name on disk with what transformers makes of that tensor when it loads `model`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    held = model.state_dict(keep_vars=True)
    prefix = model.base_model_prefix

    def asked(name: str) -> Made:
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
        # Of thousands of experts the first and the last are asked; where they go to one place, those between do too.
        together = known[group[0]] == known[group[-1]]
        found |= {name: known[group[0]] if together else known.get(name) or asked(name) for name in group}
    return found


def under_base(model: Any, name: str) -> str:
    """A name on disk as `model` would have it, where the head that its config names calls the base model otherwise.

    Heads for answers do: `transformer.layers.0…` in place of `model.layers.0…`.
    """
    own = model.base_model_prefix
    named = next(iter(getattr(model.config, "architectures", None) or ()), None)
    head = getattr(sys.modules[type(model).__module__], str(named), None)
    other = getattr(head, "base_model_prefix", own) or own
    return name if other == own or not name.startswith(f"{other}.") else f"{own}.{name.removeprefix(f'{other}.')}"


def stored_twice(model: Any, made: Mapping[str, Made]) -> tuple[str, str] | None:
    """Two names on disk that transformers takes for one tensor: it loads whichever comes last, and says nothing.

    It adds and drops the base model's prefix as it needs, and knows words of old checkpoints. `made` is as `made_of`
    says of the names.
    """
    held, prefix = model.state_dict(keep_vars=True), f"{model.base_model_prefix}."

    def bare(name: str) -> str:
        while len(prefix) > 1 and name.startswith(prefix):
            name = name.removeprefix(prefix)
        return name

    named: dict[str, str] = {}
    placed: dict[str, str] = {}
    for name, each in made.items():
        other = named.setdefault(bare(name), name)
        # What is converted may be made of several tensors.
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
    """Names in groups that differ in an expert's number alone; every other name by itself."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_EXPERT.sub("*", name, count=1), []).append(name)
    return groups.values()


def stored_name(model: Any, place: str, *, as_in_memory: bool) -> str:
    """What a checkpoint may call a tensor that stands at `place` in a model; `as_in_memory`: as the model does.

    Raises BadInput where transformers would not find it there.
    """
    saved = saved_names(model, place, model.state_dict()[place].shape)
    tried = [place, *saved] if as_in_memory else [*saved, place]
    found: str | None = next((n for n in tried if made_of(model, [n])[n] == Made((place,), False)), None)
    if found is None:
        raise BadInput(f"{printable(place)}: transformers has no name on disk for this tensor; leave the operation out")
    return found


def saved_names(model: Any, place: str, shape: Sequence[int] = ()) -> list[str]:
    """What transformers calls a tensor that stands at `place` in a model where it saves it."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    return list(revert_weight_conversion(model, {place: torch.empty(tuple(shape), device="meta")}))


def as_loaded(model: Any, tensors: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What transformers makes of `tensors` (by their names on disk), by names in `model`, which stays as it is.

    `names` are those asked for; a tied one comes by its partner's name.
    """
    import torch
    from torch import nn
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    owners = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names}
    before = {name: owner._parameters[key] for name, (owner, key) in owners.items()}
    # In the widest dtype that is stored: what the model computes in is for the caller to say.
    kind = functools.reduce(torch.promote_types, (value.dtype for value in tensors.values()))
    for name, (owner, key) in owners.items():
        empty = before[name]
        assert empty is not None, name
        owner._parameters[key] = nn.Parameter(torch.empty(empty.shape, dtype=kind, device="meta"), requires_grad=False)
    mapping = get_model_conversion_mapping(model)
    try:
        with quiet_transformers():
            options = LoadStateDictConfig(device_map={"": "cpu"}, dtype=kind, weight_mapping=mapping)
            convert_and_load_state_dict_in_model(model, dict(tensors), options, None)
        return {name: owner._parameters[key].data for name, (owner, key) in owners.items()}
    finally:
        for name, (owner, key) in owners.items():
            owner._parameters[key] = before[name]


def _base(model: Any) -> str:
    """What the names of the base model's tensors begin with in memory."""
    return "" if model.base_model is model else f"{model.base_model_prefix}."


def _stem(places: Mapping[str, int]) -> str:
    """What stands before a layer's number in names on disk. Raises BadInput where that is not one text."""
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
    """Layers above the stack must follow it without a gap, and hold more than the stack's do."""
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
    """Layers of one kind must hold the same tensors, each its own."""
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


# Heads of decoders that return no words.
_OTHER_HEADS = ("score.", "classifier.", "qa_outputs.")


def words_of(model: Any) -> tuple[str, ...]:
    """What the names of the output head's tensors begin with."""
    head = model.get_output_embeddings()
    return tuple(f"{name}." for name, module in model.named_modules() if head is not None and module is head)


def _has_no_words(model: Any, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a decoder was saved alone, or with a head that returns no words."""
    base = _base(model)
    return not any(name.startswith(base) for name in tensors) or any(name.startswith(_OTHER_HEADS) for name in tensors)


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
    """Have transformers load the tensors outside layers and one layer of each kind, as shapes without values.

    Raises BadInput naming the first tensor that is missing, of another shape, or has no place in its layer.
    """
    model = skeleton.model
    firsts = sorted({kinds.index(kind) for kind in set(kinds)})
    names = [*outer, *(f"{stem}{index}.{suffix}" for index in firsts for suffix in layers[index])]
    loaded = _loaded(model, {under_base(model, name): tensors[name] for name in names}, quantizer)
    vocabulary = model.config.get_text_config().vocab_size
    for target, *_ in sorted(loaded.mismatched_keys):
        name = next(name for name, targets in renamed.items() if target in targets)
        found, required = tensors[name].shape, tuple(model.state_dict(keep_vars=True)[target].shape)
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
    """What transformers says of loading tensors of these shapes, by the names that they have for `model`.

    Raises BadInput where it cannot load them.
    """
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    quantised = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I8": torch.int8}
    given = {
        name: torch.empty(info.shape, dtype=quantised.get(info.dtype), device="meta") for name, info in infos.items()
    }
    options = LoadStateDictConfig(
        device_map={"": "meta"},
        dtype=torch.float32,
        hf_quantizer=quantizer,
        weight_mapping=get_model_conversion_mapping(model, hf_quantizer=quantizer),
    )
    try:
        with quiet_transformers():
            return convert_and_load_state_dict_in_model(model, given, options, None)[0]
    except LOAD_FAILURES as error:
        raise BadInput(f"transformers cannot load these tensors ({first_line(error)}); {ANOTHER}") from error


def _check_all_there(
    skeleton: Skeleton, firsts: Sequence[int], missing: Collection[str], tensors: Mapping[str, TensorInfo]
) -> None:
    """Raise BadInput for a tensor outside the layers, or of the layers `firsts`, that no shard has."""
    model = skeleton.model
    ours = tuple(f"{skeleton.stack}.{index}." for index in firsts)
    others = f"{skeleton.stack}."
    tied = set(model.all_tied_weights_keys)
    base, words = _base(model), words_of(model)
    without_words = _has_no_words(model, tensors)
    for target in sorted(set(missing) - tied):
        # Heads come and go on encoders, and nothing reads a pooler but they.
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
