"""Matrices in the formats of compressed-tensors, whole numbers of few bits in words among them, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.blueprint.recipes.copies import Copy
from surgeon.blueprint.recipes.recipe import Bench, Recipe, Words
from surgeon.families.compressed import Code

if TYPE_CHECKING:
    from torch import Tensor

_WORD = 32
# Numbers unpacked at a time: eight bytes each while they are.
_AT_ONCE = 1 << 21


@dataclass(frozen=True)
class Unpacked(Recipe):
    """(q − z) · s: `weight` holds q as `code` says, `zeros` z (none: 0) and `scales` s, one for each block of q.

    `order` (I32) is the block of each column, else columns stand block after block; `sizes` must say the shape.
    Products are rounded to the dtype of the scales, as compressed-tensors does, and then to `dtype`.
    """

    weight: Copy
    scales: Copy
    zeros: Copy | None
    order: Copy | None
    sizes: Copy | None
    code: Code
    dtype: str
    shape: tuple[int, int]

    @property
    def inputs(self) -> tuple[Recipe, ...]:
        """All of it, as it is stored."""
        return tuple(
            each for each in (self.weight, self.scales, self.zeros, self.order, self.sizes) if each is not None
        )

    def own_words(self) -> Words:
        """What is unpacked and multiplied."""
        return (("dequantised", self.inputs),)

    def compute(self, bench: Bench) -> Tensor:
        """Unpack some rows at a time. Raises ValueError for sizes and groups of columns that are not the matrix's."""
        import torch

        rows, columns = self.shape
        if self.sizes is not None and (told := bench.read(self.sizes).tolist()) != [rows, columns]:
            raise ValueError(
                f"stored as {rows} rows of {columns}, yet its weight_shape says {told}; get the model again"
            )
        height, width = self.code.block
        grid = (-(-rows // height), -(-columns // width))
        weight = bench.read(self.weight)
        scales = bench.read(self.scales).reshape(grid)
        zeros = self._zeros(bench, scales)
        places = self._places(bench, grid[1])
        made = torch.empty(self.shape, dtype=bench.dtype(self.dtype))
        step = max(1, _AT_ONCE // columns)
        for begin in range(0, rows, step):
            part = weight[begin : begin + step]
            of = torch.arange(begin, begin + len(part)).div(height, rounding_mode="floor")
            numbers = (_numbers(part, self.code.bits, columns) if self.code.packed else part).to(scales.dtype)
            if zeros is not None:
                numbers = numbers - zeros[of][:, places]
            made[begin : begin + step] = (numbers * scales[of][:, places]).to(made.dtype)
        return made

    def _zeros(self, bench: Bench, scales: Tensor) -> Tensor | None:
        """The zero points, shaped as the scales are, which they are as exact as."""
        if self.zeros is None:
            return None
        zeros = bench.read(self.zeros)
        if self.code.zeros_packed:
            zeros = _numbers(zeros.T.contiguous(), self.code.bits, scales.shape[0]).T
        return zeros.reshape(scales.shape).to(scales.dtype)

    def _places(self, bench: Bench, blocks: int) -> Tensor:
        """The block of each column."""
        import torch

        columns = self.shape[1]
        in_turn = torch.arange(columns).div(self.code.block[1], rounding_mode="floor")
        if self.order is None:
            return in_turn
        order = bench.read(self.order).long()
        # What was never set, which compressed-tensors takes for columns in turn.
        if bool((order == -1).any()):
            return in_turn
        if bool(((order < 0) | (order >= blocks)).any()):
            raise ValueError(f"a column is in group {int(order.max())} of {blocks}; get the model again")
        return order


def _numbers(words: Tensor, bits: int, count: int) -> Tensor:
    """The whole numbers of `bits` bits (rows × count) in rows of words of 32 bits, each stored 2^(bits − 1) larger."""
    import torch

    long = words.long() & 0xFFFFFFFF
    begins = torch.arange(count) * bits
    word, shift = begins // _WORD, begins % _WORD
    # A number may end in the next word.
    after = (word + 1).clamp_max(words.shape[1] - 1)
    both = (long[:, word] >> shift) | (long[:, after] << (_WORD - shift))
    return (both & ((1 << bits) - 1)) - (1 << (bits - 1))
