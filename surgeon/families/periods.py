"""Kinds of layers that repeat along the stack: their period, and where an output breaks it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from surgeon.families.family import per_layer_lists
from surgeon.families.kinds import holds_numbers

# Under these keys stands the config of a text decoder beside which there is more.
_TEXT = ("text", "language", "llm", "thinker", "decoder")


def period_of(pattern: Sequence[Hashable]) -> int | None:
    """After how many layers a stack repeats, given each layer's kind; None where it does not.

    At least two whole periods must be there; above the last whole one there may be a part of another.
    """
    if len(set(pattern)) == 1:
        return 1
    return next((p for p in range(2, len(pattern) // 2 + 1) if repeats(pattern, p)), None)


def repeats(pattern: Sequence[Hashable], period: int) -> bool:
    """Whether every layer is as the one `period` layers below it."""
    return pattern[period:] == pattern[:-period]


def broken_pattern(
    config: Mapping[str, Any],
    bases: Sequence[int | None],
    taken_from: tuple[Mapping[str, Any], int] | None = None,
) -> str | None:
    """A sentence where the base's layers repeat by the config, and those of an output no longer; None elsewhere.

    `config` is the output's, `bases` the base layer that each of its layers is, None for a new one. Where layers were
    taken out, `taken_from` is the base's config and how many layers it had.
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
        " layer's type from config.json, but an engine that takes the pattern as fixed (llama.cpp does, for Gemma 2 and"
        " 3) runs this output wrongly"
    )


def _entries(config: Mapping[str, Any], layers: int) -> list[Hashable]:
    """Of each of so many layers the config's own entries for it; nothing where the config has no list of them."""
    for part in _parts(config):
        # Twins beside the trunk follow it in the lists of a config.
        told = part.get("num_hidden_layers")
        counts = {layers, told if type(told) is int and told > layers else layers}
        lists = [
            values[:layers]
            for count in counts
            for key, values in sorted(per_layer_lists(part, count).items())
            if not holds_numbers(key, values, count)
        ]
        if lists:
            return [repr(entries) for entries in zip(*lists, strict=True)]
    return []


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for key, value in config.items():
        if isinstance(value, Mapping) and key.startswith(_TEXT):
            yield from _parts(value)
