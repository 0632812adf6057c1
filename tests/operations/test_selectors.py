"""Selectors: the paper's positions on its own models, and every refusal."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surgeon.errors import BadInput
from surgeon.operations.selectors import After, Every, Range, select_gaps, select_layers, show, spread


def paper_gaps(position: str, n: int) -> list[int]:
    """OpT-DeUS §7.1 as printed, i from 1, with i = n left out (no layer above to insert below)."""
    conditions = {
        "bottom_half": lambda i: i <= Fraction(n, 2),
        "middle": lambda i: Fraction(n, 4) < i <= Fraction(3 * n, 4),
        "top_half": lambda i: Fraction(n, 2) <= i < n,
        "top_and_bottom": lambda i: i <= Fraction(n, 4) or Fraction(3 * n, 4) <= i < n,
    }
    return [i - 1 for i in range(1, n) if conditions[position](i)]


@given(st.integers(4, 200), st.sampled_from(["bottom_half", "middle", "top_half", "top_and_bottom"]))
def test_named_gaps_are_the_paper_s(layers: int, position: str) -> None:
    assert select_gaps(position, layers) == paper_gaps(position, layers)


def test_llama_8b_positions() -> None:
    """32 layers: 16 new ones in each of the four positions; Top after layers 15 to 30."""
    assert select_gaps("top_half", 32) == list(range(15, 31))
    assert [len(select_gaps(p, 32)) for p in ("top_half", "bottom_half", "middle", "top_and_bottom")] == [16] * 4


def test_lists_and_ranges() -> None:
    assert select_gaps(Every(every=4), 10) == [3, 7]
    assert select_gaps(After(after=[5, 1]), 8) == [1, 5]
    assert select_layers(Range(range=[2, 4]), 8) == [2, 3, 4]
    assert select_layers([0, 7], 8) == [0, 7]
    assert select_layers("top_half", 9) == [5, 6, 7, 8]
    assert select_layers("all", 3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        (After(after=[8]), "there is no layer 8: the model has layers 0 to 7"),
        (After(after=[1, 1]), "layer 1 is listed twice"),
        (Every(every=9), "matches nothing in a model of 8 layers"),
        (Range(range=[5, 2]), "runs backwards"),
        (Range(range=[5, 10**15]), "there is no layer 8"),
    ],
)
def test_refusals(selector: object, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        select_gaps(selector, 8)
    if not isinstance(selector, After):
        with pytest.raises(BadInput, match=message):
            select_layers(selector, 8)


@given(st.integers(1, 60), st.data())
def test_spread_is_even_and_reaches_the_top(gaps: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, gaps))
    chosen = spread(list(range(gaps)), count)
    assert len(set(chosen)) == count
    assert chosen[-1] == gaps - 1
    steps = [b - a for a, b in zip([-1, *chosen], chosen, strict=False)]
    assert max(steps) - min(steps) <= 1


def test_more_layers_than_gaps_are_refused() -> None:
    with pytest.raises(BadInput, match="`count` 5 is more than the 4 gaps"):
        spread([0, 1, 2, 3], 5)


def test_show_joins_runs() -> None:
    assert show([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
