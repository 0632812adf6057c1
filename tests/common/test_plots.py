"""Lines over axes: round ticks, names that keep clear of each other, and values beyond an axis at its rim."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from surgeon.common.page.plots import Axis, Series, lines


def is_round(value: float) -> bool:
    """1, 2 or 5 times a power of ten."""
    return any(math.isclose(value / 10 ** math.floor(math.log10(value) + 1e-9), digit) for digit in (1, 2, 5))


@pytest.mark.parametrize("log", [False, True], ids=["linear", "log"])
@pytest.mark.parametrize(("low", "high"), [(0.013, 4.7), (2.78, 3.71), (1e-7, 3e-7), (3.0, 250_000.0), (0.4, 0.9)])
def test_ticks_are_round_few_and_inside(low: float, high: float, log: bool) -> None:
    ticks = Axis("x", low, high, log).ticks(6)
    assert 2 <= len(ticks) <= 6
    values = [value for value, _ in ticks]
    assert values == sorted(set(values)) and low <= values[0] and values[-1] <= high
    assert len({words for _, words in ticks}) == len(ticks)
    for value, words in ticks:
        assert float(words.replace(",", "")) == pytest.approx(value)
    steps = [b - a for a, b in pairwise(values)]
    assert all(map(is_round, values if log else steps)) or all(map(is_round, steps))


def test_an_axis_of_one_value_holds_it() -> None:
    axis = Axis.over("x", [3.0])
    assert axis.share(3.0) == pytest.approx(0.5) and len(axis.ticks(6)) >= 2


def test_a_value_beyond_an_axis_is_a_triangle_at_its_rim_with_its_value() -> None:
    across, up = Axis("x", 0.0, 1.0), Axis("y", 0.01, 1.0, log=True)
    far = Series("far", [(0.2, 0.5), (0.8, 7.25)], 0)
    drawn = ElementTree.fromstring(lines("title", [far], across, up, key="k"))
    texts = {"".join(text.itertext()): text for text in drawn.iter("text")}
    assert "7.25" in texts and "far" in texts
    (triangle,) = (path for path in drawn.iter("path") if "rotate(0)" in path.get("transform", ""))
    # At the top, where the line ends too.
    assert re.match(r"translate\([\d.]+ 20\.0\)", triangle.get("transform", ""))
    # What is forgotten less than nothing is at the bottom of a logarithmic axis.
    assert up.beyond(-0.3) and up.share(-0.3) == 0.0


def test_names_of_many_lines_that_end_together_keep_clear_of_each_other() -> None:
    series = [Series(f"source {nth}", [(0, 1.0), (10, 2.0 + nth / 1000)], nth % 6) for nth in range(12)]
    axes = Axis("step", 0, 10), Axis("loss", 0.0, 2.1)
    drawn = ElementTree.fromstring(lines("title", series, *axes, key="k", height=240.0))
    names = [text for text in drawn.iter("text") if "name" in text.get("class", "")]
    heights = sorted(float(text.get("y", "")) for text in names)
    assert len(heights) == 12 and heights[0] >= 20 and heights[-1] <= 206, "within the axes"
    assert all(b - a >= 12 for a, b in pairwise(heights))
