"""`--minutes`: how much of a study fits into the time, such that the comparison stays fair to all rows.

Where time is short, seeds are left out first, then rates, starting with the rates at the ends: fewer seeds only make a
comparison less certain, while a row that lacks its best rate is compared unfairly. So runs are made in rounds
(schedule.py), and a round that does not fit does not begin.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from surgeon.common.listener import Quiet
from surgeon.errors import BadInput
from surgeon.lab.studies.schedule import Round, Run

# A run's time is estimated from this many steps; the first steps are slower than later ones.
_STEPS_TO_JUDGE = 5


@dataclass
class Budget:
    """The time limit of a call in `minutes` (None: no limit), and the times `made` of its runs.

    Times are wall-clock seconds. `at_once` is the number of parallel runs. `allowed` contains the runs of the rounds
    that have begun.
    """

    minutes: float | None
    at_once: int = 1
    made: list[float] = field(default_factory=list)
    allowed: set[Run] = field(default_factory=set)
    begun: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        """Seconds since this call began."""
        return time.monotonic() - self.begun

    @property
    def left(self) -> float:
        """Seconds that are left; infinite without a limit."""
        return math.inf if self.minutes is None else 60 * self.minutes - self.spent

    @property
    def each(self) -> float:
        """Seconds per run, in the mean; 0 where no run was made yet."""
        return fmean(self.made) if self.made else 0.0

    def needed(self, runs: int) -> float:
        """Return the seconds that `runs` further runs take."""
        return math.ceil(runs / self.at_once) * self.each

    def fits(self, runs: int) -> bool:
        """Return whether `runs` further runs would end in time."""
        return self.needed(runs) <= self.left

    def check(self) -> None:
        """Raise BadInput where no time is left before the first run."""
        if self.left <= 0:
            raise BadInput(
                f"--minutes {self.minutes:g}: what comes before the first run took {duration(self.spent)}, and is kept;"
                f" no run began; give --minutes {minutes_for(self.spent)} or more"
            )

    def allow(self, rounds: Iterable[Round], busy: Collection[Run]) -> list[Run]:
        """Return the runs that may begin now, without runs in progress.

        They come from rounds that have begun, or that fit into the remaining time as a whole.
        """
        found: list[Run] = []
        for runs, begun in rounds:
            waiting = [run for run in runs if run not in busy]
            new = [run for run in waiting if run not in self.allowed]
            if new and not begun and not self.fits(len(busy) + len(found) + len(new)):
                break
            self.allowed |= {*new}
            found += waiting
        return found if self.fits(1) else []

    def expected(self, runs: int, waiting: int) -> str:
        """Return the message after the first run: how long the others take, or how many of them fit.

        Args:
            runs: how many runs are left.
            waiting: how many rows have no run so far.
        """
        took = f"a run took {duration(self.each)}"
        if self.minutes is None:
            return f"{took}: {runs} more take about {duration(self.needed(runs))}"
        fitting = next(count for count in range(runs, -1, -1) if self.fits(count) or not count)
        line = f"{took}: --minutes {self.minutes:g} is enough for about {fitting} of {runs} more runs"
        if fitting >= waiting:
            return line
        enough = minutes_for(self.spent + self.needed(waiting))
        return f"{line}; for one of each row, before which there is no advice, give --minutes {enough}"


def left_out(by_seed: Mapping[int, int]) -> str:
    """Return how many runs of each seed are left out, as text."""
    words = [f"{by_seed[seed]} of seed {seed}{'' if seed else ' (the rates at the ends)'}" for seed in sorted(by_seed)]
    return ", ".join(words)


class Deadline(Quiet):
    """A listener for a study's first run that stops the run as soon as it is clear that the run would end too late.

    `minutes` is the given limit, `seconds` the part of it that is left.
    """

    def __init__(self, minutes: float, seconds: float) -> None:
        """Begin to measure the time of the run."""
        super().__init__()
        self.minutes, self.seconds = minutes, seconds
        self.created = self.before = time.monotonic()
        self.steps = self.done = 0

    def begin(self, stage: str, total: int, unit: str = "bytes") -> None:
        """Store the number of steps where the stage counts steps."""
        self.steps, self.done = (total if unit == "steps" else 0), 0
        self.before = time.monotonic()

    def advance(self, count: int) -> None:
        """Count steps. Raises BadInput where all steps would take longer than the time that is left."""
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


def minutes_for(seconds: float) -> int:
    """Return the number of whole minutes that is enough for the seconds."""
    return math.floor(seconds / 60) + 1


def duration(seconds: float) -> str:
    """Return the time as text, in seconds or minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
