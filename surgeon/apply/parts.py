"""Tensors that are made of parts or rows of others: bytes are moved, none is decoded.

A tensor of embeddings for each layer may take gigabytes: it is read in pieces.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from surgeon.blueprint.recipes import Joined, PerLayer
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


def ranges_of(recipe: Joined, tensors: Mapping[str, TensorInfo]) -> tuple[TensorInfo, ...]:
    """Where the pieces of `recipe` lie: of each tensor its rows alone, by their begin and end."""
    found: list[TensorInfo] = []
    for piece in recipe.pieces:
        info = tensors[piece.of.source]
        row = info.nbytes // info.shape[0]
        begin, end = info.begin + piece.start * row, info.begin + piece.stop * row
        found.append(replace(info, shape=(piece.stop - piece.start, *info.shape[1:]), begin=begin, end=end))
    return tuple(found)


def pieces_in_order(pieces: Sequence[TensorInfo], opened: Callable[[str], int]) -> Iterator[memoryview]:
    """The bytes of `pieces`, one after the other; `opened` gives the descriptor of a shard, by its file."""
    for piece in pieces:
        yield from pieces_of(opened(piece.file), piece.begin, piece.end, _BUFFER)


def pieces_digest(source: Source, pieces: Sequence[TensorInfo]) -> str:
    """Hex sha256 of `pieces` of tensors of `source`, one after the other. Raises BadInput where a shard has changed."""
    descriptors: dict[str, int] = {}

    def opened(file: str) -> int:
        if file not in descriptors:
            descriptors[file] = source.open_shard(file)
        return descriptors[file]

    try:
        return sha256_pieces(pieces_in_order(pieces, opened))
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
