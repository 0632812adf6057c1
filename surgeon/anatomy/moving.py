"""Whether units of a layer may change places: moved in all tensors that hold them, the layer computes what it did.

So a reading of tensors is proven on a twin: with a wrong one the layer computes something else. Moved in some of these
tensors alone, it must do so too, or nothing is proven.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from surgeon.anatomy.silence import Run

if TYPE_CHECKING:
    from torch import Tensor

# Of the layer's largest output: rounding stays below the one, what is computed otherwise is above the other.
SAME, OTHER = 1e-4, 1e-3


class Move(NamedTuple):
    """A tensor of the layer, or a view of one, and the order that its numbers get along an axis."""

    value: Tensor
    axis: int
    order: Tensor


class Mover:
    """A layer whose units are moved for a while; afterwards its tensors are as they were."""

    def __init__(self, run: Run) -> None:
        self._run, self._before = run, run.output().clone()

    def holds(self, moves: Sequence[Move], parts: Iterable[Sequence[Move]], *, least: float = OTHER) -> bool:
        """Whether all these moves together change nothing, and each of `parts` of them by itself at `least` so much."""
        return self._apart(moves) < SAME and all(self._apart(part) > least for part in parts)

    def _apart(self, moves: Sequence[Move]) -> float:
        """By how much of its largest number the output changes; not a number where the layer's numbers are none."""
        kept = [move.value.clone() for move in moves]
        try:
            for value, axis, order in moves:
                value.copy_(value.index_select(axis, order))
            return float((self._run.output() - self._before).abs().max() / self._before.abs().max())
        finally:
            for move, value in zip(moves, kept, strict=True):
                move.value.copy_(value)
