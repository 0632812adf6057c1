"""The entries of a JSON list in a file, one after another: at most one entry is in memory."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from surgeon.checkpoint.text_lines import MAX_DOCUMENT_BYTES, parsed, too_long
from surgeon.errors import BadInput, printable

_PIECE = 64 * 1024
_SPACE = re.compile(rb"[ \t\n\r]*")
# A bracket, or a string; a string that is not closed extends to the end.
_TOKEN = re.compile(rb'[\[\]{}]|"[^"\\]*+(?:\\.[^"\\]*+)*+("|\\?\Z)', re.DOTALL)
_SCALAR_ENDS = re.compile(rb"[,\]}\s]")
_AGAIN = "get the file again, or leave it out"


def entries_of(file: BinaryIO, shown: str) -> Iterator[tuple[int, int, int, Any]]:
    """Yield (begin, end, line, value) for each entry; begin and end are byte positions in the file.

    Raises BadInput (prefix `shown`, the file's name) where the file is no list, no JSON or not UTF-8, and for an entry
    of more than `MAX_DOCUMENT_BYTES`.
    """
    read = _Reader(file, shown)
    if read.next_byte(mark=True) != b"[":
        raise BadInput(f"{printable(shown)}: not a list of objects; one object a line is what .jsonl means")
    read.pass_over(1)
    first = True
    while (following := read.next_byte()) != b"]" or not first:
        begin, line = read.place, read.line
        value = read.value()
        yield begin, read.place, line, value
        first = False
        if (following := read.next_byte()) != b",":
            break
        read.pass_over(1)
    if following == b"]":
        read.pass_over(1)
        following = read.next_byte()
        if not following:
            return
    rest = printable(repr(read.ahead(20))) if following else "the file's end, cut off perhaps"
    raise BadInput(
        f"{printable(shown)}:{read.line}: no list of objects (expected `,` or its `]` and end, found {rest}); make"
        f" it one, or write one object a line, or {_AGAIN}"
    )


class _Reader:
    """A file that is read forwards; `place` is the position in bytes of the next byte, `line` its line number."""

    def __init__(self, file: BinaryIO, shown: str) -> None:
        self._file = file
        self._shown = shown
        self._held = bytearray()
        self.place = 0
        self.line = 1

    def _more(self) -> bool:
        """Read more bytes into memory, at least as many as are there already; return False at the file's end.

        The bytes in memory are the beginning of one value. Raises BadInput where they are too many.
        """
        self._check_length(len(self._held))
        found = self._file.read(max(_PIECE, len(self._held)))
        self._held += found
        return bool(found)

    def _check_length(self, count: int) -> None:
        """Raise BadInput where the current entry's `count` bytes are more than a document may have."""
        if count > MAX_DOCUMENT_BYTES:
            raise too_long(f"{self._shown}:{self.line}", "this entry")

    def pass_over(self, count: int) -> None:
        """Advance by `count` bytes, which must be in memory."""
        self.line += self._held.count(b"\n", 0, count)
        del self._held[:count]
        self.place += count

    def next_byte(self, *, mark: bool = False) -> bytes:
        """Return the next non-space byte without consuming it; b"" at the end.

        With `mark`, first skip a UTF-8 byte order mark.
        """
        if mark:
            while len(self._held) < len(codecs.BOM_UTF8) and self._more():
                pass
            if self._held.startswith(codecs.BOM_UTF8):
                self.pass_over(len(codecs.BOM_UTF8))
        while True:
            found = _SPACE.match(self._held)
            self.pass_over(0 if found is None else found.end())
            if self._held or not self._more():
                return bytes(self._held[:1])

    def ahead(self, count: int) -> str:
        """Return the next bytes as text, for errors."""
        return self._held[:count].decode("utf-8", "replace")

    def value(self) -> Any:
        """Return the value that begins here, and advance past it."""
        content = bytes(self._held[: self._end()])
        found = parsed(content, f"{self._shown}:{self.line}", _AGAIN)
        self.pass_over(len(content))
        return found

    def _end(self) -> int:
        """Return the number of bytes in memory up to the end of the value that begins here, or of the file."""
        if bytes(self._held[:1]) not in (b"{", b"[", b'"'):
            while (found := _SCALAR_ENDS.search(self._held)) is None and self._more():
                pass
            return len(self._held) if found is None else found.start()
        at = depth = 0
        while True:
            found = _TOKEN.search(self._held, at)
            # A string that is not closed in the bytes in memory may be closed later in the file.
            if found is None or found[0][:1] == b'"' != found[1]:
                at = len(self._held) if found is None else found.start()
                if not self._more():
                    return len(self._held)
                continue
            at = found.end()
            depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(found[0], 0)
            if depth <= 0:
                self._check_length(at)
                return at
