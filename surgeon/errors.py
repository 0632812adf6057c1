"""The errors that are meant for the user.

Every error carries one line that names the file, line or tensor, what was found and what to do (`Mistakes`: several
such lines), and the exit code the command line ends with (0 done, 1 a bug of ours, 2 bad input or refused, 3 a promise
does not hold, 130 interrupted).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class SurgeonError(Exception):
    """Base of every error that is meant for the user; `exit_code` is the command line's exit status."""

    exit_code = 2


class BadInput(SurgeonError):
    """Something the user gave (plan, checkpoint, option) is wrong or is refused."""

    exit_code = 2


class Mistakes(BadInput):
    """Several things of what the user gave are wrong: a line each, in the order of the file."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return Mistakes, (self.lines,)


def bad_input(lines: Sequence[str]) -> BadInput:
    """The error for what is wrong, a line each: one alone is said as every other error is."""
    return BadInput(lines[0]) if len(lines) == 1 else Mistakes(lines)


@contextmanager
def said_of(place: str) -> Iterator[None]:
    """Put a folder's name before errors that do not begin with it: a command may be given several folders."""
    try:
        yield
    except BadInput as error:
        if not str(error).startswith((f"{place}:", f"{place}/")):
            error.args = (f"{place}: {error}",)
        raise


class PromiseBroken(SurgeonError):
    """A checkpoint does not hold what its manifest promises."""

    exit_code = 3


class Diverged(SurgeonError):
    """The loss or the gradient of a training run is no number any more."""

    exit_code = 2


def printable(text: str, limit: int = 200) -> str:
    """`text` with every control or invisible character escaped and the middle cut beyond `limit` characters.

    Names of files, tensors and keys come from checkpoints and plans that anybody can write; they reach
    terminal, log and card only through this.
    """
    if len(text) <= limit and text.isprintable():
        return text
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    if len(shown) > limit:
        half = (limit - 1) // 2
        shown = f"{shown[:half]}…{shown[-half:]}"
    return shown
