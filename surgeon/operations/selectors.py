"""Layer selectors: which layers, or which gaps between layers, an operation acts on.

Layers are counted from 0. A *gap* is named by the layer below it: the gap after layer 3 lies between layers 3 and 4.
The named positions of gaps are those of OpT-DeUS §7.1 (there counted from 1); the same names on layers mean the halves
and quarters of the stack itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from surgeon.anatomy.kinds import period_of
from surgeon.common.formatting import show
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Spec

Position = Literal["all", "top_half", "bottom_half", "middle", "top_and_bottom"]
Index = Annotated[int, Field(ge=0, description="layer number, counted from 0")]


class Every(Spec):
    """Layers N-1, 2N-1, …: the last of every group of N."""

    every: Annotated[int, Field(ge=1, description="group size")]


class After(Spec):
    """The gaps after these layers."""

    after: Annotated[list[Index], Field(min_length=1, description="the layers below the gaps")]


class Range(Spec):
    """Layers first to last, both included."""

    range: Annotated[list[Index], Field(min_length=2, max_length=2, description="[first, last], both included")]


class EveryPeriod(Spec):
    """After every N-th period of a stack whose kinds of layers repeat: a whole new period is inserted."""

    every_period: Annotated[int, Field(ge=1, description="periods in a group; 1: a new one after each")]


class Least(Spec):
    """After each of the N layers that matter least on a text (ADEPT)."""

    least: Annotated[int, Field(ge=1, description="how many layers")]
    text: Annotated[
        str, Field(description="text to measure on, seen from the plan: .jsonl with a text a line, or plain")
    ]
    by: Annotated[
        Literal["loss", "influence"],
        Field(description="loss: what the loss grows by without the layer; influence: how much it turns the stream"),
    ] = "loss"
    window: Annotated[int, Field(ge=2, le=2**20, description="tokens that are read at once")] = 128
    windows: Annotated[int, Field(ge=1, le=2**20, description="how many windows of the text are read")] = 16


GapSelector = Position | Every | After | Range
# The forms of gaps in a plan file: a plain list names the layers below them, like `after`.
WrittenGaps = Annotated[
    GapSelector | EveryPeriod | Least,
    BeforeValidator(
        lambda value: {"after": value} if isinstance(value, list) else value,
        json_schema_input_type=GapSelector | EveryPeriod | Least | Annotated[list[Index], Field(min_length=1)],
    ),
]
LayerSelector = Position | Every | Range | Annotated[list[Index], Field(min_length=1)]


def select_gaps(selector: GapSelector, layers: int) -> list[int]:
    """Return the gaps of a stack of `layers` layers that the selector matches, ascending.

    Raises BadInput where it matches nothing or names a layer that does not exist.
    """
    match selector:
        case str():
            found = _named_gaps(selector, layers)
        case Every(every=size):
            found = list(range(size - 1, layers, size))
        case After(after=listed):
            found = _checked(listed, layers)
        case Range(range=[first, last]):
            found = _interval(first, last, layers)
    return _not_empty(found, selector, layers)


def select_layers(selector: LayerSelector, layers: int) -> list[int]:
    """Return the layers of a stack of `layers` layers that the selector matches; errors as in `select_gaps`."""
    match selector:
        case str():
            found = _named_layers(selector, layers)
        case Every(every=size):
            found = list(range(size - 1, layers, size))
        case Range(range=[first, last]):
            found = _interval(first, last, layers)
        case list():
            found = _checked(selector, layers)
    return _not_empty(found, selector, layers)


def select_periods(selector: EveryPeriod, pattern: Sequence[tuple[int, str]]) -> tuple[int, list[int]]:
    """Return (period, gaps): the number of layers in a period, and the gaps above the matched periods, ascending.

    `pattern` is each layer's kind, by number and title. Raises BadInput where kinds do not repeat, or nothing matches.
    """
    period = period_of(pattern)
    if period is None:
        runs = [(title or f"kind {kind}", len(list(run))) for (kind, title), run in groupby(pattern)]
        found = ", ".join(f"{count} of {title}" for title, count in runs[:8]) + (", …" if len(runs) > 8 else "")
        raise BadInput(
            f"`every_period` needs kinds of layers that repeat; here they do not: {printable(found, 300)}; name gaps"
            " with `every` or `after`"
        )
    group = period * selector.every_period
    return period, _not_empty(list(range(group - 1, len(pattern), group)), selector, len(pattern))


def spread(gaps: list[int], count: int) -> list[int]:
    """Return `count` of `gaps`, evenly spread, always with the topmost. Raises BadInput where there are fewer gaps."""
    if count > len(gaps):
        raise BadInput(
            f"`count` {count} is more than the {len(gaps)} gaps `where` matches ({show(gaps)}); lower it, widen"
            " `where`, or insert several per gap with `per_gap`"
        )
    return [gaps[(k + 1) * len(gaps) // count - 1] for k in range(count)]


def _named_gaps(name: Position, n: int) -> list[int]:
    """Return the gaps at a named position in a stack of `n` layers."""
    # OpT-DeUS §7.1 with i counted from 1; gap g here is i = g + 1, and i < n leaves out the gap above the top.
    match name:
        case "all":
            return list(range(n - 1))
        case "bottom_half":
            return [i - 1 for i in range(1, n + 1) if 2 * i <= n]
        case "middle":
            return [i - 1 for i in range(1, n + 1) if n < 4 * i <= 3 * n]
        case "top_half":
            return [i - 1 for i in range(1, n) if 2 * i >= n]
        case "top_and_bottom":
            return [i - 1 for i in range(1, n) if 4 * i <= n or 4 * i >= 3 * n]


def _named_layers(name: Position, n: int) -> list[int]:
    """Return the layers at a named position in a stack of `n` layers: halves, or quarters rounded down."""
    quarter, half = n // 4, n // 2
    match name:
        case "all":
            return list(range(n))
        case "bottom_half":
            return list(range(half))
        case "middle":
            return list(range(quarter, n - quarter))
        case "top_half":
            return list(range(n - half, n))
        case "top_and_bottom":
            return [*range(quarter), *range(n - quarter, n)]


def _interval(first: int, last: int, layers: int) -> list[int]:
    """Return layers `first` to `last`, both included. Raises BadInput where they run backwards or do not exist."""
    if first > last:
        raise BadInput(f"`range: [{first}, {last}]` runs backwards; write [first, last]")
    return _checked(list(range(first, min(last, layers) + 1)), layers)


def _checked(listed: list[int], layers: int) -> list[int]:
    """Return the listed layers, ascending. Raises BadInput for a layer that does not exist or is listed twice."""
    for index in listed:
        if index >= layers:
            raise BadInput(f"there is no layer {index}: the model has layers 0 to {layers - 1} at this point")
    if len(set(listed)) != len(listed):
        twice = next(i for i in listed if listed.count(i) > 1)
        raise BadInput(f"layer {twice} is listed twice")
    return sorted(listed)


def _not_empty(found: list[int], selector: object, layers: int) -> list[int]:
    """Return what a selector matched. Raises BadInput where it matched nothing."""
    if not found:
        shown = selector.model_dump() if isinstance(selector, BaseModel) else selector
        raise BadInput(f"`{shown}` matches nothing in a model of {layers} layers")
    return found
