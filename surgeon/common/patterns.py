"""Matching of names with regular expressions from an untrusted file, at a limited cost.

Python's `re` tries alternatives one after another: `(\\w+\\.?)+X` takes time that doubles with every letter of a name.
Here all positions that a match can have reached are followed at once, and the steps of all matches of a file are
counted.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from functools import lru_cache
from re import _constants as parts  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from surgeon.errors import BadInput, printable

# This many steps take less than a minute. Four patterns for each of 70,000 modules take a third of them.
_MOST_STEPS = 50_000_000
_PLAIN = re.compile(r"[\w.-]+")


class Matcher:
    """A matcher of names with the patterns of one file or setting, which errors call `where`."""

    def __init__(self, where: str) -> None:
        self._where, self._left = where, _MOST_STEPS

    def ends(self, pattern: str, name: str, starts: Iterable[int] = (0,)) -> set[int]:
        """Return the positions at which matches that begin at `starts` can end.

        In a plain name (letters, digits, `.`, `-`) a dot matches only a dot. Raises BadInput for an invalid pattern or
        one with parts that module names do not need, and where the file's patterns take too many steps.
        """
        if _PLAIN.fullmatch(pattern):
            self._count(1)
            return {at + len(pattern) for at in starts if name.startswith(pattern, at)}
        try:
            return self._after(_parsed(pattern), name, set(starts))
        except (re.error, RecursionError, OverflowError) as error:
            why = "it nests too deep" if isinstance(error, RecursionError) else printable(str(error), 80)
        raise BadInput(
            f"{self._where}: the pattern {printable(repr(pattern), 80)} cannot be read ({why}); write names of modules"
        )

    def whole(self, pattern: str, name: str, starts: Iterable[int] = (0,)) -> bool:
        """Return whether a match from one of `starts` reaches the end of the name."""
        return len(name) in self.ends(pattern, name, starts)

    def _count(self, steps: int) -> None:
        """Subtract steps from those left. Raises BadInput where none are left."""
        self._left -= steps
        if self._left < 0:
            raise BadInput(f"{self._where}: its patterns take too long to match; write fewer and simpler ones")

    def _after(self, tree: Any, name: str, starts: set[int]) -> set[int]:
        """Return the positions at which matches of a parsed pattern that begin at `starts` can end."""
        for part, given in tree:
            self._count(1 + len(starts))
            match part:
                case parts.BRANCH:
                    starts = set().union(*(self._after(each, name, starts) for each in given[1]))
                # All ends of a repetition are followed; lazy and greedy repetitions have the same ends.
                case parts.MAX_REPEAT | parts.MIN_REPEAT:
                    starts = self._repeated(given, name, starts)
                case parts.SUBPATTERN if not given[1] and not given[2]:
                    starts = self._after(given[3], name, starts)
                case parts.ASSERT | parts.ASSERT_NOT if given[0] > 0:
                    wanted = part is parts.ASSERT
                    starts = {at for at in starts if bool(self._after(given[1], name, {at})) is wanted}
                case parts.LITERAL:
                    letter = chr(given)
                    starts = {at + 1 for at in starts if name.startswith(letter, at)}
                case parts.AT:
                    starts = {at for at in starts if _is_at(given, name, at)}
                case _:
                    starts = {at + 1 for at in starts if _takes(part, given, name[at : at + 1])}
        return starts

    def _repeated(self, given: Any, name: str, starts: set[int]) -> set[int]:
        """Return the positions at which repetitions that begin at `starts` can end.

        `given` is (least, most, repeated part).
        """
        least, most, tree = given
        for _ in range(least):
            before, starts = starts, self._after(tree, name, starts)
            if starts == before:
                break
        found, new = set(starts), starts
        if most == parts.MAXREPEAT and tree.data == [(parts.ANY, None)] and starts:
            return set(range(min(starts), len(name) + 1))
        for _ in range(most - least):
            new = self._after(tree, name, new) - found
            if not new:
                break
            found |= new
        return found


@lru_cache(maxsize=10_000)
def _parsed(pattern: str) -> Any:
    """Return the parse tree of a pattern. Raises re.error where it is invalid or sets flags."""
    with warnings.catch_warnings(action="ignore"):
        tree = _parser.parse(pattern)
    if tree.state.flags != re.UNICODE:
        raise re.error("flags are not read")
    return tree


def _takes(part: Any, given: Any, letter: str) -> bool:
    """Return whether a part of a pattern matches a letter; an empty letter never matches."""
    match part:
        case parts.LITERAL:
            return letter == chr(given)
        case parts.ANY | parts.NOT_LITERAL:
            return letter != "" and (given is None or letter != chr(given))
        case parts.IN:
            negated = given[0][0] is parts.NEGATE
            # With `negated` (true counts as 1), the mark of the negation itself is skipped.
            return letter != "" and negated != any(_takes(each, of, letter) for each, of in given[negated:])
        case parts.RANGE:
            return bool(given[0] <= ord(letter) <= given[1])
        case parts.CATEGORY if given in (parts.CATEGORY_DIGIT, parts.CATEGORY_WORD):
            return letter.isdecimal() or (given is parts.CATEGORY_WORD and (letter.isalnum() or letter == "_"))
    raise re.error(f"{str(part if given is None else given).lower()} is not read")


def _is_at(where: Any, name: str, at: int) -> bool:
    """Return whether a position of a name is its beginning, its end, or the edge of a word."""
    match where:
        case parts.AT_BEGINNING:
            return at == 0
        case parts.AT_END:
            return at == len(name)
        case parts.AT_BOUNDARY:
            word = (parts.CATEGORY, parts.CATEGORY_WORD)
            return _takes(*word, name[:at][-1:]) != _takes(*word, name[at : at + 1])
    raise re.error(f"{str(where).lower()} is not read")
