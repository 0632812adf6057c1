"""A request for layers to take out of a base, and the stack that is left when some are merged.

No weight is read here: `depth.py` runs the base, and the blueprint is made from its results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# A stack left of a base: for each layer that stays, bottom up, the base layers that it is made of with their factors.
Stack = dict[int, dict[int, int]]
By = Literal["block_influence", "angular", "loss", "laco"]


@dataclass(frozen=True)
class LayersOut:
    """The layers to take out: those listed, or `count` layers chosen `by` a measure on a text.

    `candidates` is the number of layers tried at each step of `loss`. `merge`, `threshold` and `interval` are LaCo's K,
    T and I; `range` is the lowest and highest layer that take part in merges (None: all).
    """

    layers: tuple[int, ...]
    count: int
    by: By
    candidates: int
    merge: int
    threshold: float
    interval: int
    range: tuple[int, int] | None = None


def collapsed(stack: Stack, layer: int, merge: int) -> Stack:
    """Return the stack after LaCo's merge: `layer` absorbs the next `merge` layers, θ_l + Σ (θ_{l+k} − θ_l)."""
    numbers = list(stack)
    place = numbers.index(layer)
    taken = numbers[place + 1 : place + 1 + merge]
    total: dict[int, int] = {of: (1 - merge) * factor for of, factor in stack[layer].items()}
    for other in taken:
        for of, factor in stack[other].items():
            total[of] = total.get(of, 0) + factor
    kept = {of: factor for of, factor in sorted(total.items()) if factor}
    return {number: kept if number == layer else made for number, made in stack.items() if number not in taken}
