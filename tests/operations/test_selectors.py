"""Selectors: the paper's positions on its own models, and every refusal."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surgeon.anatomy.format_depth import other_scale
from surgeon.anatomy.kinds import broken_pattern, period_of
from surgeon.common.formatting import show
from surgeon.errors import BadInput
from surgeon.operations.selectors import (
    After,
    Every,
    EveryPeriod,
    Range,
    select_gaps,
    select_layers,
    select_periods,
    spread,
)


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
        (Range(range=[5, 10**6]), "there is no layer 8"),
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


# Gemma 3's sizes: five sliding layers and a full one, and at the top a part of a period.
GEMMA3 = {26: (4, 6), 34: (5, 6), 48: (8, 6), 62: (10, 6)}


@pytest.mark.parametrize("layers", GEMMA3)
def test_whole_periods_keep_the_pattern(layers: int) -> None:
    pattern = [(0, "full" if (i + 1) % 6 == 0 else "sliding") for i in range(layers)]
    whole, length = GEMMA3[layers]
    period, gaps = select_periods(EveryPeriod(every_period=1), pattern)
    assert (period, gaps) == (length, [length * (n + 1) - 1 for n in range(whole)])
    grown = [*pattern[:length], *pattern[:length], *pattern[length:]]
    assert period_of(grown) == length
    assert select_periods(EveryPeriod(every_period=2), pattern)[1] == gaps[1::2]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=24))
def test_a_period_is_the_smallest_that_repeats_at_least_once(pattern: list[int]) -> None:
    holds = [p for p in range(1, len(pattern) + 1) if all(pattern[i] == pattern[i - p] for i in range(p, len(pattern)))]
    smallest = holds[0]
    assert period_of(pattern) == (smallest if smallest == 1 or 2 * smallest <= len(pattern) else None)


def test_kinds_that_do_not_repeat_are_named() -> None:
    pattern = [(0, "dense")] * 3 + [(1, "")] * 5
    with pytest.raises(BadInput, match=r"here they do not: 3 of dense, 5 of kind 1; name gaps"):
        select_periods(EveryPeriod(every_period=1), pattern)
    with pytest.raises(BadInput, match="matches nothing in a model of 4 layers"):
        select_periods(EveryPeriod(every_period=3), [(0, "a"), (1, "b")] * 2)


def test_a_scale_that_a_reader_takes_from_depth_is_told_by_the_config_alone() -> None:
    """Numbers of Gemma 2 and 3, as their config.json has them."""
    wide = {"hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128, "query_pre_attn_scalar": 168}
    small = {"hidden_size": 2560, "num_attention_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256}
    for numbers, layers, words in (
        (wide, 62, None),
        (wide, 72, "1/√128 with 72 of them, where config.json says 1/√168"),
        (small, 34, None),
        (small, 62, "1/√320 with 62 of them, where config.json says 1/√256"),
    ):
        inner = {"model_type": "gemma3_text", "num_hidden_layers": layers, **numbers}
        for config in (inner, {"model_type": "gemma3", "text_config": inner}):
            told = other_scale(config)
            assert (told is None) if words is None else (told is not None and words in told), told
    assert other_scale({**wide, "model_type": "llama", "num_hidden_layers": 72}) is None
    assert other_scale({"model_type": "gemma2", "num_hidden_layers": 46}) is None


def test_a_broken_pattern_is_told_by_the_config_alone() -> None:
    types = ["sliding", "sliding", "full"] * 2
    kept: list[int | None] = [0, 1, 2, None, None, None, 3, 4, 5]
    broken: list[int | None] = [0, 1, 2, None, 3, 4, 5]
    after = {True: types + types[:3], False: [*types[:3], "full", *types[3:]]}
    for nested in (False, True):
        for whole, bases in ((True, kept), (False, broken)):
            part = {"num_hidden_layers": len(bases), "layer_types": after[whole]}
            told = broken_pattern(
                {"text_config": part, "vision_config": {"layer_types": []}} if nested else part, bases
            )
            assert (told is None) is whole
    assert told is not None and "repeat every 3 layers" in told
    # One type alone, or none that repeats, is no pattern to break; lists of layers' numbers are none either.
    assert broken_pattern({"layer_types": ["full"] * 4}, [0, 1, None, 2]) is None
    assert broken_pattern({"layer_types": ["a", "a", "b", "b", "b", "b"]}, [0, 1, 2, None, None, 3]) is None
    assert broken_pattern({"moe_layers": [0, 2, 4, 6, 7]}, [0, 1, 2, None, 3]) is None
    # Beside the trunk stand twins, whose entries follow its own.
    grafted = {"num_hidden_layers": 6, "layer_types": ["a", "b", "a", "b", "b", "b"]}
    assert broken_pattern(grafted, [0, 1, 2, 3]) is None
