"""Rows of parquet files, read by pyarrow in a child process with limits of time and memory.

The unpacked size of a page is known only after unpacking, because nothing compares a file's metadata with its content.
The memory that rows of an Arrow table take as Python values is computed before any value is made: a file of a few bytes
may repeat one long text a million times, or contain a list of a billion nulls. Arrow keeps such columns compact, Python
does not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from surgeon.checkpoint.text_lines import MAX_DOCUMENT_BYTES, too_long
from surgeon.common.child import Child, Failed, Limited
from surgeon.common.installation import lacking
from surgeon.errors import BadInput, printable

# The bytes of row groups that stay in memory after reading.
_KEPT = 1024 * 1024 * 1024
_AGAIN = "get the file again, or leave it out"
_BATCH = 1024


class ParquetFiles:
    """Parquet files by number, each opened by `open_file` in the child process that reads them.

    Raises BadInput where pyarrow is not installed.
    """

    def __init__(self, files: Mapping[int, Path], open_file: Callable[[Path], BinaryIO]) -> None:
        """Start the child process that reads the files. Raises BadInput where pyarrow is not installed."""
        self._shown = {number: printable(str(file)) for number, file in files.items()}
        # Imported in the parent, so that no child has to import it itself.
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            first = next(iter(self._shown.values()))
            raise BadInput(lacking(f"{first}: reading parquet", "pyarrow", "parquet")) from None
        self._child = Child(lambda: _Reader(files, open_file).answer)

    def head(self, file: int) -> tuple[list[str], int]:
        """Return a file's column names and its number of row groups.

        Raises BadInput where it is no readable parquet file.
        """
        try:
            names, groups = self._child.ask(file)
        except (Limited, Failed) as error:
            raise BadInput(f"{self._shown[file]}: not a parquet file that can be read ({error}); {_AGAIN}") from None
        return names, groups

    def rows(
        self, file: int, group: int, columns: Sequence[str], first: int, most: int | None = None
    ) -> list[dict[str, Any]]:
        """Return a few rows of a row group from number `first` on, at most `most`; an empty list after the last row.

        Raises BadInput where the group, or a row of it, is damaged or too large.
        """
        where = f"{self._shown[file]}: row group {group}"
        try:
            found: list[dict[str, Any]] = self._child.ask(file, group, list(columns), first, most)
        except Limited as error:
            raise BadInput(
                f"{where} {error}; write the file again with smaller row groups (`row_group_size=10_000`), or as JSON"
                " lines"
            ) from None
        except Failed as error:
            raise BadInput(f"{where} cannot be read ({error}); {_AGAIN}") from None
        return found


class _Reader:
    """The child's state: the file that it last opened, and tables of row groups with the ends of their pieces."""

    def __init__(self, files: Mapping[int, Path], open_file: Callable[[Path], BinaryIO]) -> None:
        import pyarrow

        # Arrow's own memory pools reserve address space in advance, which the limit would count.
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())
        self._files = files
        self._open_file = open_file
        self._opened: dict[int, tuple[BinaryIO, Any]] = {}
        self._kept: dict[tuple[int, int], tuple[Any, list[int]]] = {}

    def answer(
        self, file: int, group: int | None = None, columns: Sequence[str] = (), first: int = 0, most: int | None = None
    ) -> Any:
        """Answer a question of `ParquetFiles`: the rows from `first` on, at most `most`, as a list of dicts.

        With only `file`, return the file's head: its column names and its number of row groups.
        """
        if group is None:
            _, footer = self._open(file)
            return footer.schema_arrow.names, footer.num_row_groups
        if (file, group) not in self._kept:
            self._read(file, group, columns)
        table, ends = self._kept[file, group]
        end = ends[bisect_right(ends, first)] if first < table.num_rows else first
        return table.slice(first, min(end - first, most or end)).to_pylist()

    def _open(self, file: int) -> tuple[BinaryIO, Any]:
        """Return a file handle and the file's footer, a `ParquetFile`."""
        import pyarrow.parquet

        if file not in self._opened:
            handle = self._open_file(self._files[file])
            self._opened = {file: (handle, pyarrow.parquet.ParquetFile(handle))}
        return self._opened[file]

    def _read(self, file: int, group: int, columns: Sequence[str]) -> None:
        """Read a row group into memory, with the ends of its pieces; drop older groups beyond `_KEPT` bytes.

        Raises BadInput for a row that is too large, and pyarrow's errors or ValueError for damage.
        """
        import pyarrow.parquet

        handle, footer = self._open(file)
        chunks = footer.metadata.row_group(group)
        # Keep dictionary-encoded texts encoded until single rows are read.
        texts = [
            chunk.path_in_schema
            for chunk in map(chunks.column, range(chunks.num_columns))
            if chunk.physical_type == "BYTE_ARRAY" and "DELTA_BYTE_ARRAY" not in chunk.encodings
        ]
        opened = pyarrow.parquet.ParquetFile(handle, metadata=footer.metadata, read_dictionary=texts, pre_buffer=False)
        table = opened.read_row_group(group, columns=list(columns), use_threads=False)
        if table.num_rows != chunks.num_rows:
            raise ValueError(f"{table.num_rows:,} rows, and the footer says {chunks.num_rows:,}")
        ends: list[int] = []
        where = f"{printable(str(self._files[file]))}: row group {group}"
        for batch in table.to_batches(_BATCH):
            begin = ends[-1] if ends else 0
            ends += [begin + end for _, end in pieces_of(batch, where, begin)]
        while self._kept and table.nbytes + sum(kept.nbytes for kept, _ in self._kept.values()) > _KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[file, group] = table, ends


# The approximate bytes of a value in addition to its text: an object, and its slot in a list or dict.
_A_VALUE = 64
_DEEPEST = 32
# The bytes of Python values that are made at a time.
_PIECE = 4 * 1024 * 1024


def pieces_of(batch: Any, where: str, first: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of runs of rows of a `pyarrow.RecordBatch` that each take little memory as Python values.

    The first row has the number `first`. Raises BadInput (prefix `where`) for a row larger than a document may be and
    for a column whose type cannot contain texts, and pyarrow's errors or ValueError for damage that the file's reader
    missed.
    """
    pieces = np.cumsum(check_sizes(batch, where, first)) // _PIECE
    return pairwise([0, *(np.flatnonzero(np.diff(pieces)) + 1).tolist(), batch.num_rows])


def check_sizes(batch: Any, where: str, first: int = 0) -> NDArray[np.int64]:
    """Return the bytes that each row takes in Python (rows,), int64; arguments and errors as in `pieces_of`."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        _check_type(column.type, f"{where}: the column `{name}`")
    sizes = _sum((row_sizes(column) for column in batch.columns), np.zeros(batch.num_rows, dtype=np.int64))
    for row in np.flatnonzero(sizes > MAX_DOCUMENT_BYTES)[:1]:
        raise too_long(f"{where}, row {first + row}", "this row")
    return sizes


def row_sizes(array: Any) -> NDArray[np.int64]:
    """Return the bytes that each value of a `pyarrow.Array` takes in Python, with nested values; (values,), int64."""
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
            # The dictionary is longer than the rows: measure only the entries that rows refer to.
            named, places = np.unique(places, return_inverse=True)
            values = values.take(pyarrow.array(named[named >= 0]))
            places = places - np.count_nonzero(named < 0)
        # Index -1, which stands for null, selects the last element.
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
            # Too many values, whatever their sizes.
            own += _A_VALUE * lengths
            return own
        sums = np.append(0, np.cumsum(row_sizes(array.values.slice(begin, end - begin))))
        own += np.diff(sums[offsets - begin])
        return own
    return own


def _sum(parts: Iterable[NDArray[np.int64]], total: NDArray[np.int64]) -> NDArray[np.int64]:
    """Add the parts to `total`, in place, and return it."""
    for part in parts:
        total += part
    return total


def _has_bytes(kind: Any) -> bool:
    """Return whether values of an Arrow type are texts or bytes with offsets."""
    from pyarrow import types

    return any(of(kind) for of in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))


def _check_type(kind: Any, where: str) -> None:
    """Raise BadInput (prefix `where`) for an Arrow type whose values cannot be measured."""
    if not _is_counted(kind, _DEEPEST):
        raise BadInput(
            f"{printable(where)} is of the type {printable(str(kind), 60)}; texts, numbers, lists and structs are read:"
            " write it so"
        )


def _is_counted(kind: Any, depth: int) -> bool:
    """Return whether `row_sizes` can measure values of a type nested at most `depth` deep."""
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
