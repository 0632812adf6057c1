"""The HTML page of a study (template comparison.html), and its figures.

Each figure shows the frontiers of one method, forgetting against learning, with full fine-tuning in grey.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
    drawn = panels_of(found)
    panels = []
    if drawn is not None:
        panels = [(panel, drawn.figure(panel, f"frontier-{nth}")) for nth, panel in enumerate(drawn.panels)]
    return rendered(
        _TEMPLATE,
        found=found,
        panels=panels,
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


@dataclass(frozen=True)
class Panel:
    """The figure of one method: a line per remedy, full fine-tuning's lines in grey, and points that are on no line."""

    title: str
    words: str
    series: tuple[Series, ...]
    scattered: tuple[Series, ...]


@dataclass(frozen=True)
class Panels:
    """All panels of a study, drawn on the same two axes."""

    across: Axis
    up: Axis
    panels: tuple[Panel, ...]

    def figure(self, panel: Panel, key: str) -> Markup:
        """Return one panel as a figure."""
        title = f"{panel.title}: forgetting against learning"
        return lines(title, panel.series, self.across, self.up, key=key, summary=panel.words, scattered=panel.scattered)


def panels_of(found: Findings) -> Panels | None:
    """Return one panel per method, the method with the smallest area first; None where no run has finite losses."""
    rows = [row for row in found.rows if row.means()]
    if not rows:
        return None
    remedies = list(dict.fromkeys(row.remedy for row in found.rows))
    full = [row for row in rows if row.kind == _FULL]
    methods: dict[str, list[Row]] = {}
    for row in sorted((row for row in rows if row.kind != _FULL), key=_order):
        methods.setdefault(row.method, []).append(row)
    if not methods:
        methods, full = {row.method: [row] for row in full}, []
    beside = [_series(found, row, remedies, muted=True) for row in full]
    panels = tuple(_panel(found, of_method, beside, remedies) for of_method in methods.values())
    every = [point for panel in panels for one in panel.series for point in one.points]
    across = Axis.over(f"learned, {found.unit}", (x for x, _ in every))
    return Panels(across, _up(f"forgotten, {found.unit}", [y for _, y in every]), panels)


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


def _panel(found: Findings, rows: Sequence[Row], beside: Sequence[Series], remedies: Sequence[str]) -> Panel:
    """Return the panel of one method, from one row for each remedy."""
    rows = sorted(rows, key=lambda row: remedies.index(row.remedy))
    own = [_series(found, row, remedies) for row in rows]
    title = rows[0].label.removesuffix(f", {rows[0].remedy}")
    scattered = [
        Series(row.remedy, [point for point in _moved(found, row.means()) if point not in set(one.points)], one.style)
        for row, one in zip(rows, own, strict=True)
    ]
    words = "; ".join(
        f"{one.name}: learned {one.points[-1][0]:.3g}, forgot {one.points[-1][1]:.3g} at most" for one in own
    )
    return Panel(title, words, (*beside, *own), tuple(scattered))


def _series(found: Findings, row: Row, remedies: Sequence[str], *, muted: bool = False) -> Series:
    """Return a row's frontier as a line, each point with its interval over seeds."""
    frontier = set(row.mean_frontier())
    points = sorted(
        (point for point in row.means() if (point.new, point.original) in frontier), key=lambda point: -point.new
    )
    several = len(remedies) > 1
    name = (f"full, {row.remedy}" if several else "full") if muted else row.remedy if several else "this method"
    return Series(
        name, _moved(found, points), remedies.index(row.remedy) % 6, [_half(row, point) for point in points], muted
    )


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
