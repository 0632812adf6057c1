"""Rows of tables, read by pyarrow in a child process with limits of time and memory; and parquet files of such rows.

The unpacked size of a page is known only after unpacking, because nothing compares a file's metadata with its content.
A file of a few bytes may also repeat one long text a million times, or contain a list of a billion nulls. Arrow keeps
such columns compact, Python does not: so few rows are made Python values at a time, and what takes too much ends only
the child.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from surgeon.checkpoint.text_lines import MAX_DOCUMENT_BYTES, too_long
from surgeon.common.child import Child, Failed, Limited
from surgeon.common.installation import lacking
from surgeon.errors import BadInput, printable

# The bytes of row groups that stay in memory after reading.
_KEPT = 1024 * 1024 * 1024
_AGAIN = "get the file again, or leave it out"
# The most rows that are made Python values at a time, and their bytes above which fewer are made next.
_ROWS, _PIECE = 1024, 2 * 1024 * 1024
# The approximate bytes of a value in addition to its text: an object, and its slot in a list or dict.
_A_VALUE = 64


class FewRows:
    """Rows of a table as Python values, a few at a time; `read` returns rows from a number on, as many as asked."""

    def __init__(self, read: Callable[[int, int], list[dict[str, Any]]], where: str) -> None:
        self._read = read
        self._where = where
        self._count = 1

    def answer(self, first: int, most: int | None = None) -> list[dict[str, Any]]:
        """Return some rows from number `first` on, at most `most`; an empty list after the last row.

        Raises BadInput for a row larger than a document may be.
        """
        count = most or self._count
        found, sizes = self._made(first, count)
        # Long rows may follow short ones, as where a file is sorted by length.
        while count > 1 and sum(sizes) > MAX_DOCUMENT_BYTES:
            count //= 2
            found, sizes = self._made(first, count)
        for row, size in enumerate(sizes, first):
            if size > MAX_DOCUMENT_BYTES:
                raise too_long(f"{self._where}, row {row}", "this row")
        self._count = max(1, count // 2) if sum(sizes) > _PIECE else min(_ROWS, 2 * self._count)
        return found

    def _made(self, first: int, count: int) -> tuple[list[dict[str, Any]], list[int]]:
        """Return rows with their sizes; no row, of a size that none may have, where several need too much memory."""
        try:
            found = self._read(first, count)
        except MemoryError:
            if count == 1:
                raise
            return [], [MAX_DOCUMENT_BYTES + 1]
        return found, [_size(row) for row in found]


def _size(value: Any) -> int:
    """Return about how many bytes a value takes, with the values in it."""
    if isinstance(value, str | bytes):
        return _A_VALUE + len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return _A_VALUE + sum(map(_size, inner))


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
    """The child's state: the file that it last opened, and tables of row groups with their rows."""

    def __init__(self, files: Mapping[int, Path], open_file: Callable[[Path], BinaryIO]) -> None:
        import pyarrow

        # Arrow's own memory pools reserve address space in advance, which the limit would count.
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())
        self._files = files
        self._open_file = open_file
        self._opened: dict[int, tuple[BinaryIO, Any]] = {}
        self._kept: dict[tuple[int, int], tuple[Any, FewRows]] = {}

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
        return self._kept[file, group][1].answer(first, most)

    def _open(self, file: int) -> tuple[BinaryIO, Any]:
        """Return a file handle and the file's footer, a `ParquetFile`."""
        import pyarrow.parquet

        if file not in self._opened:
            handle = self._open_file(self._files[file])
            self._opened = {file: (handle, pyarrow.parquet.ParquetFile(handle))}
        return self._opened[file]

    def _read(self, file: int, group: int, columns: Sequence[str]) -> None:
        """Read a row group into memory; drop older groups beyond `_KEPT` bytes.

        Raises pyarrow's errors or ValueError for damage.
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
        # Also that each text of a dictionary is there, and each text is UTF-8.
        table.validate(full=True)
        while self._kept and table.nbytes + sum(kept.nbytes for kept, _ in self._kept.values()) > _KEPT:
            self._kept.pop(next(iter(self._kept)))
        rows = FewRows(
            lambda first, count: table.slice(first, count).to_pylist(), f"{self._files[file]}: row group {group}"
        )
        self._kept[file, group] = table, rows
