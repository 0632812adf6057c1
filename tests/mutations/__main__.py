"""`python -m tests.mutations [ROOM…]`: each mistake of `by_room` in a copy of its own, on which its room's tests run.

`--mechanical COUNT SEED ROOM…` takes mistakes that nobody chose instead (mechanical.py), of which some change nothing.

Prints a line for each as it is done: the room, the mistake, and the first test that noticed it; exit code 1 where one
was not noticed, or no longer finds the line that it changes. Takes about half a minute for each.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.mutations.by_room import MISTAKES, Mistake
from tests.mutations.mechanical import drawn
from tests.mutations.planting import plant, run_tests


def noticed(mistake: Mistake) -> str:
    """The first test of the mistake's room that fails; "" where none does. AssertionError as `plant`'s."""
    with tempfile.TemporaryDirectory(prefix="surgeon-mistake-") as folder:
        plant(mistake.edits, Path(folder))
        ran = run_tests([sys.executable], Path(folder), [f"tests/{mistake.room}"], most=1)
    if ran.code not in (0, 1):
        raise AssertionError(f"pytest ended with {ran.code}: {ran.text[-1000:]}")
    return ran.failed[0] if ran.failed else ""


def main(*arguments: str) -> int:
    missed = 0
    if arguments[:1] == ("--mechanical",):
        mistakes = [*drawn(int(arguments[1]), int(arguments[2]), [*arguments[3:]])]
    else:
        mistakes = [mistake for mistake in MISTAKES if not arguments or mistake.room in arguments]
    for mistake in mistakes:
        try:
            by = noticed(mistake)
        except AssertionError as error:
            by, missed = f"NOT TRIED ({error})", missed + 1
        missed += not by
        print(f"| {mistake.room} | {mistake.words} | {by or 'NOT NOTICED'} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
