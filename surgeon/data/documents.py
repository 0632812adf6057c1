"""Where training text comes from: JSON, JSON lines, plain text, parquet; indexed once, then read document by document.

The index pass reads every file whole, so that a broken line is reported before the first step. It keeps two numbers a
document; texts stay on disk.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from surgeon.checkpoint.hub import first_line
from surgeon.data.layouts import Document, Labelled, columns_of, document_of
from surgeon.errors import BadInput, printable

_SPACE = re.compile(r"[ \t\n\r]*")
# UTF-8, with or without the mark that Windows' editors begin a file with.
_UTF8, _MARK = "utf-8-sig", "\ufeff"

# A plain text is cut at line ends into documents of about this many bytes, so that it can be shuffled and held out.
PIECE = 8000
_AGAIN = "get the file again, or leave it out"
_KINDS = (".jsonl", ".json", ".txt", ".parquet")
_OTHERS = dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz"), "unpack it") | dict.fromkeys(
    (".csv", ".tsv", ".xlsx", ".arrow"), "write it as JSON lines or parquet"
)


class Corpus(Protocol):
    """The documents of one source, by number, the same ones for as long as `identity` is the same."""

    # How many documents have no words: they are left out and have no number.
    blank: int

    @property
    def shown(self) -> str:
        """The name that errors use."""

    def __len__(self) -> int:
        """The number of documents."""

    def read(self, number: int) -> Document:
        """One document: its text, with its label, or the messages of a chat. Raises BadInput if it cannot be read."""

    def identity(self) -> list[Any]:
        """JSON data that must be the same when a run is continued."""


class Documents:
    """The documents of files, by number. A parquet file stays open until another one is read."""

    def __init__(self, path: Path, *, key: str | None, chat: bool, labels: bool = False) -> None:
        """Index `path` (a file, or a folder of files); `key` holds the text or messages (None: as `layouts` has it).

        With `labels` each text has one, which plain text files do not hold. Raises BadInput for a missing, unreadable
        or empty file and for the first line that is not a document.
        """
        self.path = path
        self.key = key
        self.chat = chat
        self.labels = labels
        self.files = files_of(path)
        if labels and (plain := next((file for file in self.files if file.suffix == ".txt"), None)) is not None:
            raise BadInput(
                f"{printable(str(plain))}: plain text, which holds no labels; write JSON lines of text and label"
            )
        self.blank = 0
        pieces = [self._index(number, file) for number, file in enumerate(self.files)]
        self._places: NDArray[np.int64] = np.concatenate(pieces)
        self._groups: dict[tuple[int, int], list[Any]] = {}
        if not len(self._places):
            raise BadInput(f"{printable(str(path))}: no document with text; a source needs some text")

    @property
    def shown(self) -> str:
        """The name that errors use."""
        return str(self.path)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self._places)

    def read(self, number: int) -> Document:
        """One document: its text, or the messages of a chat. Raises BadInput where a file has changed."""
        file, begin, end = (int(value) for value in self._places[number])
        path = self.files[file]
        if path.suffix == ".parquet":
            return self._document(self._row(file, begin, end), f"{path}, row {end}")
        try:
            with path.open("rb") as handle:
                handle.seek(begin)
                content = handle.read(end - begin)
        except OSError as error:
            raise BadInput(f"{printable(str(path))}: cannot be read ({error.strerror}); check the path") from None
        if path.suffix == ".txt":
            return content.decode(_UTF8)
        return self._parsed(content, f"{path} (byte {begin}; changed since the run began?)")

    def _index(self, number: int, file: Path) -> NDArray[np.int64]:
        try:
            match file.suffix:
                case ".jsonl":
                    spans = list(self._lines(file))
                case ".json":
                    spans = list(self._entries(file))
                case ".txt":
                    spans = list(_pieces(file))
                case _:
                    spans = list(self._rows(file))
        except OSError as error:
            raise BadInput(f"{printable(str(file))}: cannot be read ({error.strerror}); check the path") from None
        places = np.array(spans, dtype=np.int64).reshape(-1, 2)
        return np.column_stack([np.full(len(places), number, dtype=np.int64), places])

    def _lines(self, file: Path) -> Iterator[tuple[int, int]]:
        begin = 0
        with file.open("rb") as handle:
            for number, line in enumerate(handle, 1):
                end = begin + len(line)
                if line.strip():
                    if is_blank(self._parsed(line, f"{file}:{number}")):
                        self.blank += 1
                    else:
                        yield begin, end
                begin = end

    def _parsed(self, line: bytes, where: str) -> Document:
        try:
            entry = json.loads(line.decode(_UTF8))
        except UnicodeDecodeError as error:
            raise BadInput(
                f"{printable(where)}: not UTF-8 text (byte {error.start} of the line); save it as UTF-8"
            ) from None
        except (ValueError, RecursionError) as error:
            raise BadInput(
                f"{printable(where)}: not JSON ({printable(str(error))}); expected one object a line"
            ) from None
        return self._document(entry, where)

    def _entries(self, file: Path) -> Iterator[tuple[int, int]]:
        """Begin and end, in bytes, of every object of a JSON file that holds a list of them."""
        shown = printable(str(file))
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"{shown}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
        decoder = json.JSONDecoder()
        place = _after_space(text, text.startswith(_MARK))
        if text[place : place + 1] != "[":
            raise BadInput(f"{shown}: not a list of objects; one object a line is what .jsonl means")
        place, counted, length = _after_space(text, place + 1), 0, 0
        while text[place : place + 1] != "]" or counted:
            try:
                entry, end = decoder.raw_decode(text, place)
            except (ValueError, RecursionError) as error:
                raise BadInput(f"{shown}: not JSON ({printable(str(error))}); {_AGAIN}") from None
            number = text.count("\n", 0, place) + 1
            length += len(text[counted:place].encode())
            begin, counted = length, end
            length += len(text[place:end].encode())
            if is_blank(self._document(entry, f"{file}:{number}")):
                self.blank += 1
            else:
                yield begin, length
            place = _after_space(text, end)
            if text[place : place + 1] != ",":
                break
            place = _after_space(text, place + 1)
        if text[place:].rstrip() != "]":
            line = text.count("\n", 0, place) + 1
            rest = printable(repr(text[place : place + 20])) if place < len(text) else "the file's end, cut off perhaps"
            raise BadInput(f"{shown}:{line}: not JSON (expected `,` or the list's `]`, found {rest}); {_AGAIN}")

    def _rows(self, file: Path) -> Iterator[tuple[int, int]]:
        """Row group and row within it, of every row whose text is not blank."""
        opened = _parquet(file)
        columns = self._columns(opened, file)
        for group in range(opened.num_row_groups):
            for row, entry in enumerate(_rows_of(opened, group, columns, file)):
                if is_blank(self._document(entry, f"{file}, row {row} of group {group}")):
                    self.blank += 1
                else:
                    yield group, row

    def _row(self, file: int, group: int, row: int) -> Any:
        if (file, group) not in self._groups:
            while len(self._groups) >= 4:
                self._groups.pop(next(iter(self._groups)))
            path = self.files[file]
            opened = _parquet(path)
            self._groups[file, group] = _rows_of(opened, group, self._columns(opened, path), path)
        return self._groups[file, group][row]

    def identity(self) -> list[Any]:
        """Name, size and mtime of every file, which must be the same when a run is continued."""
        return stamps(self.files)

    def _columns(self, opened: Any, file: Path) -> list[str]:
        return columns_of(opened.schema_arrow.names, self.key, chat=self.chat, where=str(file), labels=self.labels)

    def _document(self, entry: Any, where: str) -> Document:
        return document_of(entry, where, key=self.key, chat=self.chat, labels=self.labels)


def stamps(files: Sequence[Path]) -> list[Any]:
    """Name, size and mtime of files."""
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


class Repeated:
    """As many documents as are said to be there, of which some are: these, over and over."""

    def __init__(self, documents: Sequence[Document], count: int, *, shown: str) -> None:
        self.blank = 0
        self._documents = list(documents)
        self._count = count
        self._shown = shown

    @property
    def shown(self) -> str:
        """The name that errors use."""
        return self._shown

    def __len__(self) -> int:
        """The number of documents that are said to be there."""
        return self._count

    def read(self, number: int) -> Document:
        """One document."""
        return self._documents[number % len(self._documents)]

    def identity(self) -> list[Any]:
        """No run is continued on documents that are only some of a text's."""
        raise NotImplementedError


def is_blank(document: Document) -> bool:
    """Whether a text has no word in it."""
    text = document.text + (document.pair or "") if isinstance(document, Labelled) else document
    return isinstance(text, str) and not text.strip()


def files_of(path: Path) -> list[Path]:
    """The files of a text: the file itself, or those in a folder. Raises BadInput where there is none to read."""
    shown = printable(str(path))
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in _KINDS and file.is_file())
        if not found:
            raise BadInput(
                f"{shown}: no {', '.join(_KINDS)} in this folder; put the texts there, or name another folder"
            )
        return found
    if not os.path.lexists(path):
        raise BadInput(f"{shown}: no such file or folder; check the path")
    if not path.is_file():
        raise BadInput(f"{shown}: not a regular file; give a file or a folder")
    if path.suffix not in _KINDS:
        do = _OTHERS.get(path.suffix.lower(), "rename it")
        raise BadInput(f"{shown}: the name ends in none of {', '.join(_KINDS)}, so its format is not known; {do}")
    return [path]


def _pieces(file: Path) -> Iterator[tuple[int, int]]:
    """Begin and end of every piece in bytes; BadInput where a line is not UTF-8."""
    begin = end = 0
    seen = False
    with file.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            try:
                seen = bool(line.decode(_UTF8).strip()) or seen
            except UnicodeDecodeError as error:
                raise BadInput(
                    f"{printable(str(file))}:{number}: not UTF-8 text (byte {error.start} of the line); save it as"
                    " UTF-8"
                ) from None
            end += len(line)
            if end - begin >= PIECE:
                if seen:
                    yield begin, end
                begin, seen = end, False
    if seen:
        yield begin, end


def _parquet(file: Path) -> Any:
    """The opened file; BadInput where it is not parquet, or pyarrow is not there to read it."""
    shown = printable(str(file))
    try:
        import pyarrow.parquet
    except ImportError:
        raise BadInput(
            f"{shown}: parquet is read with pyarrow, which is not installed; install surgeon[parquet]"
        ) from None
    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowException as error:
        raise BadInput(f"{shown}: not a parquet file that can be read ({first_line(error)}); {_AGAIN}") from None


def _rows_of(opened: Any, group: int, columns: list[str], file: Path) -> list[Any]:
    """The rows of a row group, of these columns; BadInput where they are damaged."""
    import pyarrow

    try:
        rows: list[Any] = opened.read_row_group(group, columns=columns).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise BadInput(
            f"{printable(str(file))}: row group {group} cannot be read ({first_line(error)}); {_AGAIN}"
        ) from None
    return rows


def _after_space(text: str, place: int) -> int:
    """The next place that is no white space of JSON."""
    found = _SPACE.match(text, place)
    return place if found is None else found.end()
