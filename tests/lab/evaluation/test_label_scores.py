"""A classifier's scores beside those of the first model on the same texts."""

from __future__ import annotations

import numpy as np
import pytest

from surgeon.data.scoring import Judged
from surgeon.lab.evaluation.texts import _scores

WANTED = np.array([0, 1] * 20)


def judged(wrong: int) -> Judged:
    """Of forty texts the first `wrong` got the other label."""
    given = np.where(np.arange(40) < wrong, 1 - WANTED, WANTED)
    return Judged(np.linspace(0.1, 2, 40) + wrong, given, WANTED, labels=2)


def test_a_model_that_is_right_more_often_has_a_difference_above_zero() -> None:
    first, better, worse = judged(10), judged(4), judged(20)
    assert _scores("texts", first, None).accuracy_difference is None
    for found, difference in ((better, 6 / 40), (worse, -10 / 40), (first, 0.0)):
        scores = _scores("texts", found, first)
        apart = scores.accuracy_difference
        assert apart is not None and apart.interval is not None
        assert apart.value == pytest.approx(difference)
        assert apart.value == pytest.approx(scores.accuracy.value - 30 / 40)
        assert apart.interval[0] <= apart.value <= apart.interval[1]
        # Of sixteen texts at most both models differ on, so a difference is told apart where there is one.
        assert (apart.interval[0] > 0 or apart.interval[1] < 0) == (difference != 0)
    assert _scores("texts", better, first).loss.value == pytest.approx(1.05 + 4)
    assert _scores("texts", better, first).f1 == pytest.approx(0.9)
