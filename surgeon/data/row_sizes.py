"""The memory that rows of an Arrow table take as Python values, computed before any is made.

A file of a few bytes may say one long text a million times, or a list of a billion nulls: Arrow keeps such columns as
they are written, Python does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surgeon.checkpoint.text_lines import MAX_DOCUMENT_BYTES, too_long
from surgeon.errors import BadInput, printable

# About what a value takes beside its text: an object, and its place in a list or a dict.
_A_VALUE = 64
_DEEPEST = 32
# Rows become Python values so many bytes at a time.
_PIECE = 4 * 1024 * 1024


def pieces_of(batch: Any, where: str, first: int = 0) -> Iterator[tuple[int, int]]:
    """Yield begin and end of so many rows of a `pyarrow.RecordBatch` that they take little memory as Python values.

    The first row has the number `first`. Raises BadInput, which begins with `where`, for a row that takes more than a
    document may and for a column of a type that holds no texts, and pyarrow's errors or ValueError for damaged ones, as
    far as a reader of files left any.
    """
    pieces = np.cumsum(check_sizes(batch, where, first)) // _PIECE
    return pairwise([0, *(np.flatnonzero(np.diff(pieces)) + 1).tolist(), batch.num_rows])


def check_sizes(batch: Any, where: str, first: int = 0) -> NDArray[np.int64]:
    """Return the bytes that each row takes in Python (rows,), int64; arguments and errors as of `pieces_of`."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        _check_type(column.type, f"{where}: the column `{name}`")
    sizes = _sum((row_sizes(column) for column in batch.columns), np.zeros(batch.num_rows, dtype=np.int64))
    for row in np.flatnonzero(sizes > MAX_DOCUMENT_BYTES)[:1]:
        raise too_long(f"{where}, row {first + row}", "this row")
    return sizes


def row_sizes(array: Any) -> NDArray[np.int64]:
    """Return the bytes that each value of a `pyarrow.Array` takes in Python, its parts counted (values,), int64."""
    import pyarrow.compute
    from pyarrow import types

    kind = array.type
    own: NDArray[np.int64] = np.full(len(array), _A_VALUE, dtype=np.int64)
    if isinstance(array, pyarrow.ExtensionArray):
        return row_sizes(array.storage)
    if types.is_dictionary(kind):
        places = array.indices.cast(pyarrow.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        values = array.dictionary
        lowest = -1 if array.null_count else 0
        if len(places) and not lowest <= places.min() <= places.max() < len(values):
            raise ValueError("a text by a number that no text has")
        if len(places) < len(values):
            # Of a long dictionary only what few rows name.
            named, places = np.unique(places, return_inverse=True)
            values = values.take(pyarrow.array(named[named >= 0]))
            places = places - np.count_nonzero(named < 0)
        # A place of -1, a null's, is the last one.
        own[:] = np.append(row_sizes(values), _A_VALUE)[places]
        return own
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = np.frombuffer(array.buffers()[1] or b"", dtype=np.int32).reshape(-1, 4)
        own += np.maximum(views[array.offset : array.offset + len(array), 0], 0)
        return own
    if _has_bytes(kind):
        lengths = pyarrow.compute.binary_length(array).fill_null(0)
        own += lengths.to_numpy(zero_copy_only=False)
        return own
    if types.is_struct(kind):
        return _sum((row_sizes(array.field(part)) for part in range(kind.num_fields)), own)
    if types.is_list(kind) or types.is_large_list(kind):
        offsets = array.offsets.to_numpy().astype(np.int64)
        begin, end = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
        lengths = np.diff(offsets)
        if lengths.max(initial=0) > MAX_DOCUMENT_BYTES // _A_VALUE:
            # Too many, whatever they are.
            own += _A_VALUE * lengths
            return own
        sums = np.append(0, np.cumsum(row_sizes(array.values.slice(begin, end - begin))))
        own += np.diff(sums[offsets - begin])
        return own
    return own


def _sum(parts: Iterable[NDArray[np.int64]], total: NDArray[np.int64]) -> NDArray[np.int64]:
    for part in parts:
        total += part
    return total


def _has_bytes(kind: Any) -> bool:
    from pyarrow import types

    return any(of(kind) for of in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))


def _check_type(kind: Any, where: str) -> None:
    if not _is_counted(kind, _DEEPEST):
        raise BadInput(
            f"{printable(where)} is of the type {printable(str(kind), 60)}; texts, numbers, lists and structs are read:"
            " write it so"
        )


def _is_counted(kind: Any, depth: int) -> bool:
    """Whether `row_sizes` counts the values of a type, nested not deeper than `depth`."""
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if types.is_primitive(kind) or types.is_null(kind) or types.is_decimal(kind) or _has_bytes(kind):
        return True
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return True
    if types.is_dictionary(kind):
        parts = [kind.value_type]
    elif types.is_struct(kind) or types.is_list(kind) or types.is_large_list(kind):
        parts = [kind.field(part).type for part in range(kind.num_fields)]
    else:
        return False
    return depth > 0 and all(_is_counted(part, depth - 1) for part in parts)
