"""New rows of embeddings and output heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.blueprint.recipes.copies import Copy, sliced
from surgeon.blueprint.recipes.joined import Joined, side_by_side
from surgeon.blueprint.recipes.recipe import Bench, Recipe, row_batches

if TYPE_CHECKING:
    from torch import Tensor

# The CPU computes float32 products with few rows in blocks of so many output columns (measured with MKL on AVX-512, one
# thread and two: results/head_width.md). The last V mod 4 logits are summed in another order; in a head with more rows
# these columns are inside a whole block.
HEAD_BLOCK = 4


@dataclass(frozen=True)
class Means(Recipe):
    """New rows, each the mean of the rows of `of` that its entry in `made_of` names (empty: of all rows).

    Sums are in float64 and rounded once. `first` is the row of the whole tensor at which the new rows begin.
    """

    of: Copy
    made_of: tuple[tuple[int, ...], ...]
    first: int

    @property
    def dtype(self) -> str:
        """Return the dtype of `of`."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return a shape with one row for each entry."""
        return (len(self.made_of), *self.of.shape[1:])

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """Return the tensor `of`."""
        return (self.of,)

    @property
    def reads(self) -> tuple[str, ...]:
        """Return nothing: embeddings may take gigabytes, so rows are read a few at a time."""
        return ()

    def compute(self, bench: Bench) -> Tensor:
        """Return all rows at once."""
        import torch

        return torch.cat([*self.compute_in_pieces(bench)])

    def compute_in_pieces(self, bench: Bench) -> Iterator[Tensor]:
        """Yield the new rows a few at a time; the mean of all rows is computed only where an entry is empty."""
        import torch

        every = None if all(self.made_of) else self._of_all(bench)
        for begin, end in row_batches(self):
            named = self.made_of[begin:end]
            numbers = {number for each in named for number in each}
            read = {number: bench.read_rows(self.of, number, number + 1)[1][0] for number in numbers}
            yield torch.stack(
                [every if every is not None and not each else _mean([read[n] for n in each]) for each in named]
            )

    def _of_all(self, bench: Bench) -> Tensor:
        """Return the mean of all rows."""
        import torch

        total = torch.zeros(self.of.shape[1:], dtype=torch.float64)
        for begin, end in row_batches(self.of):
            total += _summed(bench.read_rows(self.of, begin, end)[1])
        return (total / self.of.shape[0]).to(bench.dtype(self.dtype))


def extended(of: Copy, made_of: tuple[tuple[int, ...], ...], first: int | None = None) -> Joined:
    """Return `of` with more rows, each the mean of the rows of `of` that its entry names.

    The new rows begin at row `first` where `of` has spare rows there that belong to no token, which they replace.
    """
    rows = of.shape[0]
    more = Means(of, made_of, rows if first is None else first)
    stop = more.first + len(made_of)
    left = [sliced(of, stop, rows)] if stop < rows else []
    return side_by_side([of if more.first == rows else sliced(of, 0, more.first), more, *left], 0)


def _summed(rows: Tensor) -> Tensor:
    """Return the sum of a few rows in float64, on one thread: threads would wait longer than the sum takes."""
    from surgeon.common.devices import one_thread

    with one_thread():
        return rows.double().sum(0)


def _mean(rows: Sequence[Tensor]) -> Tensor:
    """Return the mean of rows, summed in float64 and rounded once to the rows' dtype."""
    import torch

    return torch.stack(list(rows)).double().mean(0).to(rows[0].dtype)
