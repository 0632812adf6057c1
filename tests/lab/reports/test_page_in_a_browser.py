"""The report in a real browser: wide and narrow, light and dark, folded and unfolded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import surgeon
from tests import browser, tiny
from tests.checkpoints import train, write_plan
from tests.lab.reports.test_page import ADAPTERS, CONTROL, FUSED, SLOTS, STATES
from tests.models.test_tokens import byte_tokenizer

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browser.find() is None, reason="no Chromium here"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One with every section: three surgeries, everything that chooses, a proof."""
    folder = tmp_path_factory.mktemp("page")
    state = tiny.checkpoint(folder / ("a-base-with-rather-a-long-name-" + "x" * 60), "llama", vocab_size=300)
    byte_tokenizer(state, eos=False)
    plans = [[FUSED], [CONTROL, ADAPTERS, SLOTS | {"slots": 12}], [STATES | {"layers": "all"}]]
    for number, operations in enumerate(plans):
        base, state = state, folder / f"state-{number}"
        surgeon.apply(write_plan(folder / "plan.yaml", operations), str(base), state)
        train(state, seed=number)
    surgeon.report(
        state,
        html=folder / "page.html",
        base=base,
        texts={"probe": None, "a text whose name is longer than a phone is wide, by far": None},
        window=16,
        windows=2,
    )
    return (folder / "page.html").read_text(encoding="utf-8")


def apart(a: list[float], b: list[float]) -> bool:
    """Whether two boxes (left, top, right, bottom) share no more than a hair."""
    return a[2] <= b[0] + 0.5 or b[2] <= a[0] + 0.5 or a[3] <= b[1] + 0.5 or b[3] <= a[1] + 0.5


def within(a: list[float], b: list[float]) -> bool:
    return a[0] >= b[0] - 0.5 and a[1] >= b[1] - 0.5 and a[2] <= b[2] + 0.5 and a[3] <= b[3] + 0.5


def check_stack(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 8
    for number, row in enumerate(rows):
        assert all(apart(row["box"], other["box"]) for other in rows[number + 1 :])
        things = [*row["words"], *row["pills"], *row["flags"]]
        for nth, thing in enumerate(things):
            assert within(thing, row["box"])
            assert all(apart(thing, other) for other in things[nth + 1 :]), (number, things)
        assert len(row["signs"]) == len(row["pills"])
        for sign, pill in zip(row["signs"], row["pills"], strict=True):
            assert pill[0] <= sign[0] and sign[2] <= pill[2], (sign, pill)


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_scrolls_sideways_or_overlaps(page: str, width: int, dark: bool, tmp_path: Path) -> None:
    for unfolded in (False, True):
        found = browser.measure(page, tmp_path, width=width, dark=dark, unfolded=unfolded)
        assert found["inner"] == width
        assert found["scroll"] <= width
        assert found["blank"] == 0
        assert found["outside"] == [] and found["overlapping"] == []
        assert found["focusable"] > 15
        assert all(b[2] - b[0] > 100 and b[3] - b[1] > 20 and b[2] <= width + 0.5 for b in found["figures"])
        check_stack(found["rows"])
    assert (found["background"] == "rgb(255, 255, 255)") is not dark
    assert found["background"] != found["ink"]


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_screenshots_show_something(page: str, width: int, dark: bool, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    browser.photograph(page, tmp_path / "shot.png", width=width, height=1200, dark=dark)
    pixels = np.asarray(image.open(tmp_path / "shot.png").convert("RGB"))[:, :width] / 255
    assert pixels.shape[:2] == (1200, width)
    assert pixels.std() > 0.03
    paper = pixels[2, 2]
    assert (abs(pixels - paper).max(axis=-1) > 0.02).mean() > 0.05, "as good as empty"
    assert (paper.mean() < 0.3) is dark or (paper.mean() > 0.7) is not dark
