"""Texts in parquet files, read in memory that is limited whatever the file says.

What pages unpack to stands in their own headers, which are read before any page is unpacked; the footer says it too,
but nothing compares the two. Format: https://parquet.apache.org/docs/file-format, of which `PageHeader` is in Thrift's
compact protocol (https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from surgeon.checkpoint.hub_calls import first_line
from surgeon.common.installation import lacking
from surgeon.data.row_sizes import check_sizes, rows_of
from surgeon.errors import BadInput, printable

# The most that a page, and the pages of a row group, may unpack to: writers make pages of about 1 MB.
MAX_PAGE_BYTES = 512 * 1024 * 1024
MAX_GROUP_BYTES = 1024 * 1024 * 1024
_AGAIN = "get the file again, or leave it out"
# Rows that are unpacked at a time.
_BATCH = 1024
# A number or a place in a dictionary, and the levels that say what is null; in a list also what is computed of it.
_A_VALUE, _IN_A_LIST = 8, 64
_BUFFER = 1024 * 1024
# As pyarrow has it: some old files say too few bytes of a column.
_PADDING = 100
# Each text as what it has in common with the one before, so that pages do not say how long texts are.
_DELTA_BYTE_ARRAY = 7


class ParquetTexts:
    """The open parquet file `file`, called `path`. Raises BadInput where it is none, or pyarrow is not installed."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.shown = printable(str(path))
        self._file = file
        try:
            import pyarrow.parquet
        except ImportError:
            raise BadInput(lacking(f"{self.shown}: reading parquet", "pyarrow", "parquet")) from None
        try:
            footer = pyarrow.parquet.ParquetFile(file)
            # Texts that a file says once and repeats by number stay so until they are looked at one by one.
            texts = [column.path for column in _columns(footer.schema) if column.physical_type == "BYTE_ARRAY"]
            self._opened = pyarrow.parquet.ParquetFile(
                file, metadata=footer.metadata, read_dictionary=texts, pre_buffer=False, buffer_size=_BUFFER
            )
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise BadInput(
                f"{self.shown}: not a parquet file that can be read ({first_line(error)}); {_AGAIN}"
            ) from None
        self.names: list[str] = self._opened.schema_arrow.names
        self.groups: int = self._opened.num_row_groups

    def rows(self, group: int, columns: list[str]) -> Iterator[Any]:
        """Yield the rows of a row group one after the other. Raises BadInput where they are damaged or too large."""
        self.check_group(group, columns)
        first = 0
        with self._refused(group):
            for batch in self._opened.iter_batches(_BATCH, row_groups=[group], columns=columns, use_threads=False):
                yield from rows_of(batch, self._where(group), first)
                first += batch.num_rows

    def table(self, group: int, columns: list[str]) -> Any:
        """Read a row group as a `pyarrow.Table`. Raises BadInput where it, or a row of it, is damaged or too large."""
        self.check_group(group, columns)
        first = 0
        with self._refused(group):
            table = self._opened.read_row_group(group, columns=columns, use_threads=False)
            for batch in table.to_batches(_BATCH):
                check_sizes(batch, self._where(group), first)
                first += batch.num_rows
        return table

    def check_group(self, group: int, columns: Sequence[str]) -> int:
        """Return the bytes that a row group takes in memory. Raises BadInput where they, or a page's, are too many."""
        total = 0
        with self._refused(group):
            row_group = self._opened.metadata.row_group(group)
            for number in range(row_group.num_columns):
                chunk = row_group.column(number)
                if not any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in columns):
                    continue
                in_a_list = self._opened.schema.column(number).max_repetition_level > 0
                for page in _pages(self._file, chunk, _IN_A_LIST if in_a_list else _A_VALUE):
                    if _DELTA_BYTE_ARRAY in page.encodings and chunk.physical_type.endswith("BYTE_ARRAY"):
                        raise BadInput(
                            f"{self._where(group)}: `{printable(chunk.path_in_schema)}` is in the encoding"
                            " DELTA_BYTE_ARRAY, whose texts have no known size before they are read; write the file"
                            " again with another, as pandas and pyarrow do if they are not asked for it"
                        )
                    total += page.nbytes
                    if page.nbytes > MAX_PAGE_BYTES or total > MAX_GROUP_BYTES:
                        raise BadInput(
                            f"{self._where(group)}: unpacks to more than {MAX_GROUP_BYTES:,} bytes, or"
                            f" {MAX_PAGE_BYTES:,} in a page; write the file again with smaller row groups"
                            " (`row_group_size=10_000`), or as JSON lines"
                        )
        return total

    def _where(self, group: int) -> str:
        return f"{self.shown}: row group {group}"

    @contextmanager
    def _refused(self, group: int) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, ValueError, IndexError) as error:
            raise BadInput(f"{self._where(group)} cannot be read ({first_line(error)}); {_AGAIN}") from None


def _columns(schema: Any) -> list[Any]:
    return [schema.column(number) for number in range(len(schema.names))]


@dataclass(frozen=True)
class _Page:
    """A page's header: the bytes that the page takes in memory, the encodings of its values."""

    nbytes: int
    encodings: tuple[Any, ...]


# Of PageHeader: the fields of the kinds of pages, and in each of them those of the number of values and the encoding.
_KINDS = {5: (1, 2), 7: (1, 2), 8: (1, 4)}
_UNPACKED, _PACKED = 2, 3
# As much as pyarrow reads of a header, which may hold the smallest and the largest value.
_LONGEST_HEADER = 16 * 1024 * 1024


def _pages(file: BinaryIO, chunk: Any, a_value: int) -> Iterator[_Page]:
    """Yield the pages of a column in a row group, each value counted as `a_value` bytes more.

    Raises ValueError for headers that are none, OSError.
    """
    at, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
    if dictionary is not None and 0 < dictionary < at:
        at = dictionary
    end, left = at + chunk.total_compressed_size + _PADDING, chunk.num_values
    while left > 0:
        header, length = _header(file.fileno(), at)
        nbytes, packed = header.get(_UNPACKED), header.get(_PACKED)
        if type(nbytes) is not int or type(packed) is not int or min(nbytes, packed) < 0 or at + length > end:
            raise ValueError("a page without a size")
        encodings: list[Any] = []
        for field, (count, encoding) in _KINDS.items():
            kind = header.get(field)
            if isinstance(kind, dict):
                values = kind.get(count)
                if type(values) is not int or values < 0:
                    raise ValueError("a page without a number of values")
                nbytes += values * a_value
                encodings.append(kind.get(encoding))
                # A dictionary holds values that pages say.
                left -= 0 if field == 7 else values
        yield _Page(nbytes, tuple(encodings))
        at += length + packed


def _header(handle: int, at: int) -> tuple[dict[int, Any], int]:
    """Read a page's header by the numbers of its fields, and its length in bytes. Raises ValueError, OSError."""
    most = 1024
    while True:
        read = _Thrift(os.pread(handle, most, at))
        try:
            return read.struct(), read.at
        except IndexError:
            if len(read.content) < most or most >= _LONGEST_HEADER:
                raise ValueError("a page's header is cut off, or too long") from None
        most *= 8


class _Thrift:
    """A struct in Thrift's compact protocol. Its methods raise IndexError where the bytes end early, ValueError."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Read the fields by their numbers; texts and lists are passed over."""
        if depth > 8:
            raise ValueError("a header nested too deep")
        found: dict[int, Any] = {}
        field = 0
        while (head := self._byte()) != 0:
            field = field + (head >> 4) if head >> 4 else self._number()
            # A truth value is in the kind itself.
            found[field] = None if head & 15 in (1, 2) else self._value(head & 15, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        match kind:
            case 1 | 2 | 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._number()
            case 7:
                return self._pass_over(8)
            case 8:
                return self._pass_over(self._varint())
            case 9 | 10:
                head = self._byte()
                for _ in range(head >> 4 if head >> 4 < 15 else self._varint()):
                    self._value(head & 15, depth + 1)
                return None
            case 12:
                return self.struct(depth + 1)
        raise ValueError("a header of unknown kinds")

    def _byte(self) -> int:
        found = self.content[self.at]
        self.at += 1
        return found

    def _pass_over(self, count: int) -> None:
        self.at += count
        if self.at > len(self.content):
            raise IndexError

    def _varint(self) -> int:
        found = shift = 0
        while True:
            byte = self._byte()
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _number(self) -> int:
        found = self._varint()
        return (found >> 1) ^ -(found & 1)
