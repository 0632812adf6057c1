"""`--minutes`: what fits is begun round by round, what does not is said, and a run that takes too long is ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from surgeon.errors import BadInput
from surgeon.lab.studies import budget as budgets
from surgeon.lab.studies.budget import Budget, Deadline, left_out
from surgeon.lab.studies.schedule import Round, Run


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock; it begins at 0."""
    now = [0.0]
    monkeypatch.setattr(budgets.time, "monotonic", lambda: now[0])

    def set_(seconds: float) -> None:
        now[0] = seconds

    return set_


def test_what_does_not_fit_is_left_out_as_a_whole(at: Callable[[float], None]) -> None:
    """Seeds first, then rates at the ends: a round that does not fit is not begun in part."""
    budget = Budget(10.0, made=[50.0, 70.0], at_once=2, begun=0)
    at(120)
    # 480 seconds are left: 8 turns of two runs of a minute.
    assert budget.fits(16) and not budget.fits(17) and not Budget(10.0, made=[60.0], begun=0).fits(9)
    said = "a run took 60 s: --minutes 10 is enough for about"
    assert budget.expected(15, 0) == f"{said} 15 of 15 more runs"
    assert budget.expected(20, 16) == f"{said} 16 of 20 more runs"
    assert budget.expected(17, 17) == (
        f"{said} 16 of 17 more runs; for one of each row, before which there is no advice, give --minutes 12"
    )
    assert left_out({1: 18, 0: 6}) == "6 of seed 0 (the rates at the ends), 18 of seed 1"
    # Without `--minutes` nothing is left out, and the first run says how long the others take.
    free = Budget(None, made=[300.0], at_once=2, begun=0)
    assert free.expected(20, 0) == "a run took 5 minutes: 20 more take about 50 minutes"
    assert Budget(None).fits(10**9) and Budget(None).check() is None


def test_a_round_that_does_not_fit_is_not_begun(at: Callable[[float], None]) -> None:
    """One that was begun goes on, and so does the first of all; no single run begins that would end too late."""
    runs = {seed: [Run("full", "bare", rate, seed) for rate in (1e-3, 3e-3, 1e-2)] for seed in range(3)}
    first, second, third = runs.values()
    budget = Budget(10.0, made=[100.0], begun=0)
    at(0)
    rounds = [Round(first, True), Round(second, False), Round(third, False)]
    assert budget.allow(rounds, ()) == first + second
    # Of those under way one is left to do; what was allowed is not judged again, and the third round still is.
    at(350)
    assert budget.allow([Round(second, False), rounds[2]], second[:1]) == second[1:]
    assert budget.allow([Round(third, True)], second[2:]) == third
    at(501)
    assert budget.allow([Round(second[2:], True)], ()) == []
    at(10)
    assert Budget(1.0, begun=0).allow(rounds, ()) == first + second + third


def test_no_run_begins_where_what_comes_before_took_the_time(at: Callable[[float], None]) -> None:
    fresh = Budget(1.0, begun=0)
    at(59)
    fresh.check()
    at(61)
    said = r"^--minutes 1: what comes before the first run took 61 s, and is kept; no run began; give --minutes 2"
    with pytest.raises(BadInput, match=said):
        fresh.check()


def test_the_first_run_is_ended_where_it_would_end_too_late(at: Callable[[float], None]) -> None:
    """100 steps of a second, ten seconds before them; what is no step is not counted."""
    for seconds, too_long in ((111.0, False), (109.0, True)):
        at(0)
        deadline = Deadline(3.0, seconds)
        deadline.begin("reading", 10)
        deadline.advance(10)
        at(10)
        deadline.begin("training", 100, "steps")
        deadline.advance(0)
        for step in range(1, 5):
            at(10 + 50 * step)
            deadline.advance(1)
        at(15)
        if too_long:
            with pytest.raises(
                BadInput, match=r"^--minutes 3: too little for one run, which takes about 110 s; give.* 4"
            ):
                deadline.advance(1)
        else:
            deadline.advance(1)
