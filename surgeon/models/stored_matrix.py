"""A matrix that stays in its file while a model runs: embeddings read the rows they look up, products go by blocks.

Looked-up rows are the same numbers wherever they are stored. A product by blocks of rows consists of the products of
its blocks. BLAS may add up the terms of a product of another shape in another order, so blocks are the same for two
models that are compared: then equal inputs and equal rows give equal bits. Several products are made from one reading
(`multiply`): forwards that run side by side (lockstep.py) meet at a matrix, each in its own dtype, and at the
corresponding matrix of the other model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from surgeon.models import lockstep

# The most numbers of a matrix in memory at a time, per dtype: enough for products at full speed, few next to a layer's.
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
    read only the rows that they need; any other operation reads the whole matrix. Two objects with an equal `read` are
    one matrix in two dtypes.
    """

    _read: ReadRows
    _device: torch.device
    _cut: int
    _place: int
    _outside: bool

    @classmethod
    def of(
        cls,
        like: Tensor,
        read: ReadRows,
        device: torch.device,
        *,
        cut: int = 0,
        place: int = 0,
        outside: bool = True,
    ) -> Self:
        """Make a matrix that is read when it is used.

        Args:
            like: a meta tensor of its shape and dtype.
            read: reads rows of it.
            device: where rows are read to.
            cut: a block of rows ends before this row; 0: no such row.
            place: its place in the order of the model.
            outside: whether the matrix is outside the layers.
        """
        made = like.detach().as_subclass(cls)
        made._read, made._device, made._cut = read, device, cut
        made._place, made._outside = place, outside
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
            product = Product(args[1], args[0], args[2] if len(args) > 2 else kwargs.get("bias"))
            # Where other forwards run side by side, wait for their products with the same matrix.
            if (forward := lockstep.current()) is not None:
                forward.wait(product)
            else:
                multiply([product])
            assert product.result is not None
            return product.result
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


@dataclass(eq=False)
class Product:
    """A product of inputs (…, columns) and a transposed matrix, plus bias: `result` (…, rows)."""

    matrix: StoredMatrix
    inputs: Tensor
    bias: Tensor | None
    result: Tensor | None = field(default=None, init=False)

    @property
    def key(self) -> ReadRows:
        """The function that reads the matrix: the same in every dtype."""
        return self.matrix._read

    @property
    def place(self) -> int:
        """The place of its matrix in the model."""
        return self.matrix._place

    @property
    def outside(self) -> bool:
        """Whether its matrix is outside the layers."""
        return self.matrix._outside

    @property
    def result_bytes(self) -> int:
        """The size of the result in bytes."""
        return self.inputs.numel() // self.inputs.shape[-1] * int(self.matrix.shape[0]) * self.inputs.element_size()

    def alike(self, other: Product) -> bool:
        """Return whether the matrices may hold the same numbers: as many columns, and the same first row."""
        mine, others = self.matrix, other.matrix
        return mine.shape[1] == others.shape[1] and _equal(mine._read(0, 1), others._read(0, 1))

    def equals(self, other: Product) -> bool:
        """Return whether dtypes, inputs and biases of both products are equal; the matrices are not compared."""
        if (self.inputs.dtype, self.matrix.dtype) != (other.inputs.dtype, other.matrix.dtype):
            return False
        biases = (self.bias is None) == (other.bias is None)
        biases = biases and (self.bias is None or other.bias is None or torch.equal(self.bias, other.bias))
        return biases and torch.equal(self.inputs, other.inputs)

    def bias_of(self, first: int, behind: int) -> Tensor | None:
        """Return the bias for the matrix's rows from `first` up to, without, `behind`; None without a bias."""
        return None if self.bias is None else self.bias[first:behind]

    def of_zeros(self, first: int, behind: int) -> Tensor:
        """Return the result columns for a block of rows that are zeros, if the inputs are finite: only the bias."""
        made = self.inputs.new_zeros(*self.inputs.shape[:-1], behind - first)
        bias = self.bias_of(first, behind)
        return made if bias is None else made + bias

    def columns(self, first: int, behind: int) -> Tensor:
        """Return the columns of the result that belong to a block of the matrix's rows."""
        assert self.result is not None
        return self.result[..., first:behind]

    def add(self, first: int, behind: int, made: Tensor) -> None:
        """Store `made` as the columns of the result that belong to a block of the matrix's rows."""
        if behind - first == self.matrix.shape[0]:
            self.result = made
            return
        if self.result is None:
            self.result = made.new_empty(*self.inputs.shape[:-1], int(self.matrix.shape[0]))
        self.result[..., first:behind] = made


def multiply(products: Sequence[Product]) -> None:
    """Compute the results of products, reading each block of rows of each matrix once.

    A product of equal inputs and equal rows is computed once and copied; one of finite inputs and zeros is not
    computed. The bits are those that computing would give (except for the sign of a zero, which no comparison regards).
    """
    blocks = {product.key: product.matrix._blocks for product in products}
    same = [
        next(place for place, other in enumerate(products) if other is one or other.equals(one)) for one in products
    ]
    finite = [bool(one.inputs.isfinite().all()) for one in products]
    for number in range(max(map(len, blocks.values()))):
        block = _Block({key: (cuts[number], key(*cuts[number])) for key, cuts in blocks.items() if number < len(cuts)})
        for nth, product in enumerate(products):
            if product.key not in block.read:
                continue
            model = products[same[nth]]
            first, behind = block.read[product.key][0]
            if model is not product and block.equal(product.key, model.key):
                made = model.columns(first, behind).clone()
            elif finite[nth] and block.empty(product.key):
                made = product.of_zeros(first, behind)
            else:
                made = _linear(product.inputs, block.placed(product.matrix), product.bias_of(first, behind))
            product.add(first, behind, made)
        # Free the block before the next one is read.
        del block


class _Block:
    """The current rows of each matrix, and the cached results of comparing them."""

    def __init__(self, read: dict[ReadRows, tuple[tuple[int, int], Tensor]]) -> None:
        self.read = read
        self._placed: dict[tuple[ReadRows, torch.dtype, torch.device], Tensor] = {}
        self._equal: dict[tuple[ReadRows, ReadRows], bool] = {}
        self._empty: dict[ReadRows, bool] = {}

    def placed(self, matrix: StoredMatrix) -> Tensor:
        """Return the matrix's rows of this block in its dtype, on its device."""
        key = (matrix._read, matrix.dtype, matrix.device)
        if key not in self._placed:
            self._placed[key] = matrix._placed(self.read[matrix._read][1])
        return self._placed[key]

    def equal(self, one: ReadRows, other: ReadRows) -> bool:
        """Return whether two matrices (given by their readers) have the same rows with the same bytes in this block."""
        if one == other:
            return True
        if (one, other) not in self._equal:
            here, there = self.read[one], self.read.get(other)
            self._equal[one, other] = there is not None and here[0] == there[0] and _equal(here[1], there[1])
        return self._equal[one, other]

    def empty(self, key: ReadRows) -> bool:
        """Return whether all bytes of this block of the matrix that `key` reads are zero."""
        if key not in self._empty:
            words = _words(self.read[key][1])
            self._empty[key] = not words[:1024].any() and not words.any()
        return self._empty[key]


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


def _words(stored: Tensor) -> Tensor:
    """Return the bytes of a tensor, as 64-bit words where their number is a multiple of eight."""
    content = stored.contiguous().view(-1).view(torch.uint8)
    return content.view(torch.int64) if len(content) % 8 == 0 else content


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same dtype and the same bytes."""
    return one.dtype == other.dtype and torch.equal(_words(one), _words(other))
