"""Text files, read line by line with bounded memory: no line, and no value in it, takes more than a document may."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from surgeon.checkpoint.strict_json import MAX_ITEMS, count_items
from surgeon.common.library import first_line
from surgeon.errors import BadInput, printable

# The longest text that is read as one document, in bytes; the longest novels have ten million.
MAX_DOCUMENT_BYTES = 32 * 1024 * 1024
# A shorter line can only contain few values, so its values are not counted.
_SHORT = 1024 * 1024


def text_lines(file: BinaryIO, shown: str) -> Iterator[bytes]:
    """Yield the lines of an open file with their line ends.

    Raises BadInput (prefix `shown`) for a line that is too long. At most `MAX_DOCUMENT_BYTES` plus one byte of the file
    are in memory at a time.
    """
    number = 0
    while line := file.readline(MAX_DOCUMENT_BYTES + 1):
        number += 1
        if len(line) > MAX_DOCUMENT_BYTES:
            raise too_long(f"{shown}:{number}", "this line")
        yield line


def too_long(where: str, what: str) -> BadInput:
    """Return the error for `what` (a line or a row) at `where` that has more than `MAX_DOCUMENT_BYTES` bytes."""
    return BadInput(
        f"{printable(where)}: {what} has more than {MAX_DOCUMENT_BYTES:,} bytes, the most that one document may have;"
        " cut it into several"
    )


def check_values(line: bytes, where: str) -> None:
    """Raise BadInput (prefix `where`) for JSON whose values would take far more memory than its bytes."""
    if len(line) > _SHORT and count_items(line) > MAX_ITEMS:
        raise BadInput(
            f"{printable(where)}: more than {MAX_ITEMS:,} values in one document; is it a text, or a table of numbers?"
        )


def parsed(content: bytes, where: str, do: str) -> Any:
    """Return the JSON value of a line, or of a text's beginning.

    Raises BadInput (prefix `where`) where the text is not UTF-8, not JSON (the error then ends with the advice `do`),
    or has too many values.
    """
    check_values(content, where)
    try:
        # With or without the byte order mark of Windows editors.
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{printable(where)}: not UTF-8 text (byte {error.start} of the line); save it as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        # json counts lines from this text's beginning, so its line number is left out.
        flaw = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else first_line(error)
        raise BadInput(f"{printable(where)}: not JSON ({flaw}); {do}") from None
