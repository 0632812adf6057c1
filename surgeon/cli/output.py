"""What a command prints: its result on stdout, progress on stderr."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from surgeon.common.json_results import Result

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from surgeon.common.listener import ProgressListener


def console() -> Console:
    """The terminal, or the file or pipe in its place."""
    from rich.console import Console

    # File names and tensor names are shown as they are: no markup, no emoji codes, no guessing at what is a number.
    # In a file or a pipe a table keeps its columns: there is no window width to fold it to.
    terminal = sys.stdout.isatty()
    width = None if terminal or "COLUMNS" in os.environ else 160
    file = None if terminal else cast(IO[str], _Unpadded(sys.stdout))
    return Console(markup=False, emoji=False, highlight=False, width=width, file=file)


class _Unpadded:
    """A file or pipe that gets lines without the spaces that fill a table's last column."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write text."""
        return self._file.write(re.sub(r" +$", "", text, flags=re.M))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def listening(quiet: bool) -> Iterator[ProgressListener]:
    """Show progress on stderr, unless `quiet`, and first which library is newer than any that was tested."""
    from surgeon.common.installation import untested
    from surgeon.common.listener import ProgressListener

    with ProgressListener(quiet=quiet) as listener:
        for line in filter(None, map(untested, ("transformers", "torch"))):
            listener.say(line)
        yield listener


def show(result: Result, view: Callable[[Any], RenderableType], *, as_json: bool, quiet: bool = False) -> None:
    """Print a result by its view, or as JSON; with `quiet` as JSON alone."""
    if as_json:
        print_json(result.to_json())
    elif not quiet:
        console().print(view(result))


def print_json(data: Any) -> None:
    """Print data as JSON."""
    print(json.dumps(data, indent=2, ensure_ascii=True))
