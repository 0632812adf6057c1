"""Frontiers of finished runs, and the statistics that compare them. All functions here compute with losses only.

A point is (loss on new text, loss on original text) of a finished run. The frontier of a method is the lower-left
envelope of its points: the points that no other point beats on both axes, joined by straight lines. Two frontiers are
compared on the range that both cover: by the mean difference on one axis at equal values of the other axis.

Even two frontiers with hardly any common range have a difference, and of sixty 95 % intervals about three exclude 0 by
chance. So a verdict needs a common range that is wide enough, and p-values get Holm's correction (1979) over all
differences that a study judges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

# Confidence level of all intervals, and the fewest seeds for an interval.
CONFIDENCE = 0.95
SEEDS_OF_AN_INTERVAL = 3

Pair = tuple[float, float]


def envelope(points: Sequence[Pair]) -> list[Pair]:
    """Return the finite points that no other point beats on both axes, x ascending and y descending."""
    kept: list[Pair] = []
    for x, y in sorted(point for point in points if all(math.isfinite(value) for value in point)):
        if not kept or y < kept[-1][1]:
            kept.append((x, y))
    return kept


def turned(frontier: Sequence[Pair]) -> list[Pair]:
    """Return the frontier with its axes exchanged, sorted by the new x."""
    return sorted((y, x) for x, y in frontier)


def height(frontier: Sequence[Pair], x: float) -> float:
    """Return y of a frontier at x, linear between points; beyond an end of the frontier, return y of that end."""
    if x <= frontier[0][0]:
        return frontier[0][1]
    for (left, above), (right, below) in itertools.pairwise(frontier):
        if x <= right:
            return above + (below - above) * (x - left) / (right - left)
    return frontier[-1][1]


def common_range(one: Sequence[Pair], other: Sequence[Pair]) -> Pair | None:
    """Return the range of x that both frontiers cover; None where there is no common x."""
    if not one or not other:
        return None
    low, high = max(one[0][0], other[0][0]), min(one[-1][0], other[-1][0])
    return None if low > high else (low, high)


def difference(one: Sequence[Pair], other: Sequence[Pair]) -> float | None:
    """Return the mean of (y of `one` minus y of `other`) over the range of x that both cover, by exact integration.

    None where they have no x in common.
    """
    if (shared := common_range(one, other)) is None:
        return None
    return mean_height(one, shared) - mean_height(other, shared)


def mean_height(frontier: Sequence[Pair], between: Pair) -> float:
    """Return the mean of y of a frontier over the range `between` of x, by exact integration."""
    low, high = between
    return height(frontier, low) if low == high else integral(frontier, low, high) / (high - low)


def integral(frontier: Sequence[Pair], low: float, high: float) -> float:
    """Return the exact ∫ y dx of the frontier from `low` to `high`; beyond its ends y is constant, as in `height`."""
    knots = [low, *(x for x, _ in frontier if low < x < high), high]
    heights = [height(frontier, x) for x in knots]
    return math.fsum(
        (right - left) * (a + b) / 2
        for (left, right), (a, b) in zip(itertools.pairwise(knots), itertools.pairwise(heights), strict=True)
    )


def area(frontier: Sequence[Pair], base: Pair, level: float) -> float:
    """Return the area between a frontier and the base's loss on original text, from x = `level` to the base's x.

    The base is added as the end of the frontier at which nothing was learned. `level` is at least the frontier's
    smallest x.
    """
    whole = envelope([*frontier, base])
    return integral(whole, level, base[0]) - base[1] * (base[0] - level)


@dataclass(frozen=True)
class Interval:
    """A mean over `seeds` seeds; `half` is half its 95 % interval (Student's t), None for fewer than three seeds."""

    mean: float
    half: float | None
    seeds: int


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of one value per seed with its 95 % interval; None without values."""
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


# For a verdict, the common range of two frontiers must be at least this many nats a token wide, and at least this share
# of full fine-tuning's range on that axis.
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
    """The difference of two frontiers on one axis, averaged over their common range on the other axis, for each seed.

    `width` is the width of the common range, averaged over seeds (None: no common range). `enough` is whether that
    width is sufficient for a verdict.
    """

    difference: Interval | None
    width: float | None = None
    enough: bool = False

    @property
    def is_judged(self) -> bool:
        """Whether the difference gets a verdict from its interval: a wide enough range, and at least three seeds."""
        return self.enough and self.difference is not None and self.difference.half is not None


def p_value(found: Interval) -> float:
    """Return the two-sided p-value of a mean (Student's t): how often chance gives a mean at least as far from 0.

    `found.half` must not be None.
    """
    assert found.half is not None
    if found.half == 0.0:
        return 0.0 if found.mean else 1.0
    from scipy.special import stdtr, stdtrit

    deviation = found.half / float(stdtrit(found.seeds - 1, (1 + CONFIDENCE) / 2))
    return 2 * float(stdtr(found.seeds - 1, -abs(found.mean) / deviation))


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm 1979), in the given order; none is smaller than before."""
    adjusted = [0.0] * len(values)
    largest = 0.0
    for rank, nth in enumerate(sorted(range(len(values)), key=lambda nth: values[nth])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[nth]))
        adjusted[nth] = largest
    return adjusted


def verdicts(every: Sequence[Apart]) -> list[Verdict]:
    """Return each difference's verdict on the claim that it is below 0; all p-values are corrected together."""
    judged = [apart for apart in every if apart.is_judged]
    corrected = iter(holm([p_value(apart.difference) for apart in judged if apart.difference is not None]))
    return [_verdict(apart, next(corrected) if apart.is_judged else math.nan) for apart in every]


def _verdict(apart: Apart, corrected: float) -> Verdict:
    """Return a difference's verdict; `corrected` is its corrected p-value, NaN where it has too few seeds or range."""
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
