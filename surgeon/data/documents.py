"""Where training text comes from: JSON lines, plain text, parquet; indexed once, then read document by document.

The index pass reads every file whole, so that a broken line is reported before the first step. It keeps two numbers a
document; texts stay on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from surgeon.checkpoint.hub import first_line
from surgeon.errors import BadInput, printable

# A plain text is cut at line ends into documents of about this many bytes, so that it can be shuffled and held out.
PIECE = 8000
_FIELD = "`field:` of the source names another key"
_AGAIN = "get the file again, or leave it out"
_KINDS = (".jsonl", ".txt", ".parquet")


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


Document = str | tuple[Message, ...]


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
        """One document: its text, or the messages of a chat. Raises BadInput where it cannot be read."""

    def identity(self) -> list[Any]:
        """JSON data that must be the same when a run is continued."""


class Documents:
    """The documents of files, by number. A parquet file stays open until another one is read."""

    def __init__(self, path: Path, *, key: str, chat: bool) -> None:
        """Index `path` (a file, or a folder of files); `key` holds the text or messages.

        Raises BadInput for a missing, unreadable or empty file and for the first line that is not a document.
        """
        self.path = path
        self.key = key
        self.chat = chat
        self.files = files_of(path)
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
            return content.decode("utf-8")
        return self._parsed(content, f"{path} (byte {begin}; changed since the run began?)")

    def _index(self, number: int, file: Path) -> NDArray[np.int64]:
        try:
            match file.suffix:
                case ".jsonl":
                    spans = list(self._lines(file))
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
            entry = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise BadInput(
                f"{printable(where)}: not UTF-8 text (byte {error.start} of the line); save it as UTF-8"
            ) from None
        except (ValueError, RecursionError) as error:
            raise BadInput(
                f"{printable(where)}: not JSON ({printable(str(error))}); expected one object a line"
            ) from None
        if not isinstance(entry, dict) or self.key not in entry:
            raise BadInput(
                f"{printable(where)}: no key `{printable(self.key)}`; `field:` of the source names another one"
            )
        return self._document(entry[self.key], where)

    def _rows(self, file: Path) -> Iterator[tuple[int, int]]:
        """Row group and row within it, of every row whose text is not blank."""
        opened = _parquet(file)
        if self.key not in opened.schema_arrow.names:
            raise BadInput(
                f"{printable(str(file))}: no column `{printable(self.key)}`; it has"
                f" {printable(', '.join(opened.schema_arrow.names))}; `field:` of the source names another one"
            )
        for group in range(opened.num_row_groups):
            for row, value in enumerate(_column(opened, group, self.key, file)):
                if is_blank(self._document(value, f"{file}, row {row} of group {group}")):
                    self.blank += 1
                else:
                    yield group, row

    def _row(self, file: int, group: int, row: int) -> Any:
        if (file, group) not in self._groups:
            while len(self._groups) >= 4:
                self._groups.pop(next(iter(self._groups)))
            path = self.files[file]
            self._groups[file, group] = _column(_parquet(path), group, self.key, path)
        return self._groups[file, group][row]

    def identity(self) -> list[Any]:
        """Name, size and mtime of every file, which must be the same when a run is continued."""
        return stamps(self.files)

    def _document(self, value: Any, where: str) -> Document:
        return document_of(value, where, key=self.key, chat=self.chat)


def stamps(files: Sequence[Path]) -> list[Any]:
    """Name, size and mtime of files."""
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def document_of(value: Any, where: str, *, key: str, chat: bool) -> Document:
    """The value under an entry's `key`, as a document. Raises BadInput, beginning with `where`, if it is not one."""
    if not chat:
        if isinstance(value, str):
            return checked_text(value, where)
        raise BadInput(f"{printable(where)}: `{printable(key)}` is {printable(repr(value), 40)}, not a text; {_FIELD}")
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadInput(f"{printable(where)}: `{printable(key)}` is not a list of messages; {_FIELD}")
    messages: list[Message] = []
    for nth, message in enumerate(value, 1):
        ours = isinstance(message, dict) and all(isinstance(message.get(part), str) for part in ("role", "content"))
        if not ours:
            raise BadInput(f"{printable(where)}: message {nth} has no `role` and `content` that are text; add them")
        role, content = (checked_text(message[part], f"{where}, message {nth}") for part in ("role", "content"))
        messages.append(Message(role, content))
    if not any(message.role == "assistant" for message in messages):
        raise BadInput(
            f"{printable(where)}: no message of the role `assistant`, so there is nothing to train on; remove this chat"
        )
    return tuple(messages)


def checked_text(text: str, where: str) -> str:
    """The text; BadInput, beginning with `where`, for half of a UTF-16 pair in it, which nothing can encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(
            f"{printable(where)}: character {error.start + 1} of the text is half of a UTF-16 pair"
            f" ({printable(text[error.start])}), which no tokenizer takes; remove or replace it"
        ) from None
    return text


def is_blank(document: Document) -> bool:
    """Whether a text has no word in it."""
    return isinstance(document, str) and not document.strip()


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
        raise BadInput(f"{shown}: the name ends in none of {', '.join(_KINDS)}, so its format is not known; rename it")
    return [path]


def _pieces(file: Path) -> Iterator[tuple[int, int]]:
    """Begin and end of every piece in bytes; BadInput where a line is not UTF-8."""
    begin = end = 0
    seen = False
    with file.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            try:
                seen = bool(line.decode("utf-8").strip()) or seen
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


def _column(opened: Any, group: int, key: str, file: Path) -> list[Any]:
    """The values of one column in a row group; BadInput where they are damaged."""
    import pyarrow

    try:
        values: list[Any] = opened.read_row_group(group, columns=[key])[key].to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise BadInput(
            f"{printable(str(file))}: row group {group} cannot be read ({first_line(error)}); {_AGAIN}"
        ) from None
    return values
