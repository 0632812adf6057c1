"""Tensors that hold a part for each layer, read with their parts in another order: bytes are moved, none is decoded.

A tensor of embeddings for each layer may take gigabytes: it is read in pieces.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from surgeon.blueprint.recipes import PerLayer
from surgeon.checkpoint.header import DTYPE_BITS, TensorInfo
from surgeon.checkpoint.ranges import fill, pieces_of, sha256_pieces
from surgeon.checkpoint.source import Source

_BUFFER = 8 * 1024 * 1024


def parts_in_order(fd: int, begin: int, recipe: PerLayer) -> Iterator[memoryview]:
    """The bytes of what `recipe` makes of the tensor at `begin` of the open file, piece after piece.

    Raises BadInput when the file ends early.
    """
    shape, axis = recipe.of.shape, recipe.axis
    rows = math.prod(shape[:axis])
    width = math.prod(shape[axis:]) * DTYPE_BITS[recipe.dtype] // 8 // recipe.count
    if width * recipe.count > _BUFFER:
        return _one_by_one(fd, begin, rows, width, recipe)
    return _rows_together(fd, begin, rows, width, recipe)


def _one_by_one(fd: int, begin: int, rows: int, width: int, recipe: PerLayer) -> Iterator[memoryview]:
    """Few large parts: each is read where it is wanted."""
    for row in range(rows):
        for part in recipe.order:
            at = begin + (row * recipe.count + part) * width
            yield from pieces_of(fd, at, at + width, _BUFFER)


def _rows_together(fd: int, begin: int, rows: int, width: int, recipe: PerLayer) -> Iterator[memoryview]:
    """Many small parts: whole rows of them are read, and their parts are gathered in memory."""
    # Only where bytes are written: preview and the command line do without it.
    import numpy as np

    at_once = _BUFFER // max(1, recipe.count * width)
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        held = bytearray(count * recipe.count * width)
        fill(fd, held, begin + first * recipe.count * width)
        parts = np.frombuffer(held, np.uint8).reshape(count, recipe.count, width)
        yield np.take(parts, recipe.order, axis=1).reshape(-1).data


def parts_digest(source: Source, tensor: TensorInfo, recipe: PerLayer) -> str:
    """Hex sha256 of what `recipe` makes of a tensor of `source`. Raises BadInput where its shard has changed."""
    opened = source.open_shard(tensor.file)
    try:
        return sha256_pieces(parts_in_order(opened, tensor.begin, recipe))
    finally:
        os.close(opened)
