"""What was measured of a base's layers before an operation took some of them out.

The blueprint is drawn from headers; what only weights and a text can say is handed to it as facts, which the manifest
keeps, so that `verify` draws the same blueprint without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# What is left of a base: of each layer that stays, bottom up, the factors of the base's layers that it is made of.
Stack = dict[int, dict[int, int]]


@dataclass(frozen=True)
class TextLoss:
    """Losses on a text, in nats a token over `tokens` predictions: of the base, and of what is left of it.

    `scores` are what layers (of `angular` blocks, of `laco` places where layers were merged) were chosen by, in order.
    """

    text: str
    sha256: str
    tokens: int
    before: float
    after: float
    scores: tuple[float, ...] = ()


@dataclass(frozen=True)
class MeasuredLayers:
    """The layers of the base that an operation takes out, as far as weights and text say.

    `layers` are those that were chosen (empty where the plan lists them); `merged` gives of each layer that takes
    others in what it becomes, by layer the factor; `silent` are all layers of the base that add exactly nothing.
    """

    layers: tuple[int, ...] = ()
    merged: Mapping[int, Mapping[int, int]] | None = None
    silent: frozenset[int] = frozenset()
    text: TextLoss | None = None


def runs_above(layers: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Runs of neighbours among `layers`, from the top down, each with the layer below it (-1: none)."""
    found: list[tuple[int, list[int]]] = []
    for layer in sorted(set(layers)):
        if found and layer == found[-1][1][-1] + 1:
            found[-1][1].append(layer)
        else:
            found.append((layer - 1, [layer]))
    return found[::-1]


def collapsed(stack: Stack, layer: int, merge: int) -> Stack:
    """LaCo's merge: `layer` takes the next `merge` layers of the stack in, θ_l + Σ (θ_{l+k} − θ_l)."""
    numbers = list(stack)
    place = numbers.index(layer)
    taken = numbers[place + 1 : place + 1 + merge]
    total: dict[int, int] = {of: (1 - merge) * factor for of, factor in stack[layer].items()}
    for other in taken:
        for of, factor in stack[other].items():
            total[of] = total.get(of, 0) + factor
    kept = {of: factor for of, factor in sorted(total.items()) if factor}
    return {number: kept if number == layer else made for number, made in stack.items() if number not in taken}
