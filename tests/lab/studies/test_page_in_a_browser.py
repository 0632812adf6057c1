"""The page of a study and the drawings of the docs in a real browser: wide and narrow, light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.lab.studies.page import render
from tests import browser, drawings
from tests.studies import RESULTS, STUDIES, findings_of

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browser.find() is None, reason="no Chromium here"),
]


@pytest.fixture(scope="module")
def study() -> str:
    """The page of the largest committed study, as it is drawn now."""
    largest = max(STUDIES, key=lambda name: (RESULTS / name / "comparison.html").stat().st_size)
    return render(findings_of(largest))


def drawn() -> str:
    """Every drawing of the docs on one page, as wide as there is room."""
    style = "svg { display: block; max-width: 100%; height: auto; margin: 0 0 8px }"
    files = sorted(drawings.PICTURES.rglob("*.svg"))
    return f"<!DOCTYPE html><style>{style}</style>" + "".join(file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize("width", [1400, 500])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_frontiers_are_legible_and_no_label_lies_on_another(study: str, width: int, dark: bool, tmp_path: Path) -> None:
    found = browser.measure(study, tmp_path, width=width, dark=dark, unfolded=True)
    assert found["inner"] == width and found["scroll"] <= width
    assert found["outside"] == [] and found["overlapping"] == []
    assert found["smallest"] > 9.5
    # One, as large as the page or a hand's breadth in it.
    ((left, _, right, _),) = found["figures"]
    assert right - left > min(width - 50, 700)
    assert (found["background"] == "rgb(255, 255, 255)") is not dark


@pytest.mark.parametrize("width", [1400, 500])
def test_drawings_of_the_docs_are_legible(width: int, tmp_path: Path) -> None:
    found = browser.measure(drawn(), tmp_path, width=width)
    assert found["scroll"] <= width
    assert found["outside"] == [] and found["overlapping"] == []
    assert found["smallest"] > 8.5
