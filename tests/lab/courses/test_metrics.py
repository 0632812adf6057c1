"""OP, BWT and ΔR against the paper's sums, written out by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from surgeon.lab.courses.metrics import Measured, backward_transfer, general_ability_delta, overall_performance

# R[t][i], exact in binary, so that the paper's sums can be written out as fractions.
MATRIX = [[0.5], [0.375, 0.75], [0.625, 0.5, 0.25]]


def test_by_hand() -> None:
    assert [overall_performance(MATRIX, t) for t in range(3)] == [
        0.5,
        float(Fraction(3, 8) + Fraction(3, 4)) / 2,
        float((Fraction(5, 8) + Fraction(1, 2) + Fraction(1, 4)) / 3),
    ]
    assert [backward_transfer(MATRIX, t) for t in range(3)] == [
        0.0,
        float(Fraction(3, 8) - Fraction(1, 2)) / 2,
        # Task 1 gained an eighth, task 2 lost a quarter, task 3 is by definition where it was; over three tasks.
        float((Fraction(1, 8) - Fraction(1, 4) + 0) / 3),
    ]


def test_what_the_paper_prints_comes_out() -> None:
    """Table 1: averages over TRACE's eight tasks and ΔR over five benchmarks, in per cent."""
    last = [47.5, 68.3, 38.5, 55.1, 72.4, 41.6, 59.2, 26.1]
    assert overall_performance([[]] * 7 + [last], 7) == pytest.approx(51.1, abs=0.05)
    base, pmoe = [46.6, 26.1, 40.2, 70.6, 76.2], [46.8, 10.7, 37.1, 80.8, 75.7]
    assert general_ability_delta(base, pmoe) == pytest.approx(-1.8, abs=0.1)
    assert general_ability_delta([], []) is None


def test_a_task_that_is_kept_has_no_transfer() -> None:
    kept = [[0.1], [0.1, 0.7], [0.1, 0.7, 0.3]]
    assert [backward_transfer(kept, t) for t in range(3)] == [0.0, 0.0, 0.0]
    forgotten = [[0.9], [0.0, 0.9]]
    assert backward_transfer(forgotten, 1) == -0.45


def test_performance_is_a_share_of_tokens() -> None:
    found = Measured(tokens=8, right=6, nats=4.0)
    assert (found.accuracy, found.loss) == (0.75, 0.5)
