"""Embeddings and output heads with more rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.blueprint.recipes.copies import Copy
from surgeon.blueprint.recipes.recipe import Bench, Recipe, Words
from surgeon.checkpoint.pieces import Pieces

if TYPE_CHECKING:
    from torch import Tensor

# Products in float32 with few rows on the CPU take so many output columns at once (measured with MKL on AVX-512, one
# thread and two: results/head_width.md): the last V mod 4 logits are summed in another order, and of a head with more
# rows these stand within a whole block.
HEAD_BLOCK = 4

# Bytes of embeddings in memory at once: their rows in float64 fit a core's cache.
_ROW_BYTES_AT_ONCE = 1 << 19


@dataclass(frozen=True)
class Extended(Recipe):
    """The tensor `of` with more rows below its own, each the mean of rows of `of`: those named, or of all of them.

    `made_of` says which, one entry for each new row; an empty one means all. The bytes of `of` come first.
    """

    of: Copy
    made_of: tuple[tuple[int, ...], ...]

    @property
    def dtype(self) -> str:
        """The dtype of what is extended."""
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape with the new rows."""
        return (self.of.shape[0] + len(self.made_of), *self.of.shape[1:])

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """What is extended."""
        return (self.of,)

    @property
    def reads(self) -> tuple[str, ...]:
        """Nothing whole: rows are read a few at a time."""
        return ()

    @property
    def pieces(self) -> Pieces:
        """The rows that were there."""
        return Pieces(self.nbytes, self.of.spans)

    @property
    def kept(self) -> Pieces:
        """The rows that were there."""
        return self.pieces

    def own_words(self) -> Words:
        """How many rows are new, and how many of them are of named rows; which, the vocabulary's own entry says."""
        return (("extended", self.of), ("rows", len(self.made_of)), ("named", sum(map(bool, self.made_of))))

    def compute(self, bench: Bench) -> Tensor:
        """All rows at once."""
        import torch

        dtype, width = bench.dtype(self.dtype), self.shape[1:]
        parts = (
            torch.frombuffer(each, dtype=dtype) if isinstance(each, memoryview) else each
            for each in self.compute_in_pieces(bench)
        )
        return torch.cat([part.reshape(-1, *width) for part in parts])

    def compute_in_pieces(self, bench: Bench) -> Iterator[memoryview | Tensor]:
        """The rows of the base as they are, then the new ones, in float64 and rounded once.

        Embeddings may take gigabytes, so they are never in memory as a whole.
        """
        import torch

        count = self.of.shape[0]
        total = torch.zeros(self.of.shape[1:], dtype=torch.float64)
        at_once = max(1, _ROW_BYTES_AT_ONCE * count // max(1, self.of.nbytes))
        for begin in range(0, count, at_once):
            raw, rows = bench.read_rows(self.of, begin, min(begin + at_once, count))
            total += _summed(rows)
            yield raw
        everything = (total / count).to(bench.dtype(self.dtype))
        for begin in range(0, len(self.made_of), at_once):
            named = self.made_of[begin : begin + at_once]
            numbers = {number for each in named for number in each}
            held = {number: bench.read_rows(self.of, number, number + 1)[1][0] for number in numbers}
            yield torch.stack([_mean([held[n] for n in each]) if each else everything for each in named])


def _summed(rows: Tensor) -> Tensor:
    """The sum of a few rows in float64; threads that wait for each other would take longer than the sum."""
    from surgeon.common.devices import one_thread

    with one_thread():
        return rows.double().sum(0)


def _mean(rows: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.stack(list(rows)).double().mean(0).to(rows[0].dtype)
