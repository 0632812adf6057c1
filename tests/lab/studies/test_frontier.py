"""Frontiers against cases worked out by hand, and intervals against scipy's."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from surgeon.lab.studies.frontier import (
    Interval,
    area,
    common_range,
    difference,
    envelope,
    height,
    interval,
    turned,
)

# Down to the right, as frontiers are; (3, 3) is beaten by (2, 2), the infinite one diverged.
POINTS = [(4.0, 1.0), (1.0, 4.0), (2.0, 2.0), (3.0, 3.0), (math.inf, math.inf)]
FRONTIER = [(1.0, 4.0), (2.0, 2.0), (4.0, 1.0)]


def test_the_envelope_holds_what_nothing_beats() -> None:
    assert envelope(POINTS) == FRONTIER
    # Of equal new loss the lower original one; what is equal on one axis and worse on the other is beaten.
    assert envelope([(1.0, 2.0), (1.0, 1.0), (2.0, 1.0)]) == [(1.0, 1.0)]
    assert envelope([(math.nan, 1.0), (1.0, math.inf)]) == []
    drawn = random.Random(0)
    points = [(drawn.random(), drawn.random()) for _ in range(60)]
    beaten = {p for p in points if any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    assert set(envelope(points)) == set(points) - beaten


def test_heights_lie_on_the_lines() -> None:
    assert [height(FRONTIER, x) for x in (0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 9.0)] == [4.0, 4.0, 3.0, 2.0, 1.5, 1.0, 1.0]


def test_frontiers_differ_by_the_mean_over_what_both_cover() -> None:
    # A line one above is one above, wherever the other's knots lie.
    raised = [(x, y + 1) for x, y in FRONTIER]
    assert difference(raised, FRONTIER) == pytest.approx(1.0)
    assert difference(FRONTIER, raised) == pytest.approx(-1.0)
    # y = 5 - x against FRONTIER from 1 to 4: its integral is 7.5, FRONTIER's (4+2)/2 + 2·(2+1)/2 = 6.
    straight = [(0.0, 5.0), (5.0, 0.0)]
    assert difference(straight, FRONTIER) == pytest.approx((7.5 - 6) / 3)
    # One shared new loss is a comparison of two points; none is no comparison.
    assert difference([(0.0, 9.0), (1.0, 7.0)], FRONTIER) == pytest.approx(3.0)
    assert difference([(0.0, 9.0), (0.5, 7.0)], FRONTIER) is None
    assert difference([], FRONTIER) is None and common_range(FRONTIER, []) is None
    # By a sum of small steps.
    other = [(1.5, 3.5), (2.5, 2.25), (3.75, 0.5)]
    steps = [1.5 + 2.25 * (n + 0.5) / 20_000 for n in range(20_000)]
    summed = math.fsum(height(other, x) - height(FRONTIER, x) for x in steps) / len(steps)
    assert difference(other, FRONTIER) == pytest.approx(summed, abs=1e-6)


def test_turned_axes_compare_what_is_learned() -> None:
    assert turned(FRONTIER) == [(1.0, 4.0), (2.0, 2.0), (4.0, 1.0)]
    shifted = [(x - 0.25, y) for x, y in FRONTIER]
    assert difference(turned(shifted), turned(FRONTIER)) == pytest.approx(-0.25)


def test_the_area_ends_at_the_bases_corner() -> None:
    # The base at (6, 0.5): a triangle from (4, 1) to it, and what lies above 0.5 from 2 to 4.
    base = (6.0, 0.5)
    assert area(FRONTIER, base, 2.0) == pytest.approx((1.5 + 0.5) / 2 * 2 + 0.5 * 2 / 2)
    # A method that forgets nothing has none; one that even gains has less than none.
    assert area([(2.0, 0.5)], base, 2.0) == 0
    assert area([(2.0, 0.25)], base, 2.0) == pytest.approx(-0.25 * 4)


def test_intervals_are_students() -> None:
    values = [0.3, 0.5, 0.1, 0.6]
    found = interval(values)
    assert found is not None and found.half is not None
    low, high = stats.t.interval(0.95, 3, loc=0.375, scale=stats.sem(values))
    assert (found.mean, found.seeds) == (pytest.approx(0.375), 4)
    assert (found.mean - found.half, found.mean + found.half) == (pytest.approx(low), pytest.approx(high))
    assert interval(values[:2]) == Interval(pytest.approx(0.4), None, 2)
    assert interval([]) is None
