"""A matrix that stays in its file while a model runs: embeddings read the rows they look up, products go by blocks.

Looked-up rows are the same numbers wherever they are stored. A product by blocks of rows consists of the products of
its blocks. BLAS may add up the terms of a product of another shape in another order, so blocks are the same for two
models that are compared: then equal inputs and equal rows give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

# The most numbers of a matrix in memory at a time: enough for products at full speed, few next to a layer's.
BLOCK_NUMBERS = 2 * 1024 * 1024
# Functions and attributes of a matrix that do not need its numbers.
_FACTS = frozenset(
    {
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.element_size, Tensor.is_floating_point),
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "layout", "requires_grad", "nbytes")),
    }
)
# A function that reads the rows from one number up to another, as stored.
ReadRows = Callable[[int, int], Tensor]


class StoredMatrix(Tensor):
    """A matrix (rows, columns) whose numbers `read(first, behind)` returns.

    It casts and moves them when it is multiplied. Its shape and dtype come from a meta tensor. `embedding` and `linear`
    read only the rows that they need; any other operation reads the whole matrix.
    """

    _read: ReadRows
    _device: torch.device
    _cut: int

    @classmethod
    def of(cls, like: Tensor, read: ReadRows, device: torch.device, *, cut: int = 0) -> Self:
        """Make a matrix that is read when it is used.

        Args:
            like: a meta tensor of its shape and dtype.
            read: reads rows of it.
            device: where rows are read to.
            cut: a block of rows ends before this row; 0: no such row.
        """
        made = like.detach().as_subclass(cls)
        made._read, made._device, made._cut = read, device, cut
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that its numbers are read to."""
        return self._device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """False: the matrix has numbers."""
        return False

    def whole(self) -> Tensor:
        """Read the whole matrix into memory."""
        return self._placed(self._read(0, int(self.shape[0])))

    def _placed(self, stored: Tensor) -> Tensor:
        """Return rows on the matrix's device and in its dtype."""
        return stored.to(self._device, self.dtype)

    @property
    def _blocks(self) -> list[tuple[int, int]]:
        """The blocks of rows, as (first, end), in order."""
        rows, columns = self.shape
        most = max(1, BLOCK_NUMBERS // max(1, columns))
        cuts = {0, *range(0, rows, most), rows}
        if 0 < self._cut < rows:
            # Blocks before the cut are those of a matrix that ends there; further blocks begin at the cut.
            cuts = {*range(0, self._cut, most), *range(self._cut, rows, most), rows}
        return list(pairwise(sorted(cuts)))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look rows up, multiply by blocks, or do anything else with the whole matrix."""
        kwargs = kwargs or {}
        if func is functional.embedding and isinstance(args[1], cls):
            return _looked_up(args[1], args[0])
        if func is functional.linear and isinstance(args[1], cls):
            return _multiplied(args[1], args[0], args[2] if len(args) > 2 else kwargs.get("bias"))
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # Functions such as `torch.stack` take them in lists.
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs))
        return func(*args, **kwargs)


def _looked_up(matrix: StoredMatrix, ids: Tensor) -> Tensor:
    """Return the rows `ids`, each read once; padding rows and the order of gradients do not matter for a lookup."""
    wanted, where = torch.unique(ids, return_inverse=True)
    rows = [matrix._read(row, row + 1) for row in wanted.tolist()] or [matrix._read(0, 0)]
    return matrix._placed(torch.cat(rows))[where]


def _multiplied(matrix: StoredMatrix, inputs: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of inputs (…, columns) and the transposed matrix, plus bias: (…, rows)."""
    made = inputs.new_empty(*inputs.shape[:-1], int(matrix.shape[0]))
    for first, behind in matrix._blocks:
        rows = matrix._placed(matrix._read(first, behind))
        made[..., first:behind] = _linear(inputs, rows, None if bias is None else bias[first:behind])
    return made


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply with the same bits as in a model that was loaded whole, whose weights are parameters.

    For rows that are not contiguous, such as the last token of each window, torch first copies them together if the
    weight is a parameter. With any other tensor torch would multiply them as a batch, whose sums may be rounded
    differently.
    """
    if inputs.is_contiguous():
        return functional.linear(inputs, weight, bias)
    made = functional.linear(inputs.contiguous(), weight)
    return made if bias is None else made + bias
