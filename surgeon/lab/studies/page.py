"""The HTML page of a study (template comparison.html), and its figure.

The figure shows the frontiers of the best methods, forgetting against learning, with full fine-tuning's in grey.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from surgeon.common.page.document import rendered
from surgeon.common.page.markup import Markup
from surgeon.common.page.plots import Axis, Pair, Series, lines
from surgeon.lab.studies.findings import Findings, Point, Row
from surgeon.lab.studies.frontier import NARROW, NARROW_SHARE, Interval, interval

_TEMPLATE = Path(__file__).with_name("comparison.html")
# The page's words for a verdict on the claim that a row forgets less than full fine-tuning.
_FORGETS = {
    "agrees": "less",
    "disagrees": "more",
    "points its way": "points to less",
    "points against it": "points to more",
    None: "",
}


def render(found: Findings) -> str:
    """Return the page as HTML."""
    return rendered(
        _TEMPLATE,
        found=found,
        ranked=sorted(found.rows, key=_order),
        figure=_figure(found),
        steps=_steps(found),
        chosen=any(point.chosen for row in found.rows for point in row.points),
        forgets=_FORGETS,
        interval=_interval,
        narrow=NARROW,
        narrow_share=NARROW_SHARE,
    )


def _steps(found: Findings) -> str:
    """Return the steps of a run as text: one number, or the range from the fewest to the most where rows differ."""
    made = sorted({row.steps for row in found.rows if row.steps} or {found.budget.get("steps", 0)})
    return f"{made[0]:,}" if len(made) == 1 else f"{made[0]:,} to {made[-1]:,}"


def _interval(found: Interval | None, sign: str = "") -> str:
    """Return a mean with half its interval, as text; empty for None. `sign` is + to show the sign of the mean."""
    if found is None:
        return ""
    half = "" if found.half is None else f" ± {found.half:.4f}"
    return f"{found.mean:{sign}.4f}{half}"


# The axis of forgetting ends at this quantile of the values; values above it are drawn at the rim, with their number.
_DRAWN = 0.95
# The axis of forgetting is logarithmic where the largest value is more than _TIMES the smallest; values below _LEAST
# count as _LEAST.
_TIMES, _LEAST = 8.0, 0.01
_FULL = "full"


# The most methods in the figure, and its size in units.
_METHODS, _WIDTH, _HEIGHT = 3, 480.0, 300.0


def _figure(found: Findings) -> Markup | None:
    """Return the figure: the best row of each of the best methods, and full fine-tuning's rows with the same remedies.

    None where no run has finite losses.
    """
    best: dict[str, Row] = {}
    full = []
    for row in sorted((row for row in found.rows if row.means()), key=_order):
        if row.kind != _FULL:
            best.setdefault(row.method, row)
        else:
            full.append(row)
    shown = [*best.values()][:_METHODS]
    remedies = {row.remedy for row in shown}
    rows = [*shown, *(row for row in full if row.remedy in remedies and not row.blended)] if shown else full
    if not rows:
        return None
    series, across, up = frontiers(found, rows)
    return lines("Forgetting against learning", series, across, up, key="frontiers", width=_WIDTH, height=_HEIGHT)


def frontiers(found: Findings, rows: Sequence[Row]) -> tuple[list[Series], Axis, Axis]:
    """Return rows' frontiers as lines, and the axes of learning and forgetting; full fine-tuning beside others is grey.

    A line's points have their intervals over seeds.
    """
    beside = any(row.kind != _FULL for row in rows)
    found_lines = [_series(found, row, nth, muted=beside and row.kind == _FULL) for nth, row in enumerate(rows)]
    points = [point for one in found_lines for point in one.points]
    across = Axis.over(f"learned, {found.unit}", (x for x, _ in points))
    return found_lines, across, _up(f"forgotten, {found.unit}", [y for _, y in points])


def _order(row: Row) -> tuple[float, str]:
    """Return the key that sorts rows by area, rows without an area last."""
    return (row.area.mean if row.area is not None else math.inf, row.label)


def _up(words: str, values: Sequence[float]) -> Axis:
    """Return the vertical axis (forgetting) without outliers; it is logarithmic where values span a large range."""
    ordered = sorted(values)
    high = ordered[math.ceil(_DRAWN * len(ordered)) - 1]
    low = max(ordered[0], _LEAST)
    if high > _TIMES * low:
        return Axis(f"{words} (log)", low / 1.1, high * 1.1, log=True)
    return Axis.over(words, ordered, high=high)


def _series(found: Findings, row: Row, style: int, *, muted: bool) -> Series:
    """Return a row's frontier as a line, each point with its interval over seeds."""
    frontier = set(row.mean_frontier())
    points = sorted(
        (point for point in row.means() if (point.new, point.original) in frontier), key=lambda point: -point.new
    )
    name = f"{row.method}, {row.remedy}{', blended' * row.blended}"
    return Series(name, _moved(found, points), style, [_half(row, point) for point in points], muted)


def _moved(found: Findings, points: Iterable[Point]) -> list[Pair]:
    """Convert losses to (learned, forgotten): differences from the base's losses."""
    new, original = found.start
    return [(new - point.new, point.original - original) for point in points]


def _half(row: Row, at: Point) -> Pair | None:
    """Return the half-widths of a point's intervals over seeds, on both axes; None where there are too few seeds."""
    seeds = [point for point in row.points if (point.rate, point.share) == (at.rate, at.share)]
    halves = [
        found.half for axis in ("new", "original") if (found := interval([getattr(p, axis) for p in seeds])) is not None
    ]
    return None if None in halves or len(halves) < 2 else (halves[0] or 0.0, halves[1] or 0.0)
