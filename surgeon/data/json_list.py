"""The entries of a JSON list in a file, one after another: at most one entry is in memory."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from surgeon.checkpoint.text_lines import MAX_DOCUMENT_BYTES, parsed, too_long
from surgeon.errors import BadInput, printable

# What stands around an entry: white space, and what begins, separates and ends a list.
_SPACE = re.compile(rb"[ \t\n\r]*+")
# A bracket, or a string; a string that is not closed extends to the end.
_TOKEN = re.compile(rb'[\[\]{}]|"[^"\\]*+(?:\\.[^"\\]*+)*+("|\\?\Z)', re.DOTALL)
_SCALAR_ENDS = re.compile(rb"[,\]}\s]")
_LINE_END = re.compile(rb"\n")
_AGAIN = "get the file again, or leave it out"


def entries_of(file: BinaryIO, shown: str) -> Iterator[tuple[int, int, int, Any]]:
    """Yield (begin, end, line, value) for each entry of a list, which begins with the file's first bracket.

    Begin and end are byte positions in the file. Raises BadInput (prefix `shown`, the file's name) where the file is no
    list, no JSON or not UTF-8, and for an entry of more than `MAX_DOCUMENT_BYTES`.
    """
    # The system keeps in memory what is being read, and no more than there is room for.
    held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    place, line = held.find(b"["), 1
    line += _lines(held, 0, place)
    first, following = True, b","
    while following == b",":
        begin = _after_space(held, place + 1)
        line += _lines(held, place, begin)
        if first and held[begin : begin + 1] == b"]":
            place, following = begin, b"]"
            break
        end = _end(held, begin, f"{shown}:{line}")
        yield begin, end, line, parsed(held[begin:end], f"{shown}:{line}", _AGAIN)
        first, place = False, _after_space(held, end)
        line += _lines(held, begin, place)
        following = held[place : place + 1]
    if following == b"]":
        behind = _after_space(held, place + 1)
        if behind == len(held):
            return
        line += _lines(held, place, behind)
        place = behind
    rest = held[place : place + 20].decode("utf-8", "replace")
    found = printable(repr(rest)) if rest else "the file's end, cut off perhaps"
    raise BadInput(
        f"{printable(shown)}:{line}: no list of objects (expected `,` or its `]` and end, found {found}); make"
        f" it one, or write one object a line, or {_AGAIN}"
    )


def _lines(held: mmap.mmap, begin: int, end: int) -> int:
    """Return the number of line ends between two positions."""
    return sum(1 for _ in _LINE_END.finditer(held, begin, end))


def _after_space(held: mmap.mmap, place: int) -> int:
    """Return the position of the next byte that is no white space, at `place` or behind it."""
    found = _SPACE.match(held, place)
    assert found is not None
    return found.end()


def _end(held: mmap.mmap, begin: int, where: str) -> int:
    """Return the position behind the value that begins at `begin`: the file's end where the value is not closed.

    Raises BadInput (prefix `where`) where the value has more bytes than a document may have.
    """
    most = min(len(held), begin + MAX_DOCUMENT_BYTES + 1)
    end = most
    if held[begin : begin + 1] in (b"{", b"[", b'"'):
        depth = 0
        for found in _TOKEN.finditer(held, begin, most):
            depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(found[0], 0)
            if depth <= 0:
                end = found.end()
                break
    elif (after := _SCALAR_ENDS.search(held, begin, most)) is not None:
        end = after.start()
    if end - begin > MAX_DOCUMENT_BYTES:
        raise too_long(where, "this entry")
    return end
