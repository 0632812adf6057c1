"""A matrix that stays in its file while a model runs: embeddings read the rows they look up, a head block by block.

The embedding and the output head of a model are its largest tensors, larger than many layers together. Rows that are
looked up are the same numbers wherever they lie. A product by blocks of rows is that of each block: BLAS may add up
the terms of a product of another shape in another order, so blocks are the same for two models that are compared, and
equal inputs and equal rows give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

# A block is large enough for a product to run at full speed, and small beside a layer.
BLOCK_BYTES = 32 * 1024 * 1024
# What can be asked of a matrix without its numbers.
_FACTS = frozenset(
    {
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.element_size, Tensor.is_floating_point),
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "layout", "requires_grad", "nbytes")),
    }
)
# The numbers of rows from one up to another.
ReadRows = Callable[[int, int], Tensor]


class StoredMatrix(Tensor):
    """A matrix (rows, columns) whose numbers `read(first, behind)` gives, on the device and in the dtype it has here.

    Its shape and dtype are a meta tensor's. `embedding` and `linear` take what they need of it; whatever else is done
    with it is done with all of it, read for that.
    """

    _read: ReadRows
    _device: torch.device
    _cut: int

    @classmethod
    def of(cls, like: Tensor, read: ReadRows, device: torch.device, *, cut: int = 0) -> Self:
        """`like` is a meta tensor of its shape and dtype; a block of rows ends before the row `cut` (0: none does)."""
        made = like.detach().as_subclass(cls)
        made._read, made._device, made._cut = read, device, cut
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where its numbers are read to."""
        return self._device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """It has numbers."""
        return False

    def whole(self) -> Tensor:
        """All of it, in memory."""
        return self._read(0, self._rows)

    @property
    def _rows(self) -> int:
        return int(self.shape[0])

    @property
    def _blocks(self) -> list[tuple[int, int]]:
        """Rows from and to, in order."""
        with torch._C.DisableTorchFunctionSubclass():
            row_bytes = self.shape[1] * self.element_size()
        most = max(1, BLOCK_BYTES // max(1, row_bytes))
        cuts = {0, *range(0, self._rows, most), self._rows}
        if 0 < self._cut < self._rows:
            # Up to the cut as a matrix that ends there, and from there on.
            cuts = {*range(0, self._cut, most), *range(self._cut, self._rows, most), self._rows}
        ordered = sorted(cuts)
        return list(pairwise(ordered))

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
        args = [arg.whole() if isinstance(arg, cls) else arg for arg in args]
        kwargs = {key: arg.whole() if isinstance(arg, cls) else arg for key, arg in kwargs.items()}
        return func(*args, **kwargs)


def _looked_up(matrix: StoredMatrix, ids: Tensor) -> Tensor:
    """The rows `ids`, each read once; neither a padding row nor the order of gradients matters to what is looked up."""
    wanted, where = torch.unique(ids, return_inverse=True)
    rows = [matrix._read(row, row + 1) for row in wanted.tolist()] or [matrix._read(0, 0)]
    return torch.cat(rows)[where]


def _multiplied(matrix: StoredMatrix, inputs: Tensor, bias: Tensor | None) -> Tensor:
    """inputs (…, columns) times the matrix transposed, plus bias: (…, rows)."""
    blocks = matrix._blocks
    if len(blocks) == 1:
        return functional.linear(inputs, matrix.whole(), bias)
    result = inputs.new_empty(*inputs.shape[:-1], matrix._rows)
    for first, behind in blocks:
        part = None if bias is None else bias[first:behind]
        result[..., first:behind] = functional.linear(inputs, matrix._read(first, behind), part)
    return result
