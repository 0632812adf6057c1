"""Forwards side by side: who is served together, and how they end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from surgeon.models import lockstep
from surgeon.models.lockstep import Forward


@dataclass(eq=False)
class Wanted:
    """A matrix of one side, by name; the first letter says what it looks like."""

    key: str
    place: int
    outside: bool = False
    result_bytes: int = 0

    def alike(self, other: Wanted) -> bool:
        """Whether both may be the same."""
        return self.key[0] == other.key[0]


def forward(side: int, pair: int, *wanted: str, fails: str = "") -> Forward:
    """It waits for each, in order, and raises where it has what it fails at."""

    def work() -> list[Any]:
        running = lockstep.current()
        assert running is not None
        for place, key in enumerate(wanted):
            running.wait(Wanted(key, place))
            if key == fails:
                raise ValueError(f"{side} {key}")
        return [side, pair]

    return Forward(work, side=side, pair=pair)


def served(forwards: Sequence[Forward], multiply: Callable[[Any], None] | None = None) -> tuple[list[list[str]], Any]:
    """The keys that were served together, and the results in the order in which they came."""
    groups: list[list[str]] = []
    results: list[Any] = []

    def noted(requests: Sequence[Wanted]) -> None:
        groups.append([request.key for request in requests])
        if multiply is not None:
            multiply(requests)

    lockstep.run(forwards, noted, lambda pair: results.append([each.result for each in pair]))
    return groups, results


def test_all_forwards_meet_at_a_matrix_and_both_models_where_it_may_be_the_same() -> None:
    base = [forward(0, pair, "a", "b") for pair in (0, 1)]
    # Its second layer is new, and one forward comes to it alone.
    out = [forward(1, 0, "a1", "new", "b1"), forward(1, 1, "a1", "b1")]
    groups, results = served([*base, *out])
    assert groups == [["a", "a", "a1", "a1"], ["new"], ["b", "b", "b1", "b1"]]
    assert sorted(results) == [[[0, 0], [1, 0]], [[0, 1], [1, 1]]]


@pytest.mark.parametrize("both", [True, False])
def test_what_fails_is_raised_the_bases_first_and_no_thread_is_left(both: bool) -> None:
    before = threading.active_count()
    base = [forward(0, pair, "a", "b", fails="b" if both else "") for pair in (0, 1)]
    out = [forward(1, pair, "a", "c", "d", fails="a") for pair in (0, 1)]
    with pytest.raises(ValueError, match="0 b" if both else "1 a"):
        served([*base, *out])
    assert threading.active_count() == before


def test_a_product_that_fails_fails_in_each_forward_that_waits_for_it() -> None:
    def broken(requests: Sequence[Wanted]) -> None:
        if requests[0].key == "b":
            raise OSError("cut short")

    before = threading.active_count()
    with pytest.raises(OSError, match="cut short"):
        served([forward(0, 0, "a", "b"), forward(1, 0, "a", "b")], broken)
    assert threading.active_count() == before
