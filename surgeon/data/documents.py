"""Files of training text (JSON, JSON lines, plain text, parquet): indexed once, then read document by document.

The index pass reads every file to its end, so that a broken line is reported before the first step. The index has four
numbers per document; texts stay on disk. A document has at most `MAX_DOCUMENT_BYTES`. Compressed files are unpacked to
a temporary file, where any document can be read.
"""

from __future__ import annotations

import codecs
import gzip
import itertools
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Never, Protocol

import numpy as np
from numpy.typing import NDArray

from surgeon.checkpoint.source import open_regular, resolved
from surgeon.checkpoint.text_lines import MAX_DOCUMENT_BYTES, parsed, text_lines
from surgeon.common.files import read_given
from surgeon.common.library import first_line
from surgeon.data.json_list import entries_of
from surgeon.data.layouts import Document, bytes_of, columns_of, document_of
from surgeon.data.parquet import ParquetFiles
from surgeon.data.rows import Row, Rows
from surgeon.data.specs import RowsSpec
from surgeon.errors import BadInput, printable

# UTF-8, with or without the byte order mark of Windows editors.
_UTF8 = "utf-8-sig"

# A plain text is cut at line ends into documents of about this many bytes, so that they can be shuffled and held out.
PIECE = 8000
# Rows of each file that are checked before slow imports; bytes of a JSON file that are read to tell a list from lines.
_FIRST_ROWS, _BEGINNING = 8, 4096
_KINDS = (".jsonl", ".json", ".txt", ".parquet")
# A first line that begins an object without ending it.
_OPEN_OBJECT = re.compile(rb'\{\s*(?:"[^"\\]*"\s*:\s*\[?\s*)?[\r\n]')
_GZIPPED = b"\x1f\x8b"
# Beginnings of files that are no text, whatever their names and even where some lines are text.
_NO_TEXTS = {
    codecs.BOM_UTF16_LE: "UTF-16; save it as UTF-8",
    b"PK\x03\x04": "a zip file; unpack it",
    _GZIPPED: "compressed twice; unpack it once",
    b"version https://git-lfs": "Git LFS's pointer to a file; run `git lfs pull` where it is from",
}
_OTHERS = dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz"), "unpack it") | dict.fromkeys(
    (".csv", ".tsv", ".xlsx", ".arrow"), "write it as JSON lines or parquet"
)


class Corpus(Protocol):
    """The documents of one source, by number; they are the same as long as `identity` is the same."""

    # Counts the rows that are left out and have no number.
    rows: Rows

    @property
    def shown(self) -> str:
        """The source's name in error messages."""

    def __len__(self) -> int:
        """Return the number of documents."""

    def read(self, number: int) -> Document:
        """Read one document: its text, with its label, or the messages of a chat. Raises BadInput if unreadable."""

    def where(self, number: int) -> str:
        """Return the place of a document, for errors."""

    def identity(self) -> list[Any]:
        """Return JSON data that must be unchanged when a run is continued."""


class Documents:
    """The documents of files, by number."""

    def __init__(self, path: Path, rows: Rows, *, most: int | None = None) -> None:
        """Index `path`, a file or a folder of files.

        For the kind `labels` each text needs a label, which plain text files lack. With `most`, at most this many rows
        of each file are read, unless some are bad. Raises BadInput for a missing, unreadable or empty file, and for bad
        rows.
        """
        self.path = path
        self.shown = str(path)
        self.rows = rows
        self.files = text_files(path)
        plain = next((file for file in self.files if format_of(file) == ".txt"), None)
        if rows.spec.kind == "labels" and plain is not None:
            raise BadInput(
                f"{printable(str(plain))}: plain text, which holds no labels; write JSON lines of text and label"
            )
        parquet = {number: file for number, file in enumerate(self.files) if format_of(file) == ".parquet"}
        self._parquet = ParquetFiles(parquet, self._open) if parquet else None
        # The columns of each parquet file that contain documents.
        self._columns: dict[int, list[str]] = {}
        pieces = [self._index(number, file, most) for number, file in enumerate(self.files)]
        self._places: NDArray[np.int64] = np.concatenate(pieces)
        if not len(self._places):
            raise BadInput(f"{printable(str(path))}: no document with text; a source needs some text")

    @classmethod
    def begin(cls, path: Path, spec: RowsSpec) -> Documents:
        """Read the first rows of each file. Raises BadInput for faults in them, as reading the whole file would."""
        return cls(path, Rows(spec), most=_FIRST_ROWS)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._places)

    def read(self, number: int) -> Document:
        """Read one document: its text, or the messages of a chat. Raises BadInput where a file has changed."""
        file, begin, end, _ = (int(value) for value in self._places[number])
        path, where = self.files[file], self.where(number)
        if self._parquet is not None and file in self._columns:
            (entry,) = self._parquet.rows(file, begin, self._columns[file], end, 1)
            return self._document(entry, where)
        try:
            with self._open(path) as handle:
                handle.seek(begin)
                content = handle.read(end - begin)
        except OSError as error:
            raise BadInput(f"{printable(str(path))}: cannot be read ({error.strerror}); check the path") from None
        where += " (changed since the run began?)"
        return _plain(content, where) if format_of(path) == ".txt" else self._parsed(content, where)

    def where(self, number: int) -> str:
        """Return the place of a document, for errors."""
        file, group, row, line = (int(value) for value in self._places[number])
        return (
            f"{self.files[file]}, row {row} of group {group}" if file in self._columns else f"{self.files[file]}:{line}"
        )

    def _open(self, file: Path) -> BinaryIO:
        """Open a file, which must be inside its folder; links are followed only if the user named the file itself."""
        place = Path(os.path.realpath(file)) if file is self.path else file
        root = place.parent if file is self.path else self.path
        opened = os.fdopen(open_regular(root, str(place.relative_to(root))), "rb")
        # Detect gzip by content, not by name.
        if not opened.peek(2).startswith(_GZIPPED):
            return opened
        with opened:
            return unpacked(opened, str(file))

    def _index(self, number: int, file: Path, most: int | None) -> NDArray[np.int64]:
        """Read a file to its end; return its documents' places, (documents, 4), int64.

        A place is the file's number, begin and end in bytes, and the line; for parquet the file's number, row group,
        row and 0. With `most`, at most this many rows are read, unless some are bad. Raises BadInput for an unreadable
        file or bad rows.
        """
        readers: dict[str, Callable[[BinaryIO, Path], Iterator[Row]]] = {
            ".txt": self._pieces,
            ".parquet": partial(self._rows, number),
        }
        try:
            with self._open(file) as handle:
                # Detect the format by content: some .jsonl files contain a list, some .json files lines.
                beginning = handle.read(_BEGINNING)
                for begin, problem in _NO_TEXTS.items():
                    if beginning.startswith(begin):
                        raise BadInput(f"{printable(str(file))}: {problem}")
                beginning = beginning.removeprefix(codecs.BOM_UTF8).lstrip()
                a_list = beginning.startswith(b"[")
                read = readers.get(format_of(file), self._entries if a_list else self._lines)
                if read == self._lines and _OPEN_OBJECT.match(beginning):
                    _refuse_one_object(beginning + handle.read(MAX_DOCUMENT_BYTES), str(file))
                handle.seek(0)
                spans = list(self.rows.kept(read(handle, file), str(file), most))
        except OSError as error:
            raise BadInput(f"{printable(str(file))}: cannot be read ({error.strerror}); check the path") from None
        places = np.array(spans, dtype=np.int64).reshape(-1, 3)
        return np.column_stack([np.full(len(places), number, dtype=np.int64), places])

    def _lines(self, handle: BinaryIO, file: Path) -> Iterator[Row]:
        """Yield the rows of a file with one JSON object per line; blank lines are skipped."""
        begin = 0
        for number, line in enumerate(text_lines(handle, str(file)), 1):
            end = begin + len(line)
            if line.strip():
                where = f"{file}:{number}"
                yield (begin, end, number), where, partial(self._parsed, line, where)
            begin = end

    def _parsed(self, line: bytes, where: str) -> Document:
        """Return the document in a line of JSON. Raises BadInput (prefix `where`) where the line contains none."""
        return self._document(parsed(line, where, "write one object a line, or a list of objects"), where)

    def _entries(self, handle: BinaryIO, file: Path) -> Iterator[Row]:
        """Yield the objects of a JSON file that contains a list."""
        for begin, end, line, entry in entries_of(handle, str(file)):
            where = f"{file}:{line}"
            yield (begin, end, line), where, partial(self._document, entry, where)

    def _pieces(self, handle: BinaryIO, file: Path) -> Iterator[Row]:
        """Yield pieces of a plain text; a line that is not UTF-8 becomes a piece of its own."""
        begin, piece, first, before = 0, b"", 1, False
        for number, line in enumerate(itertools.chain(text_lines(handle, str(file)), [b""]), 1):
            broken = False
            try:
                line.decode(_UTF8)
            except UnicodeDecodeError:
                broken = True
            if piece and (before or broken or not line or len(piece) >= PIECE):
                where = f"{file}:{first}"
                yield (begin, begin + len(piece), first), where, partial(_plain, piece, where)
                begin, piece, first = begin + len(piece), b"", number
            piece, before = piece + line, broken

    def _rows(self, number: int, handle: BinaryIO, file: Path) -> Iterator[Row]:
        """Yield the rows of a parquet file by row group and row within it."""
        assert self._parquet is not None
        names, groups = self._parquet.head(number)
        columns = self._columns[number] = columns_of(names, self.rows.spec, str(file))
        for group in range(groups):
            first = 0
            while entries := self._parquet.rows(number, group, columns, first):
                for row, entry in enumerate(entries, first):
                    where = f"{file}, row {row} of group {group}"
                    yield (group, row, 0), where, partial(self._document, entry, where)
                first += len(entries)

    def identity(self) -> list[Any]:
        """Return the name, size and mtime of every file, which must be unchanged when a run is continued."""
        return stamps(self.files)

    def _document(self, entry: Any, where: str) -> Document:
        """Return the document in a parsed entry. Raises BadInput (prefix `where`) where the entry contains none."""
        return document_of(entry, self.rows.spec, where)


def stamps(files: Sequence[Path]) -> list[Any]:
    """Return the name, size and mtime of files."""
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


class Repeated:
    """A few documents that are repeated to simulate `count` documents."""

    def __init__(self, documents: Sequence[Document], count: int, *, shown: str) -> None:
        self.rows = Rows(RowsSpec())
        self.rows.sizes.extend(itertools.islice(itertools.cycle(map(bytes_of, documents)), count))
        self.shown = shown
        self._documents = list(documents)
        self._count = count

    def __len__(self) -> int:
        """Return the simulated number of documents."""
        return self._count

    def read(self, number: int) -> Document:
        """Read one document."""
        return self._documents[number % len(self._documents)]

    def where(self, _number: int) -> str:
        """Return the place of a document, for errors: the name of the text that the model writes."""
        return self.shown

    def identity(self) -> list[Any]:
        """Raise NotImplementedError: a run is never resumed on a sample, so it needs no identity."""
        raise NotImplementedError


def _refuse_one_object(content: bytes, shown: str) -> None:
    """Raise BadInput where a file is a single JSON object over several lines.

    Does nothing where `content` is no complete JSON: reading line by line then reports what is wrong.
    """
    try:
        found = parsed(content, shown, "")
    except BadInput:
        # Reading line by line will report what is wrong.
        return
    key = next((key for key, value in found.items() if isinstance(value, list)), None)
    rows = "" if key is None else f", with a list under `{printable(key, 40)}`: write that list alone, or"
    raise BadInput(f"{printable(shown)}: one object of JSON over several lines{rows or '; write'} one object a line")


def _plain(content: bytes, where: str) -> str:
    """Return bytes of a plain text, decoded as UTF-8. Raises BadInput (prefix `where`) where they are not UTF-8."""
    try:
        return content.decode(_UTF8)
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{printable(where)}: not UTF-8 text (byte {error.start} of the line); save it as UTF-8"
        ) from None


def given_lines(path: Path, *, what: str, most: int) -> list[str]:
    """Return the lines of a text file of at most `most` bytes. Errors (BadInput) call it `what`."""
    try:
        return read_given(path, what=what, most=most).decode(_UTF8).splitlines()
    except UnicodeDecodeError as error:
        raise BadInput(f"{printable(str(path))}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def format_of(file: Path) -> str:
    """Return the suffix that gives a file's format: the last one, or the one before `.gz`."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix == ".gz" else suffix


def text_files(path: Path) -> list[Path]:
    """Return the files of a text: the file itself, or the text files in a folder.

    Raises BadInput where there is none to read, and for a link that leads out of the folder or to another folder.
    """
    shown = printable(str(path))
    if path.is_dir():
        found = sorted(_texts_below(path))
        if not found:
            raise BadInput(
                f"{shown}: no {', '.join(_KINDS)} in this folder; put the texts there, or name another folder"
            )
        if path / "config.json" in found and any(each.suffix in (".safetensors", ".bin") for each in path.iterdir()):
            raise BadInput(f"{shown}: a checkpoint, not a text; give a file or folder of texts")
        return found
    if not os.path.lexists(path):
        raise BadInput(f"{shown}: no such file or folder; check the path")
    if not path.is_file():
        what = "not a regular file" if path.exists() else "a link to nowhere"
        raise BadInput(f"{shown}: {what}; give a file or a folder")
    if format_of(path) not in _KINDS:
        do = _OTHERS.get(path.suffix.lower(), "rename it")
        raise BadInput(f"{shown}: the name ends in none of {', '.join(_KINDS)}, so its format is not known; {do}")
    return [path]


def _texts_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders whose suffixes are those of texts."""
    for place, folders, names in os.walk(folder, onerror=_refuse_folder):
        # Skip hidden files, such as copies made by editors, notebooks and macOS.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if (Path(place) / name).is_symlink():
                raise BadInput(
                    f"{printable(str(Path(place) / name))}: a link to a folder, which is not followed; put the texts"
                    " themselves here, or name that folder as a source of its own"
                )
        for file in (Path(place) / name for name in names if not name.startswith(".")):
            if format_of(file) in _KINDS:
                resolved(folder, str(file.relative_to(folder)))
                yield file


def _refuse_folder(error: OSError) -> Never:
    """Raise BadInput for a folder that cannot be listed."""
    raise BadInput(
        f"{printable(str(error.filename))}: cannot be read ({error.strerror}); make it readable, or move it elsewhere"
    )


# Usual texts unpack to ten times their size, repetitive ones to somewhat more; files made to fill a disk to a thousand
# times. Small files may unpack to any multiple below `_SMALL` bytes.
_MOST_TIMES, _SMALL = 100, 64 * 1024 * 1024
_PIECE = 1024 * 1024


# Descriptors of the unpacked files of this process, by device, inode, size and mtime of the compressed file.
_HELD: dict[tuple[int, ...], int] = {}
# A child process (`surgeon.common.child`) forgets these descriptors and unpacks again itself.
os.register_at_fork(after_in_child=_HELD.clear)


def unpacked(packed: BinaryIO, shown: str) -> BinaryIO:
    """Unpack a gzip file to an unnamed temporary file, which disappears with the process, and return it opened.

    A file that is unchanged since this process unpacked it is not unpacked again. Raises BadInput (prefix `shown`) for
    a file that is damaged, unpacks to too much, or to more than the disk can hold.
    """
    about = os.fstat(packed.fileno())
    key = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
    if key not in _HELD:
        most = max(_SMALL, _MOST_TIMES * about.st_size)
        try:
            with tempfile.TemporaryFile() as found, gzip.GzipFile(fileobj=packed) as file:
                while piece := file.read(_PIECE):
                    if found.tell() + len(piece) > most:
                        raise BadInput(
                            f"{printable(shown)}: unpacks to more than {most:,} bytes, {_MOST_TIMES} times its size;"
                            " if you trust it, unpack it yourself"
                        )
                    found.write(piece)
                found.flush()
                _HELD[key] = os.dup(found.fileno())
        except (OSError, EOFError, zlib.error) as error:
            raise BadInput(
                f"{printable(shown)}: cannot be unpacked in {printable(tempfile.gettempdir())} ({first_line(error)});"
                " get the file again, or make room there (TMPDIR names another folder)"
            ) from None
    again = os.fdopen(os.dup(_HELD[key]), "rb")
    again.seek(0)
    return again
