"""`--minutes`: how much of a study there is time for, so that what is made of it compares every row alike.

A study that does not fit loses seeds first, and then rates, those at the ends first: fewer seeds leave a comparison
unsure, while a row that lacks its rate is compared unfairly. So runs are made in rounds (schedule.py), and a round that
does not fit is not begun.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from surgeon.common.listener import Quiet
from surgeon.errors import BadInput
from surgeon.lab.studies.schedule import Round, Run

SECONDS_FILE = "seconds.jsonl"
# By so many steps a run's time is judged; the first ones are slower than others.
_STEPS_TO_JUDGE = 5


@dataclass
class Budget:
    """How long a call may take (None: as long as it takes), and how long runs took: in this call, and in earlier ones.

    Times are wall seconds; `at_once` runs are made at a time, and those of rounds that were begun are `allowed`.
    """

    minutes: float | None
    earlier: tuple[float, ...] = ()
    at_once: int = 1
    made: list[float] = field(default_factory=list)
    allowed: set[Run] = field(default_factory=set)
    begun: float = field(default_factory=time.monotonic)

    @property
    def is_known(self) -> bool:
        """Whether it is known how long a run takes."""
        return bool(self.made or self.earlier)

    @property
    def spent(self) -> float:
        """Seconds of this call so far."""
        return time.monotonic() - self.begun

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return math.inf if self.minutes is None else 60 * self.minutes - self.spent

    @property
    def each(self) -> float:
        """Seconds that a run takes: in the mean of this call, else as the fastest of earlier ones; 0: nothing known."""
        if self.made:
            return fmean(self.made)
        return min(self.earlier, default=0.0)

    def needed(self, runs: int) -> float:
        """Seconds that so many more runs take."""
        return math.ceil(runs / self.at_once) * self.each

    def fits(self, runs: int) -> bool:
        """Whether so many more runs would end in time."""
        return self.needed(runs) <= self.left

    def check(self) -> None:
        """Raise BadInput where no run fits, as far as it is known."""
        if self.fits(1) and self.left > 0:
            return
        if self.is_known:
            wrong = f"too little for one run, which took {duration(self.each)}"
        else:
            wrong = f"what comes before the first run took {duration(self.spent)}, and is kept; no run began"
        raise BadInput(
            f"--minutes {self.minutes:g}: {wrong}; give --minutes {minutes_for(self.spent + self.each)} or more"
        )

    def allow(self, rounds: Iterable[Round], busy: Collection[Run]) -> list[Run]:
        """The runs that may begin now, beside those that are under way: of rounds that are begun, or fit as a whole."""
        found: list[Run] = []
        for runs, begun in rounds:
            waiting = [run for run in runs if run not in busy]
            new = [run for run in waiting if run not in self.allowed]
            if new and not begun and not self.fits(len(busy) + len(found) + len(new)):
                break
            self.allowed |= {*new}
            found += waiting
        return found if self.fits(1) else []

    def expected(self, rounds: Sequence[tuple[int, int]], waiting: int) -> str:
        """After the first run: how long the others take, or what there is time for, and what is left out.

        Args:
            rounds: of each round that is left its seed, and how many runs.
            waiting: how many rows have no run so far.
        """
        runs = [count for _, count in rounds]
        if self.minutes is None:
            return f"a run took {duration(self.each)}: {sum(runs)} more take about {duration(self.needed(sum(runs)))}"
        whole = next((end for end in range(len(runs), 0, -1) if self.fits(sum(runs[:end]))), 0)
        line = (
            f"a run took {duration(self.each)}: --minutes {self.minutes:g} is enough for {{}} of {sum(runs)} more runs"
        )
        if not self.fits(waiting):
            some = next(count for count in range(waiting, -1, -1) if self.fits(count))
            enough = minutes_for(self.spent + self.needed(waiting))
            return f"{line.format(some)}; for one of each row, before which there is no advice, give --minutes {enough}"
        if whole == len(runs):
            return line.format(sum(runs))
        return f"{line.format(sum(runs[:whole]))}; left out: {left_out(rounds[whole:])}"


def left_out(rounds: Sequence[tuple[int, int]]) -> str:
    """What is left out of a study, seed by seed; of the first one rates, those at the ends."""
    by_seed: dict[int, int] = {}
    for seed, runs in rounds:
        by_seed[seed] = by_seed.get(seed, 0) + runs
    words = [f"{runs} of seed {seed}{'' if seed else ' (the rates at the ends)'}" for seed, runs in by_seed.items()]
    return ", ".join(words)


class Deadline(Quiet):
    """The listener of the first run of a study: ends it as soon as it is known that it would end too late.

    `minutes` is what was given, of which so many `seconds` are left.
    """

    def __init__(self, minutes: float, seconds: float) -> None:
        super().__init__()
        self.minutes, self.seconds = minutes, seconds
        self.created = self.before = time.monotonic()
        self.steps = self.done = 0

    def begin(self, stage: str, total: int, unit: str = "bytes") -> None:
        """Of the stage that makes steps, note how many they are."""
        self.steps, self.done = (total if unit == "steps" else 0), 0
        self.before = time.monotonic()

    def advance(self, count: int) -> None:
        """Count the steps. Raises BadInput where all of them take longer than is left."""
        self.done += count
        if self.done < min(_STEPS_TO_JUDGE, self.steps) or not self.steps:
            return
        now = time.monotonic()
        whole = self.before - self.created + (now - self.before) * self.steps / self.done
        if whole > self.seconds:
            enough = minutes_for(60 * self.minutes - self.seconds + whole)
            raise BadInput(
                f"--minutes {self.minutes:g}: too little for one run, which takes about {duration(whole)}; give"
                f" --minutes {enough} or more, or fewer steps"
            )


def earlier_seconds(work: Path) -> tuple[float, ...]:
    """How long the runs of earlier calls took in this work folder; a line that says nothing is left out."""
    found = []
    try:
        lines = (work / SECONDS_FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return ()
    for line in lines:
        try:
            seconds = float(json.loads(line)["seconds"])
        except (ValueError, TypeError, KeyError):
            continue
        if 0 < seconds < math.inf:
            found.append(seconds)
    return tuple(found)


def minutes_for(seconds: float) -> int:
    """Whole minutes that are enough."""
    return math.floor(seconds / 60) + 1


def duration(seconds: float) -> str:
    """As people say it."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
