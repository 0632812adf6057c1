"""The kind of file or folder at a path, judged by names and first lines only, and a check for swapped arguments."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from surgeon.checkpoint.folder import CONFIG_FILE, DELTA_FILE, MANIFEST_FILE
from surgeon.common.files import read_given
from surgeon.common.places import meant
from surgeon.errors import BadInput, printable

Kind = Literal[
    "a plan",
    "a training config",
    "a tasks file",
    "a data file",
    "a study",
    "a checkpoint",
    "an output of surgeon",
    "a delta",
    "a file",
    "a folder",
    "a name of the Hub or of a plan",
    "nothing yet",
]

# The kind of a YAML file, by the key that gives the version of its format.
_FORMATS: dict[str, Kind] = {
    "surgeon": "a plan",
    "surgeon_train": "a training config",
    "surgeon_continual": "a tasks file",
    "surgeon_data": "a data file",
    "surgeon_study": "a study",
}
_FORMAT = re.compile(r"^[{\s]*[\"']?(surgeon(?:_[a-z]+)?)[\"']?\s*:", re.MULTILINE)
_MOST_READ = 1_000_000
_HUB_OR_PLAN = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", re.ASCII)

NAME: Kind = "a name of the Hub or of a plan"
NEW: Kind = "nothing yet"
CHECKPOINTS: frozenset[Kind] = frozenset({"a checkpoint", "an output of surgeon"})


class Argument(NamedTuple):
    """An argument of a command: its name, the given value, and the kinds that it accepts."""

    called: str
    given: str
    takes: frozenset[Kind]


def kind_of(given: str) -> Kind:
    """Return the kind of `given`. Never raises BadInput: anything that cannot be examined counts as a file."""
    try:
        path = Path(meant(given))
        if path.is_dir():
            return _folder_kind({entry.name for entry in path.iterdir()})
        if not os.path.lexists(path):
            # A name of two parts may be a path or a Hub id; only a name that cannot be a Hub id is surely a path.
            return NAME if _HUB_OR_PLAN.fullmatch(given) else NEW
        if path.suffix in (".yaml", ".yml"):
            text = read_given(path, what="file", most=_MOST_READ).decode("utf-8", "replace")
            return next((_FORMATS[key] for key in _FORMAT.findall(text) if key in _FORMATS), "a file")
    except (OSError, ValueError, BadInput):
        pass
    return "a file"


def _folder_kind(names: set[str]) -> Kind:
    """Return the kind of a folder, judged by the names in it."""
    if DELTA_FILE in names:
        return "a delta"
    if MANIFEST_FILE in names:
        return "an output of surgeon"
    return "a checkpoint" if CONFIG_FILE in names else "a folder"


def mixed_up(arguments: Sequence[Argument]) -> str:
    """Return a line on arguments that look swapped or misplaced; "" where all fit, or nothing is recognised.

    Where another order makes every kind fit its place, the line asks whether arguments were swapped. Else it names an
    argument of a kind that its place never accepts.
    """
    kinds = [kind_of(argument.given) for argument in arguments]
    wrong = [number for number, kind in enumerate(kinds) if not _fits(kind, arguments[number])]
    if not wrong:
        return ""
    orders = [order for order in itertools.permutations(range(len(kinds))) if _all_fit(order, kinds, arguments)]
    # The order that moves the fewest arguments.
    order = min(orders, key=lambda order: sum(n != place for place, n in enumerate(order)), default=None)
    if order is not None:
        moved = [arguments[place].called for place, number in enumerate(order) if place != number]
        return f"did you swap {' and '.join([', '.join(moved[:-1]), moved[-1]])}?"
    # A destination that exists is no argument of another kind: its own error says so.
    wrong = [number for number in wrong if NEW not in arguments[number].takes]
    first = next((number for number in wrong if kinds[number] not in ("a file", "a folder", NAME, NEW)), None)
    if first is None:
        return ""
    argument = arguments[first]
    expected = " or ".join(sorted(argument.takes - {NAME})) or "a Hub id"
    return f"{printable(argument.given)} is {kinds[first]}, {argument.called} takes {expected}"


def _all_fit(order: Sequence[int], kinds: Sequence[Kind], arguments: Sequence[Argument]) -> bool:
    """Return whether every argument fits when place n receives the argument number `order[n]`."""
    return all(_fits(kinds[number], arguments[place]) for place, number in enumerate(order))


def _fits(kind: Kind, argument: Argument) -> bool:
    """Return whether an argument accepts a file or folder of this kind."""
    return kind in argument.takes
