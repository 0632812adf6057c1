"""Frontiers of finished runs, how they are compared, and what a difference says: arithmetic on losses alone.

A point is (loss on new text, loss on original text) of a run whose schedule ended. The frontier of a method is the
lower-left envelope of its points: those that no other point beats on both axes, joined by straight lines. Two frontiers
are compared where both have points: by the mean difference on one axis at equal value of the other.

Two frontiers that share hardly any losses have a difference all the same, and of sixty intervals of 95 % three exclude
0 by chance. So a verdict needs a range in common, and Holm's correction (1979) over all that a study judges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

# Confidence level of all intervals, and the fewest seeds that make one.
CONFIDENCE = 0.95
SEEDS_OF_AN_INTERVAL = 3

Pair = tuple[float, float]


def envelope(points: Sequence[Pair]) -> list[Pair]:
    """The points that none beats on both axes: x ascending, y descending; what is not finite is left out."""
    kept: list[Pair] = []
    for x, y in sorted(point for point in points if all(math.isfinite(value) for value in point)):
        if not kept or y < kept[-1][1]:
            kept.append((x, y))
    return kept


def turned(frontier: Sequence[Pair]) -> list[Pair]:
    """The same frontier with its axes exchanged, x ascending."""
    return sorted((y, x) for x, y in frontier)


def height(frontier: Sequence[Pair], x: float) -> float:
    """y of a frontier at x, linear between its points; beyond its ends the y of the nearest one."""
    if x <= frontier[0][0]:
        return frontier[0][1]
    for (left, above), (right, below) in itertools.pairwise(frontier):
        if x <= right:
            return above + (below - above) * (x - left) / (right - left)
    return frontier[-1][1]


def common_range(one: Sequence[Pair], other: Sequence[Pair]) -> Pair | None:
    """The x that both frontiers cover; None where there is none."""
    if not one or not other:
        return None
    low, high = max(one[0][0], other[0][0]), min(one[-1][0], other[-1][0])
    return None if low > high else (low, high)


def difference(one: Sequence[Pair], other: Sequence[Pair]) -> float | None:
    """y of `one` minus y of `other` at equal x, in the mean over the range of x that both cover; exact.

    None where they have no x in common.
    """
    if (shared := common_range(one, other)) is None:
        return None
    return mean_height(one, shared) - mean_height(other, shared)


def mean_height(frontier: Sequence[Pair], between: Pair) -> float:
    """y of a frontier in the mean over a range of x; exact."""
    low, high = between
    return height(frontier, low) if low == high else integral(frontier, low, high) / (high - low)


def integral(frontier: Sequence[Pair], low: float, high: float) -> float:
    """∫ y dx from `low` to `high`, of the straight lines and what `height` says beyond them; exact."""
    knots = [low, *(x for x, _ in frontier if low < x < high), high]
    heights = [height(frontier, x) for x in knots]
    return math.fsum(
        (right - left) * (a + b) / 2
        for (left, right), (a, b) in zip(itertools.pairwise(knots), itertools.pairwise(heights), strict=True)
    )


def area(frontier: Sequence[Pair], base: Pair, level: float) -> float:
    """Area between a frontier and the base's corner: of y − the base's y, from x = `level` to the base's x.

    The base is the frontier's end where nothing was learned. `level` is at least the frontier's smallest x.
    """
    whole = envelope([*frontier, base])
    return integral(whole, level, base[0]) - base[1] * (base[0] - level)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, half of its 95 % interval (Student's t; None for fewer than three), and how many they are."""

    mean: float
    half: float | None
    seeds: int


def interval(values: Sequence[float]) -> Interval | None:
    """The mean of what each seed gave, with its interval; None without values."""
    count = len(values)
    if not count:
        return None
    mean = fmean(values)
    if count < SEEDS_OF_AN_INTERVAL:
        return Interval(mean, None, count)
    from scipy.special import stdtrit

    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * math.sqrt(variance / count)
    return Interval(mean, half, count)


# The range that both frontiers cover must have at least so many nats a token, and this part of what full fine-tuning
# covers of that axis.
NARROW, NARROW_SHARE = 0.1, 0.05

Verdict = Literal[
    "agrees",
    "disagrees",
    "not told apart",
    "points its way",
    "points against it",
    "range too narrow",
    "no common range",
]


class Apart(NamedTuple):
    """How two frontiers differ: on one axis, in the mean over what both cover of the other, seed by seed.

    `width` is that of the range that both cover, seeds in the mean (None: there is none); `enough`: it is wide enough
    for a verdict.
    """

    difference: Interval | None
    width: float | None = None
    enough: bool = False

    @property
    def is_judged(self) -> bool:
        """Whether it gets a verdict by its interval: the range is wide enough, and the seeds are."""
        return self.enough and self.difference is not None and self.difference.half is not None


def p_value(found: Interval) -> float:
    """How often seeds alone would give such a mean: two-sided, by Student's t; the interval has a half."""
    assert found.half is not None
    if found.half == 0.0:
        return 0.0 if found.mean else 1.0
    from scipy.special import stdtr, stdtrit

    deviation = found.half / float(stdtrit(found.seeds - 1, (1 + CONFIDENCE) / 2))
    return 2 * float(stdtr(found.seeds - 1, -abs(found.mean) / deviation))


def holm(values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979): each at least as large as before, their order kept."""
    adjusted = [0.0] * len(values)
    largest = 0.0
    for rank, nth in enumerate(sorted(range(len(values)), key=lambda nth: values[nth])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[nth]))
        adjusted[nth] = largest
    return adjusted


def verdicts(every: Sequence[Apart]) -> list[Verdict]:
    """What each difference of a study says of a claim that it is below 0; all of them are corrected together."""
    judged = [apart for apart in every if apart.is_judged]
    corrected = iter(holm([p_value(apart.difference) for apart in judged if apart.difference is not None]))
    return [_verdict(apart, next(corrected) if apart.is_judged else math.nan) for apart in every]


def _verdict(apart: Apart, corrected: float) -> Verdict:
    found = apart.difference
    if found is None:
        return "no common range"
    if not apart.enough:
        return "range too narrow"
    if found.half is not None and abs(found.mean) <= found.half:
        return "not told apart"
    if found.half is None or corrected > 1 - CONFIDENCE:
        return "points its way" if found.mean < 0 else "points against it"
    return "agrees" if found.mean < 0 else "disagrees"
