"""What differences are worth: p-values against scipy, Holm's correction against its definition, words by hand."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from surgeon.lab.studies.frontier import Apart, Interval, holm, interval, p_value, verdicts


def test_p_values_are_those_of_a_t_test() -> None:
    drawn = random.Random(3)
    for seeds in (3, 4, 7):
        values = [drawn.gauss(0.3, 1.0) for _ in range(seeds)]
        found = interval(values)
        assert found is not None
        assert p_value(found) == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
    assert p_value(Interval(0.1, 0.0, 3)) == 0.0 and p_value(Interval(0.0, 0.0, 3)) == 1.0


def test_the_correction_is_holms() -> None:
    # Sorted .01 .02 .03 .04, times 4 3 2 1, none below one before it.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []
    drawn = random.Random(5)
    for _ in range(50):
        values = [drawn.random() ** 3 for _ in range(drawn.randint(1, 9))]
        # Closed testing: the largest Bonferroni p-value of any subset that has the hypothesis.
        ranked = sorted(values)
        expected = [
            max(min(1.0, (len(values) - k) * each) for k, each in enumerate(ranked) if each <= one) for one in values
        ]
        assert holm(values) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("apart", "said"),
    [
        (Apart(None), "no common range"),
        (Apart(Interval(-0.1, 0.001, 3), 0.05, enough=False), "range too narrow"),
        (Apart(Interval(-0.1, None, 2), 0.5, enough=True), "points its way"),
        (Apart(Interval(0.1, None, 1), 0.5, enough=True), "points against it"),
        (Apart(Interval(-0.1, 0.05, 3), 0.5, enough=True), "agrees"),
        (Apart(Interval(0.1, 0.05, 3), 0.5, enough=True), "disagrees"),
        (Apart(Interval(-0.1, 0.1, 3), 0.5, enough=True), "not told apart"),
    ],
)
def test_a_claim_holds_where_its_interval_lies_below_zero(apart: Apart, said: str) -> None:
    assert verdicts([apart]) == [said]


def test_among_many_differences_a_small_one_only_points() -> None:
    # p of a mean twice its half: 0.013; of ten such each is worth ten times that.
    one, clear = (Apart(Interval(-0.1, half, 3), 0.5, enough=True) for half in (0.05, 0.001))
    narrow = Apart(Interval(-0.1, 0.001, 3), 0.01)
    assert verdicts([one, *[narrow] * 9])[0] == "agrees", "what is not judged is not counted"
    assert verdicts([one] * 9 + [clear]) == ["points its way"] * 9 + ["agrees"]
