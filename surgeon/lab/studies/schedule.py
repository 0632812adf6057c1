"""Which runs a study wants, given those that are finished: rates extend until a method's best is inside them.

The set depends on results alone, never on the order in which runs end, so any number of workers ends with the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from surgeon.lab.studies.config.entries import MethodSpec, Remedy
from surgeon.lab.studies.config.schema import Study
from surgeon.lab.studies.frontier import Pair

# Extended rates stay between these.
_LOWEST, _HIGHEST = 1e-8, 1.0


@dataclass(frozen=True)
class Run:
    """One run of a study: a method with a remedy, at a rate, by a seed."""

    method: str
    remedy: str
    rate: float
    seed: int

    @property
    def key(self) -> str:
        """Its name in files."""
        return f"{self.method}+{self.remedy}+{self.rate:.6g}+{self.seed}"

    @property
    def words(self) -> str:
        """Its name for people."""
        return f"{self.method}, {self.remedy}, rate {self.rate:.6g}, seed {self.seed}"


class Rates(NamedTuple):
    """The rates of an entry, ascending; whether its best is known to be inside them, and if not, why it stops."""

    rates: tuple[float, ...]
    settled: bool
    open_end: str = ""


# By run, its losses on new and original text; infinite where it diverged.
Losses = Mapping[Run, Pair]


def rates_of(study: Study, method: MethodSpec, remedy: Remedy, losses: Losses) -> Rates:
    """The rates of an entry as far as its first seed's runs decide.

    It is extended upwards while the highest rate learns most, downwards while the lowest has the smallest sum of both
    losses. Not settled where a run is missing that decides.
    """
    rates = study.rates_of(method, remedy)
    while True:
        found = [losses.get(Run(method.called, remedy.name, rate, 0)) for rate in rates]
        points = [point for point in found if point is not None]
        if len(points) < len(rates):
            return Rates(tuple(rates), False)
        if not study.extend:
            return Rates(tuple(rates), True)
        more, why = _next(rates, points, study.most_rates)
        if more is None:
            return Rates(tuple(rates), True, why)
        rates = sorted([*rates, more])


def _next(rates: Sequence[float], points: Sequence[Pair], most: int) -> tuple[float | None, str]:
    """The rate that is to be tried too, or why none is although the best lies at an end."""
    learned = [new for new, _ in points]
    both = [new + original for new, original in points]
    if learned[-1] == min(learned) and math.isfinite(learned[-1]):
        more, end = _beyond(rates[-1], rates[-2], rates[-3]), "highest"
    elif both[0] == min(both) or not math.isfinite(min(both)):
        more, end = _beyond(rates[0], rates[1], rates[2]), "lowest"
    else:
        return None, ""
    if len(rates) >= most or not _LOWEST <= more < _HIGHEST:
        return None, f"its best may lie beyond its {end} rate, {rates[-1 if end == 'highest' else 0]:g}"
    return more, ""


def _beyond(end: float, second: float, third: float) -> float:
    """The next rate: as far from the second as the end is from the third, so 1e-3, 3e-3, 1e-2 goes on with 3e-2."""
    return float(f"{second * end / third:.3g}")


def runs_left(study: Study, losses: Losses) -> Iterator[Run]:
    """Yield the runs that are not finished, in the order in which they are made; there may be more as runs finish.

    Method by method, first with one seed, so that few grown models are there at a time.
    """
    for seed in range(_seeds(study)):
        for runs in _by_entry(study, losses, seed):
            yield from (run for run in runs if run not in losses)


class Round(NamedTuple):
    """Runs that treat all rows alike, those that are left; `begun`: some of it are finished, or it is the first."""

    runs: list[Run]
    begun: bool


def rounds_left(study: Study, losses: Losses) -> Iterator[Round]:
    """Yield the same runs in rounds: with the first seed a rate of every row, the middle ones first.

    A further seed is one round: where some rates have more seeds than others, a mean over seeds is of the seeds too.
    """
    for seed in range(_seeds(study)):
        rounds = [
            [run for run in column if run is not None]
            for column in itertools.zip_longest(*_by_entry(study, losses, seed))
        ]
        for number, wanted in enumerate(rounds if seed == 0 else [[*itertools.chain(*rounds)]]):
            if left := [run for run in wanted if run not in losses]:
                yield Round(left, len(left) < len(wanted) or seed == number == 0)


def sizes_left(study: Study, losses: Losses) -> list[tuple[int, int]]:
    """The seed of each round that is left, and how many runs; rates that are not known yet are as many as are known."""
    found = [(0, len(each.runs)) for each in rounds_left(study, losses) if each.runs[0].seed == 0]
    for seed in range(1, _seeds(study)):
        entries = [(m, r) for m, r in study.entries if seed < study.seeds_of(m)]
        wanted = [Run(m.called, r.name, rate, seed) for m, r in entries for rate in rates_of(study, m, r, losses).rates]
        found.append((seed, sum(run not in losses for run in wanted)))
    return [each for each in found if each[1]]


def _seeds(study: Study) -> int:
    return max(study.seeds_of(method) for method in study.all_methods)


def _by_entry(study: Study, losses: Losses, seed: int) -> list[list[Run]]:
    """All runs of a seed, entry by entry, the middle rates first; seeds beyond the first once rates are known."""
    found = []
    for method, remedy in study.entries:
        rates = rates_of(study, method, remedy, losses)
        if seed < study.seeds_of(method) and (rates.settled or not seed):
            found.append([Run(method.called, remedy.name, rate, seed) for rate in from_the_middle(rates.rates)])
    return found


def from_the_middle(rates: Sequence[float]) -> list[float]:
    """The rates, those in the middle first: of a study that is cut short they say most."""
    middle = (len(rates) - 1) / 2
    return sorted(rates, key=lambda rate: (abs(rates.index(rate) - middle), rate))
