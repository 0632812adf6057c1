"""Stacks whose kinds of layers repeat: after how many layers, and which outputs break that."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surgeon.anatomy.kinds import broken_pattern, period_of, repeats

PATTERNS = {
    "all alike": ("aaaa", 1),
    "two of each": ("abab", 2),
    "three and a part": ("aabaaba", 3),
    "a part of a second one is no second one": ("aabaa", None),
    "one whole period alone": ("aab", None),
    "two runs": ("aaaabbbb", None),
    "an end of its own": ("ababb", None),
}


@pytest.mark.parametrize("case", PATTERNS)
def test_a_period_is_there_twice(case: str) -> None:
    pattern, period = PATTERNS[case]
    assert period_of(pattern) == period


@given(st.text("abc", min_size=2, max_size=5), st.integers(2, 4), st.integers(0, 4))
def test_the_period_that_is_found_is_the_smallest(unit: str, times: int, more: int) -> None:
    pattern = unit * times + unit[: min(more, len(unit) - 1)]
    found = period_of(pattern)
    assert found is not None and found <= len(unit)
    assert pattern == (pattern[:found] * len(pattern))[: len(pattern)]
    assert not any(repeats(pattern, smaller) for smaller in range(1, found))


def config(pattern: str) -> dict[str, Any]:
    words = {"s": "sliding_attention", "f": "full_attention"}
    return {"num_hidden_layers": len(pattern), "layer_types": [words[letter] for letter in pattern]}


def test_an_output_keeps_the_pattern_or_a_sentence_says_so() -> None:
    whole = [0, 1, None, None, 2, 3]
    assert broken_pattern(config("sfsfsf"), whole) is None
    assert "repeat every 2 layers" in (broken_pattern(config("ssffsf"), [0, None, 1, None, 2, 3]) or "")
    # Where layers went, the base's own pattern is the measure.
    assert broken_pattern(config("sf"), [0, 1], (config("sfsf"), 4)) is None
    assert broken_pattern(config("sffs"), [0, 1, 3, 4], (config("sfsfsf"), 6)) is not None
    assert broken_pattern({"num_hidden_layers": 3}, [0, None, 1]) is None
