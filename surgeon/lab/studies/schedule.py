"""Which runs a study needs, given the finished ones; rates are added until a method's best rate is not at an end.

The set of runs depends only on results, never on the order in which runs end. So any number of workers makes the same
set.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from surgeon.lab.studies.config.entries import MethodSpec, Remedy
from surgeon.lab.studies.config.schema import Study
from surgeon.lab.studies.frontier import Pair

# Rates that are added stay between these bounds.
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
        """The run's name in files."""
        return f"{self.method}+{self.remedy}+{self.rate:.6g}+{self.seed}"

    @property
    def words(self) -> str:
        """The run's name for people."""
        return f"{self.method}, {self.remedy}, rate {self.rate:.6g}, seed {self.seed}"


class Rates(NamedTuple):
    """The rates of a method with a remedy, ascending.

    `settled` is whether no rate will be added. `open_end` is the reason why adding stopped although the best may lie
    beyond an end; else empty.
    """

    rates: tuple[float, ...]
    settled: bool
    open_end: str = ""


# The losses of each run on new and original text; infinite where the run diverged.
Losses = Mapping[Run, Pair]


def rates_of(study: Study, method: MethodSpec, remedy: Remedy, losses: Losses) -> Rates:
    """Return the rates of a method with a remedy, as far as the finished runs of the first seed determine them.

    A rate is added above while the highest rate learns most, and below while the lowest rate has the smallest sum of
    both losses. The rates are not settled while one of these runs is missing.
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
    """Return (the next rate to try, ""), or (None, why the best rate may be beyond an end; empty: it is not)."""
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
    """Return the rate beyond `end`: `second` · `end` / `third`, so 1e-3, 3e-3, 1e-2 continue with 3e-2."""
    return float(f"{second * end / third:.3g}")


def runs_left(study: Study, losses: Losses) -> Iterator[Run]:
    """Yield the runs that are not finished, in the order in which to make them; finished runs may add more.

    All methods run with the first seed before the second seed begins, one method after another, so that few grown
    models exist at a time.
    """
    for seed in range(_seeds(study)):
        for runs in _by_entry(study, losses, seed):
            yield from (run for run in runs if run not in losses)


class Round(NamedTuple):
    """The unfinished runs of a round, which treats all rows alike.

    `begun`: some run of the round is finished, or it is the first round.
    """

    runs: list[Run]
    begun: bool


def rounds_left(study: Study, losses: Losses) -> Iterator[Round]:
    """Yield the unfinished runs in rounds: for the first seed, one rate of every row, the middle rates first.

    Each further seed is one round: if only some rates had a further seed, means over seeds would compare different
    seeds.
    """
    for seed in range(_seeds(study)):
        rounds = [
            [run for run in column if run is not None]
            for column in itertools.zip_longest(*_by_entry(study, losses, seed))
        ]
        for number, wanted in enumerate(rounds if seed == 0 else [[*itertools.chain(*rounds)]]):
            if left := [run for run in wanted if run not in losses]:
                yield Round(left, len(left) < len(wanted) or seed == number == 0)


def left_by_seed(study: Study, losses: Losses) -> Counter[int]:
    """Return how many runs of each seed are not finished, counting only the rates that are known so far."""
    return Counter(
        seed
        for method, remedy in study.entries
        for rate in rates_of(study, method, remedy, losses).rates
        for seed in range(study.seeds_of(method))
        if Run(method.called, remedy.name, rate, seed) not in losses
    )


def _seeds(study: Study) -> int:
    """Return the largest number of seeds of any method."""
    return max(study.seeds_of(method) for method in study.all_methods)


def _by_entry(study: Study, losses: Losses, seed: int) -> list[list[Run]]:
    """Return all runs of a seed, one list for each method with a remedy, middle rates first.

    Seeds after the first are included only where the rates are settled.
    """
    found = []
    for method, remedy in study.entries:
        rates = rates_of(study, method, remedy, losses)
        if seed < study.seeds_of(method) and (rates.settled or not seed):
            found.append([Run(method.called, remedy.name, rate, seed) for rate in from_the_middle(rates.rates)])
    return found


def from_the_middle(rates: Sequence[float]) -> list[float]:
    """Return the rates, the middle ones first: they are the most informative in a study that is cut short."""
    middle = (len(rates) - 1) / 2
    return sorted(rates, key=lambda rate: (abs(rates.index(rate) - middle), rate))
