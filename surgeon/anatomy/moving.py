"""Trials of whether units of a layer may change places in all tensors that hold them without changing its output.

This proves a reading of tensors on a twin: with a wrong reading the layer computes something else. When units move in
only some of these tensors, the layer must compute something else too, or nothing is proven.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from surgeon.anatomy.silence import Run

if TYPE_CHECKING:
    from torch import Tensor

# As a share of the layer's largest output: rounding stays below the first, a different result is above the second.
SAME, OTHER = 1e-4, 1e-3


class Move(NamedTuple):
    """A tensor of the layer, or a view of one, and a new order of its entries along an axis."""

    value: Tensor
    axis: int
    order: Tensor


class Mover:
    """A layer whose units are moved temporarily; afterwards its tensors are unchanged."""

    def __init__(self, run: Run) -> None:
        self._run, self._before = run, run.output().clone()

    def holds(self, moves: Sequence[Move], parts: Iterable[Sequence[Move]], *, least: float = OTHER) -> bool:
        """Return whether all moves together change nothing, and each of `parts` by itself something.

        Changes are shares of the output's largest entry: nothing is less than `SAME`, something more than `least`.
        """
        return self._apart(moves) < SAME and all(self._apart(part) > least for part in parts)

    def _apart(self, moves: Sequence[Move]) -> float:
        """Move units, run the layer and move them back; return the output's change as a share of its largest entry.

        The share is NaN where the layer's outputs are NaN; then nothing holds.
        """
        kept = [move.value.clone() for move in moves]
        try:
            for value, axis, order in moves:
                value.copy_(value.index_select(axis, order))
            return float((self._run.output() - self._before).abs().max() / self._before.abs().max())
        finally:
            for move, value in zip(moves, kept, strict=True):
                move.value.copy_(value)
