"""One check of an output, as results and tables show it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

from surgeon.errors import printable


@dataclass(frozen=True)
class Check:
    """One thing that was promised, whether it holds, and what was found.

    A `note` holds, and names something that no promise covers and the reader should know.
    """

    name: str
    holds: bool
    detail: str
    note: bool = False

    @classmethod
    def of(cls, name: str, wrong: Collection[str], broken: str, kept: str) -> Check:
        """A check that holds, and says what is `kept`, where no name is `wrong`; else it says what is `broken`."""
        return cls(name, not wrong, f"{broken}: {some(wrong)}" if wrong else kept)


def some(names: Collection[str]) -> str:
    """The first three names, and how many more."""
    shown = ", ".join(printable(name) for name in islice(names, 3))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
