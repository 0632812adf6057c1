"""One check of an output, for results and tables."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from surgeon.common.formatting import listed


@dataclass(frozen=True)
class Check:
    """A checked promise: its name, whether it holds, and what was found.

    A `note` always holds; it reports something that no promise covers and the reader should know.
    """

    name: str
    holds: bool
    detail: str
    note: bool = False

    @classmethod
    def of(cls, name: str, wrong: Collection[str], broken: str, kept: str) -> Check:
        """Return a failed check with the text `broken` and the `wrong` names, if any; else one that holds (`kept`)."""
        return cls(name, not wrong, f"{broken}: {some(wrong)}" if wrong else kept)


def some(names: Collection[str]) -> str:
    """Return the first three names, and the number of further ones."""
    return listed(names, 3)
