"""Kinds of layers: layers of one kind differ only in their weights and their number.

Two layers are of one kind if their modules, shapes and settings are the same, and the config's entries for them. Kinds
that repeat along the stack have a period, which an output may break.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surgeon.anatomy.shared import shared_in, within
from surgeon.anatomy.skeleton import Skeleton

if TYPE_CHECKING:
    from torch import Tensor, nn


# Attributes that hold a layer's number: two layers of one kind differ in them.
_NUMBER = re.compile(r"(.*_)?(idx|index|layer_id|layer_number|block_id)")
_IGNORED = frozenset({"training", "gradient_checkpointing"})
# Set where a layer keeps its keys for later layers to share. Gemma 4 sets it for the last layer of each type even if no
# layer shares them (transformers 5.24); then it is ignored.
_KEEPS_KEYS = "store_full_length_kv"
_SETTINGS = frozenset({bool, int, float, str, type(None)})
Settings = tuple[tuple[str, Any], ...]
Signature = tuple[tuple[str, str, tuple[tuple[str, Any], ...], Settings], ...]


def signature(layer: nn.Module, shared: Sequence[str] = ()) -> Signature:
    """Return everything about a layer except its weights: each module's class, shapes and settings without numbers.

    For blocks that layers share, at the paths `shared`, only their presence and class are included.
    """
    return tuple(
        (
            name,
            type(module).__name__,
            tuple((key, None if held is None else tuple(held.shape)) for key, held in _stored(module)),
            _settings(module),
        )
        if not within(name, shared)
        else (name, type(module).__name__, (), ())
        for name, module in layer.named_modules()
        if name in shared or not within(name, shared)
    )


def _stored(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield a module's own parameters, and its buffers that checkpoints store, by name."""
    yield from module._parameters.items()
    for key, held in module._buffers.items():
        if key not in module._non_persistent_buffers_set:
            yield key, held


def _settings(module: nn.Module) -> Settings:
    """Return a module's own settings: public attributes of simple types, by name.

    Left out are ignored names, layer numbers and, in a model whose layers share no keys and values, `_KEEPS_KEYS`.
    """
    held = vars(module).items()
    alone = not getattr(getattr(module, "config", None), "num_kv_shared_layers", 0)
    # Types first: most of what a module holds is no setting.
    return tuple(
        (key, value)
        for key, value in held
        if type(value) in _SETTINGS and key[0] != "_" and key not in _IGNORED and not _NUMBER.fullmatch(key)
        if not (alone and key == _KEEPS_KEYS)
    )


def entries(skeleton: Skeleton) -> list[tuple[tuple[str, str], ...]]:
    """Return, for each layer, the config's own entries for it: one from every list that is as long as the stack."""
    count = len(skeleton.layers)
    lists = listed(skeleton.text.to_dict(), count)
    return [tuple((key, repr(values[index])) for key, values in lists.items()) for index in range(count)]


def listed(fields: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    """Return the lists of a config that hold one entry per layer, by key; lists of layer numbers are left out."""
    return {
        key: value
        for key, value in sorted(fields.items())
        if isinstance(value, list) and len(value) == count and count > 1 and not holds_numbers(key, value, count)
    }


def holds_numbers(key: str, value: list[Any], count: int) -> bool:
    """Return whether a list of the config names layers by their numbers (`moe_layers`, `full_attn_idxs`)."""
    return (
        re.search(r"(layers|layer_ids|idxs|indices|indexes|_ids)$", key) is not None
        and "token" not in key
        and all(type(each) is int and 0 <= each < count for each in value)
        and value == sorted(set(value))
    )


def described_kinds(skeleton: Skeleton) -> list[tuple[Signature, tuple[tuple[str, str], ...]]]:
    """Return, for each layer, a description that is equal for layers of one kind."""
    shared = shared_in(skeleton)
    return [(signature(layer, shared), own) for layer, own in zip(skeleton.layers, entries(skeleton), strict=True)]


def numbered(keys: list[Any]) -> list[int]:
    """Return kinds as numbers, from 0 in the order in which they first occur."""
    first: dict[Any, int] = {}
    return [first.setdefault(key, len(first)) for key in keys]


# Names of lists with one entry per layer (`layer_types`, `no_rope_layers`); other lists may have that length by chance.
_OF_LAYERS = re.compile(r"(^|_)layers?(_|$)")
# The keys of a text decoder's config in a model with further parts.
_TEXT = ("text", "language", "llm", "thinker", "decoder")


def period_of(pattern: Sequence[Hashable]) -> int | None:
    """Return the number of layers after which a stack repeats, given each layer's kind; None where it does not repeat.

    At least two whole periods are required; the stack may end with part of a period.
    """
    if len(set(pattern)) == 1:
        return 1
    return next((p for p in range(2, len(pattern) // 2 + 1) if repeats(pattern, p)), None)


def repeats(pattern: Sequence[Hashable], period: int) -> bool:
    """Return whether every layer is of the same kind as the layer `period` below it."""
    return pattern[period:] == pattern[:-period]


def broken_pattern(
    config: Mapping[str, Any],
    bases: Sequence[int | None],
    taken_from: tuple[Mapping[str, Any], int] | None = None,
) -> str | None:
    """Return a sentence where the base's layer types repeat in the config but the output's no longer do; else None.

    `config` is the output's. `bases` gives for each of its layers the base layer, None for a new one. Where layers were
    taken out, `taken_from` is the base's config and its number of layers.
    """
    after = _entries(config, len(bases))
    if taken_from is not None:
        before = _entries(*taken_from) if after else []
    else:
        before = [entry for entry, base in zip(after, bases, strict=True) if base is not None] if after else []
    period = period_of(before)
    if period is None or period == 1 or repeats(after, period):
        return None
    return (
        f"the base's types of layers repeat every {period} layers, the output's no longer: transformers reads each"
        " layer's type from config.json, but an engine that takes the pattern as fixed runs this output wrongly (for"
        " llama.cpp, `surgeon gguf` writes each layer's type)"
    )


def _entries(config: Mapping[str, Any], layers: int) -> list[Hashable]:
    """Return, for each of `layers` layers, the config's own entries for it; empty where it has no list of them."""
    for part in _parts(config):
        # Entries of expanded twins (branches) follow those of the trunk in a config's lists.
        told = part.get("num_hidden_layers")
        counts = {layers, told if type(told) is int and told > layers else layers}
        lists = [
            values[:layers] for count in counts for key, values in listed(part, count).items() if _OF_LAYERS.search(key)
        ]
        if lists:
            return [repr(entries) for entries in zip(*lists, strict=True)]
    return []


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a config, then the parts in it that describe the text model, at any depth."""
    yield config
    for key, value in config.items():
        if isinstance(value, Mapping) and key.startswith(_TEXT):
            yield from _parts(value)
