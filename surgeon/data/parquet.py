"""Rows of parquet files, which pyarrow reads in a process of its own with limits of time and memory.

What pages unpack to is known when they are unpacked: nothing compares what a file says of it with what it holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from surgeon.common.child import Child, Failed, Limited
from surgeon.common.installation import lacking
from surgeon.data.row_sizes import pieces_of
from surgeon.errors import BadInput, printable

# Of row groups that were read so many bytes stay in memory.
_KEPT = 1024 * 1024 * 1024
_AGAIN = "get the file again, or leave it out"
_BATCH = 1024


class ParquetFiles:
    """Parquet files by their numbers, each opened by `open_file` in the child that reads them.

    Raises BadInput where pyarrow is not installed.
    """

    def __init__(self, files: Mapping[int, Path], open_file: Callable[[Path], BinaryIO]) -> None:
        self._shown = {number: printable(str(file)) for number, file in files.items()}
        # Here, so that no child has to import it for itself.
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            first = next(iter(self._shown.values()))
            raise BadInput(lacking(f"{first}: reading parquet", "pyarrow", "parquet")) from None
        self._child = Child(lambda: _Reader(files, open_file).answer)

    def head(self, file: int) -> tuple[list[str], int]:
        """Return the names of a file's columns, and the number of its row groups. Raises BadInput where it has none."""
        try:
            names, groups = self._child.ask(file)
        except (Limited, Failed) as error:
            raise BadInput(f"{self._shown[file]}: not a parquet file that can be read ({error}); {_AGAIN}") from None
        return names, groups

    def rows(
        self, file: int, group: int, columns: Sequence[str], first: int, most: int | None = None
    ) -> list[dict[str, Any]]:
        """Return rows of a row group from the number `first` on: few, at most `most`; none behind the last.

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
    """What the child keeps: the file that it last opened; tables of row groups, with the ends of their pieces."""

    def __init__(self, files: Mapping[int, Path], open_file: Callable[[Path], BinaryIO]) -> None:
        import pyarrow

        # Arrow's own pools take address space before they use it.
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())
        self._files = files
        self._open_file = open_file
        self._opened: dict[int, tuple[BinaryIO, Any]] = {}
        self._kept: dict[tuple[int, int], tuple[Any, list[int]]] = {}

    def answer(
        self, file: int, group: int | None = None, columns: Sequence[str] = (), first: int = 0, most: int | None = None
    ) -> Any:
        """Answer a question of `ParquetFiles`: one of a file alone asks for its head."""
        if group is None:
            _, footer = self._open(file)
            return footer.schema_arrow.names, footer.num_row_groups
        if (file, group) not in self._kept:
            self._read(file, group, columns)
        table, ends = self._kept[file, group]
        end = ends[bisect_right(ends, first)] if first < table.num_rows else first
        return table.slice(first, min(end - first, most or end)).to_pylist()

    def _open(self, file: int) -> tuple[BinaryIO, Any]:
        """Return a file and its footer, a `ParquetFile`."""
        import pyarrow.parquet

        if file not in self._opened:
            handle = self._open_file(self._files[file])
            self._opened = {file: (handle, pyarrow.parquet.ParquetFile(handle))}
        return self._opened[file]

    def _read(self, file: int, group: int, columns: Sequence[str]) -> None:
        import pyarrow.parquet

        handle, footer = self._open(file)
        chunks = footer.metadata.row_group(group)
        # Texts that a file says once and repeats by number stay so until they are looked at one by one.
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
