"""Which differences between frontiers say something: those over enough losses, in enough seeds, clear of 0 together.

Two frontiers that share hardly any losses have a difference all the same, and of sixty intervals of 95 % three exclude
0 by chance. So a verdict needs a range in common, and Holm's correction (1979) over all that a study judges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from surgeon.compare.frontier import CONFIDENCE, Interval

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
