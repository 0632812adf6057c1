"""Files of training text: JSON, JSON lines, plain text, parquet; indexed once, then read document by document.

The index pass reads every file to its end, so that a broken line is reported before the first step. It keeps two
numbers a document; texts stay on disk. A document has at most `MAX_DOCUMENT_BYTES`.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Never, Protocol

import numpy as np
from numpy.typing import NDArray

from surgeon.checkpoint.source import open_regular, resolved
from surgeon.checkpoint.text_lines import check_values, json_flaw, text_lines
from surgeon.data.json_list import entries_of
from surgeon.data.layouts import Document, Labelled, columns_of, document_of
from surgeon.data.parquet import MAX_GROUP_BYTES, ParquetTexts
from surgeon.errors import BadInput, printable

# UTF-8, with or without the mark that Windows' editors begin a file with.
_UTF8 = "utf-8-sig"

# A plain text is cut at line ends into documents of about this many bytes, so that it can be shuffled and held out.
PIECE = 8000
# Read of each file before anything that takes long is imported.
_FIRST_ROWS = 8
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
        """Read one document: its text, with its label, or the messages of a chat. Raises BadInput if unreadable."""

    def identity(self) -> list[Any]:
        """JSON data that must be the same when a run is continued."""


class Documents:
    """The documents of files, by number. Of parquet files at most `MAX_GROUP_BYTES` stay in memory."""

    def __init__(
        self, path: Path, *, key: str | None, chat: bool, labels: bool = False, most: int | None = None
    ) -> None:
        """Index `path` (a file, or a folder of files); `key` holds the text or messages (None: as `layouts` has it).

        With `labels` each text has one, which plain text files do not hold. With `most` no more documents of each file
        are read. Raises BadInput for a missing, unreadable or empty file and for the first line that is no document.
        """
        self.path = path
        self.key = key
        self.chat = chat
        self.labels = labels
        self.files = text_files(path)
        if labels and (plain := next((file for file in self.files if file.suffix == ".txt"), None)) is not None:
            raise BadInput(
                f"{printable(str(plain))}: plain text, which holds no labels; write JSON lines of text and label"
            )
        self.blank = 0
        pieces = [self._index(number, file, most) for number, file in enumerate(self.files)]
        self._places: NDArray[np.int64] = np.concatenate(pieces)
        # Row groups as tables, by the numbers of file and group, and the bytes of each.
        self._groups: dict[tuple[int, int], tuple[Any, int]] = {}
        if not len(self._places):
            raise BadInput(f"{printable(str(path))}: no document with text; a source needs some text")

    @classmethod
    def check_begin(cls, path: Path, *, key: str | None, chat: bool, labels: bool) -> None:
        """Raise BadInput for what is wrong in the first rows of each file, as reading it all would."""
        cls(path, key=key, chat=chat, labels=labels, most=_FIRST_ROWS)

    @property
    def shown(self) -> str:
        """The name that errors use."""
        return str(self.path)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self._places)

    def read(self, number: int) -> Document:
        """Read one document: its text, or the messages of a chat. Raises BadInput where a file has changed."""
        file, begin, end = (int(value) for value in self._places[number])
        path = self.files[file]
        if path.suffix == ".parquet":
            return self._document(self._row(file, begin, end), f"{path}, row {end}")
        try:
            with self._open(path) as handle:
                handle.seek(begin)
                content = handle.read(end - begin)
        except OSError as error:
            raise BadInput(f"{printable(str(path))}: cannot be read ({error.strerror}); check the path") from None
        if path.suffix == ".txt":
            return content.decode(_UTF8)
        return self._parsed(content, f"{path} (byte {begin}; changed since the run began?)")

    def _open(self, file: Path) -> BinaryIO:
        """Open a file, which must lie in its folder; only the links of a file that was named itself are followed."""
        if file is self.path:
            place = Path(os.path.realpath(file))
            return os.fdopen(open_regular(place.parent, place.name), "rb")
        return os.fdopen(open_regular(self.path, str(file.relative_to(self.path))), "rb")

    def _index(self, number: int, file: Path, most: int | None) -> NDArray[np.int64]:
        readers = {".jsonl": self._lines, ".json": self._entries, ".txt": self._pieces}
        try:
            spans = list(itertools.islice(readers.get(file.suffix, self._rows)(file), most))
        except OSError as error:
            raise BadInput(f"{printable(str(file))}: cannot be read ({error.strerror}); check the path") from None
        places = np.array(spans, dtype=np.int64).reshape(-1, 2)
        return np.column_stack([np.full(len(places), number, dtype=np.int64), places])

    def _lines(self, file: Path) -> Iterator[tuple[int, int]]:
        begin = 0
        with self._open(file) as handle:
            for number, line in enumerate(text_lines(handle, str(file)), 1):
                end = begin + len(line)
                if line.strip():
                    if is_blank(self._parsed(line, f"{file}:{number}")):
                        self.blank += 1
                    else:
                        yield begin, end
                begin = end

    def _parsed(self, line: bytes, where: str) -> Document:
        check_values(line, where)
        try:
            entry = json.loads(line.decode(_UTF8))
        except UnicodeDecodeError as error:
            raise BadInput(
                f"{printable(where)}: not UTF-8 text (byte {error.start} of the line); save it as UTF-8"
            ) from None
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{printable(where)}: not JSON ({json_flaw(error)}); expected one object a line") from None
        return self._document(entry, where)

    def _entries(self, file: Path) -> Iterator[tuple[int, int]]:
        """Return begin and end, in bytes, of every object of a JSON file that holds a list of them."""
        with self._open(file) as handle:
            for begin, end, line, entry in entries_of(handle, str(file)):
                if is_blank(self._document(entry, f"{file}:{line}")):
                    self.blank += 1
                else:
                    yield begin, end

    def _pieces(self, file: Path) -> Iterator[tuple[int, int]]:
        """Return begin and end of every piece in bytes. Raises BadInput where a line is not UTF-8."""
        begin = end = 0
        seen = False
        with self._open(file) as handle:
            for number, line in enumerate(text_lines(handle, str(file)), 1):
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

    def _rows(self, file: Path) -> Iterator[tuple[int, int]]:
        """Return row group and row within it for every row whose text is not blank."""
        with self._open(file) as handle:
            opened = ParquetTexts(handle, file)
            columns = self._columns(opened, file)
            for group in range(opened.groups):
                for row, entry in enumerate(opened.rows(group, columns)):
                    if is_blank(self._document(entry, f"{file}, row {row} of group {group}")):
                        self.blank += 1
                    else:
                        yield group, row

    def _row(self, file: int, group: int, row: int) -> Any:
        if (file, group) not in self._groups:
            path = self.files[file]
            with self._open(path) as handle:
                opened = ParquetTexts(handle, path)
                columns = self._columns(opened, path)
                nbytes = opened.check_group(group, columns)
                while sum(size for _, size in self._groups.values()) + nbytes > MAX_GROUP_BYTES and self._groups:
                    self._groups.pop(next(iter(self._groups)))
                self._groups[file, group] = opened.table(group, columns), nbytes
        table, _ = self._groups[file, group]
        return {name: table.column(number)[row].as_py() for number, name in enumerate(table.column_names)}

    def identity(self) -> list[Any]:
        """Name, size and mtime of every file, which must be the same when a run is continued."""
        return stamps(self.files)

    def _columns(self, opened: ParquetTexts, file: Path) -> list[str]:
        return columns_of(opened.names, self.key, chat=self.chat, where=str(file), labels=self.labels)

    def _document(self, entry: Any, where: str) -> Document:
        return document_of(entry, where, key=self.key, chat=self.chat, labels=self.labels)


def stamps(files: Sequence[Path]) -> list[Any]:
    """Name, size and mtime of files."""
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


class Repeated:
    """A few documents that stand for `count` of them, over and over."""

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
        """Read one document."""
        return self._documents[number % len(self._documents)]

    def identity(self) -> list[Any]:
        """No run is continued on documents that are only some of a text's."""
        raise NotImplementedError


def is_blank(document: Document) -> bool:
    """Whether a text has no word in it."""
    text = document.text + (document.pair or "") if isinstance(document, Labelled) else document
    return isinstance(text, str) and not text.strip()


def text_files(path: Path) -> list[Path]:
    """Return the files of a text: the file itself, or those in a folder.

    Raises BadInput where there is none to read, and for a link that leads out of the folder or to another folder.
    """
    shown = printable(str(path))
    if path.is_dir():
        found = sorted(_texts_below(path))
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


def _texts_below(folder: Path) -> Iterator[Path]:
    """The files in a folder whose names say that they are texts, in its subfolders too."""
    for place, folders, names in os.walk(folder, onerror=_refuse_folder):
        for name in folders:
            if (Path(place) / name).is_symlink():
                raise BadInput(
                    f"{printable(str(Path(place) / name))}: a link to a folder, which is not followed; put the texts"
                    " themselves here, or name that folder as a source of its own"
                )
        for file in (Path(place) / name for name in names):
            if file.suffix in _KINDS:
                resolved(folder, str(file.relative_to(folder)))
                yield file


def _refuse_folder(error: OSError) -> Never:
    raise BadInput(
        f"{printable(str(error.filename))}: cannot be read ({error.strerror}); make it readable, or move it elsewhere"
    )
