"""SVG plots of lines and points over two axes, with round ticks; a line's name is at its end instead of in a legend.

Axes can be logarithmic, and need not contain every value: a triangle at the rim, with the value, marks one beyond.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from surgeon.common.page.charts import WIDTH, drawing
from surgeon.common.page.markup import Markup, el, join

Pair = tuple[float, float]

_LEFT, _TOP, _BOTTOM = 46.0, 20.0, 34.0
# The width of a label's widest letter, the height of its line, and the most letters of a name.
_LETTER, _LINE, _LONGEST = 6.6, 12.0, 20
# A line with more points than this has no marks, which would touch.
_MARKED = 24
_ROUND = (1, 2, 5)


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`, and its name."""

    words: str
    low: float
    high: float
    log: bool = False

    @classmethod
    def over(cls, words: str, values: Iterable[float], *, high: float | None = None) -> Axis:
        """Return the axis that contains all values; `high` replaces their maximum."""
        every = [*values]
        least, most = min(every), max(every) if high is None else high
        if most - least <= 1e-9 * max(abs(least), abs(most), 1e-300):
            spread = max(abs(least) * 0.1, 1e-6)
            least, most = least - spread, most + spread
        return cls(words, least, most)

    def share(self, value: float) -> float:
        """Return the position of a value, from 0 to 1; a value beyond an end is placed at that end."""
        if self.beyond(value):
            return float(value > self.low)
        low, high, here = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return (here - low) / (high - low)

    def beyond(self, value: float) -> bool:
        """Return whether a value is beyond an end by more than rounding."""
        slack = 0.0 if self.log else 1e-9 * (self.high - self.low)
        return not self.low - slack <= value <= self.high + slack

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return at most `most` round values (1, 2 or 5 times a power of ten) with their texts."""
        if self.log:
            ends = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = [(digit, float(f"{digit}e{power}")) for power in ends for digit in _ROUND]
            inside = [(digit, value) for digit, value in every if self.low <= value <= self.high]
            if len(inside) > most:
                inside = [(digit, value) for digit, value in inside if digit == 1]
            if len(inside) > 1:
                return [(value, f"{value:g}") for _, value in inside[:: -(-len(inside) // most)]]
        power = math.floor(math.log10((self.high - self.low) / most))
        steps = (float(f"{digit}e{power + more}") for more in itertools.count() for digit in _ROUND)
        return next(found for step in steps if len(found := self._by(step)) <= most)

    def _by(self, step: float) -> list[tuple[float, str]]:
        """Return the multiples of a step with their texts; an axis of whole numbers has no decimals."""
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        decimals = max(0, -math.floor(math.log10(step)))
        if decimals > 4:
            return [(nth * step, f"{nth * step:.3g}") for nth in range(first, last + 1)]
        return [(nth * step, f"{nth * step:,.{decimals}f}") for nth in range(first, last + 1)]


@dataclass(frozen=True)
class Series:
    """A line: `points` are (x, y); `style` numbers its colour, dash and mark (0 to 5).

    `spread` has half of each point's interval on both axes, None where there is none. A `muted` line is grey: a
    reference for the others. An empty name has no label.
    """

    name: str
    points: Sequence[Pair]
    style: int
    spread: Sequence[Pair | None] = ()
    muted: bool = False

    @property
    def classes(self) -> str:
        """The line's CSS classes."""
        return f"s{self.style}{' muted' * self.muted}"


def lines(
    title: str,
    series: Sequence[Series],
    across: Axis,
    up: Axis,
    *,
    key: str,
    width: float = WIDTH,
    height: float = 206.0,
) -> Markup:
    """Draw lines over a common pair of axes, each with its name at its end.

    The description for screen readers has each line's first and last value.

    Args:
        title: the picture's name
        series: the lines
        across: the horizontal axis
        up: the vertical axis
        key: unique on the page
        width: the picture's width, in units
        height: its height
    """
    described = "; ".join(
        f"{one.name}: {_short(one.points[0][1])} to {_short(one.points[-1][1])}" for one in series if one.points
    )
    size = width, height
    return drawing(title, described, size, drawn_lines(series, across, up, size=size), key=key)


def drawn_lines(series: Sequence[Series], across: Axis, up: Axis, *, size: Pair) -> Markup:
    """Draw lines as a part of a picture, with axes and names, `size` units wide and tall."""
    names = [_cut(one.name) for one in series if one.name and one.points]
    margin = 8 + max((_LETTER * len(name) for name in names), default=2.0)
    frame = _Frame(across, up, size[0] - margin, size[1] - _BOTTOM)
    parts = [_axes(frame, size[0])]
    for one in sorted(series, key=lambda one: not one.muted):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(frame.at, one.points))
        parts.append(el("polyline", points=path, class_=f"line {one.classes}"))
        parts += _whiskers(one, frame)
        if len(one.points) <= _MARKED:
            inside = [point for point in one.points if not frame.beyond(point)]
            parts += [_mark(*frame.at(point), one.classes, one.style) for point in inside]
    # Place names first: a value at the rim may be left out, a name may not.
    labels = _Labels(frame)
    parts += [labels.name(one) for one in series if one.name and one.points]
    outside = [(point, one) for one in series for point in one.points if frame.beyond(point)]
    parts += [part for point, one in outside for part in labels.at_the_rim(point, one)]
    return el("g", *parts)


@dataclass(frozen=True)
class _Frame:
    """The axes' area in the picture: from the left margin to `right`, from the top margin down to `bottom`."""

    across: Axis
    up: Axis
    right: float
    bottom: float

    def at(self, point: Pair) -> Pair:
        """Return the position at which a point is drawn; a point beyond an axis is drawn at the rim."""
        x, y = self.across.share(point[0]), self.up.share(point[1])
        return _LEFT + x * (self.right - _LEFT), self.bottom - y * (self.bottom - _TOP)

    def beyond(self, point: Pair) -> bool:
        return self.across.beyond(point[0]) or self.up.beyond(point[1])


class _Labels:
    """A placer of labels that keeps them from overlapping."""

    def __init__(self, frame: _Frame) -> None:
        self._frame = frame
        self._taken: list[tuple[float, float, float]] = []

    def name(self, one: Series) -> Markup:
        """Return a line's name at its end, moved up or down to free space."""
        x, wanted = self._frame.at(one.points[-1])
        words = _cut(one.name)
        x, width = x + 6, _LETTER * len(words)
        y = next(y for y in self._places(wanted) if self._free(x, y, width))
        self._taken.append((x, y, width))
        title = el("title", one.name) if words != one.name else None
        return el("text", words, title, x=x, y=y + 3.5, class_=f"name {one.classes}")

    def _places(self, wanted: float) -> Iterator[float]:
        """Yield heights by distance from the wanted one, then heights below the frame, so that a name always fits."""
        top, bottom = _TOP, self._frame.bottom - 4
        for step in range(int(bottom - top) + 1):
            yield from (y for y in (wanted - step, wanted + step) if top <= y <= bottom)
        yield from itertools.count(bottom + _LINE, _LINE)

    def at_the_rim(self, point: Pair, one: Series) -> Iterator[Markup]:
        """Yield a triangle that points to a value beyond the rim, and the value's text where there is space."""
        x, y = self._frame.at(point)
        up = self._frame.up
        vertical = up.beyond(point[1])
        value = point[1] if vertical else point[0]
        axis = up if vertical else self._frame.across
        larger = value > axis.low
        turn = (0 if larger else 180) if vertical else (90 if larger else 270)
        yield el(
            "path", el("title", f"{one.name}: {_short(value)}"), d="M0 -4l4 7h-8z", class_=f"mark {one.classes}",
            transform=f"translate({x:.1f} {y:.1f}) rotate({turn})",
        )  # fmt: skip
        words = _short(value)
        width = _LETTER * len(words)
        at = min(max(y, _TOP + 6), self._frame.bottom - 6)
        beside = (left for left in (x + 6, x - 6 - width) if _LEFT <= left <= self._frame.right - width)
        left = next((left for left in beside if self._free(left, at, width)), None)
        if left is not None:
            self._taken.append((left, at, width))
            yield el("text", words, x=left, y=at + 3.5, class_=f"name {one.classes}")

    def _free(self, x: float, y: float, width: float) -> bool:
        return all(
            abs(y - other) >= _LINE or x + width < left - 2 or left + wide < x - 2 for left, other, wide in self._taken
        )


def _axes(frame: _Frame, width: float) -> Markup:
    """Return the rules, ticks and names of both axes."""
    parts = [
        el("text", frame.up.words, x=4, y=11, class_="tick"),
        el("text", frame.across.words, x=width - 4, y=frame.bottom + 28, class_="tick", text_anchor="end"),
        el("line", x1=_LEFT, y1=frame.bottom, x2=frame.right, y2=frame.bottom, class_="link"),
    ]
    for value, words in frame.up.ticks(6):
        _, y = frame.at((frame.across.low, value))
        parts += [
            el("line", x1=_LEFT, y1=y, x2=frame.right, y2=y, class_="rule"),
            el("text", words, x=_LEFT - 5, y=y + 3.5, class_="tick", text_anchor="end"),
        ]
    for value, words in frame.across.ticks(5):
        x, _ = frame.at((value, frame.up.low))
        parts += [
            el("line", x1=x, y1=frame.bottom, x2=x, y2=frame.bottom + 4, class_="link"),
            el("text", words, x=x, y=frame.bottom + 14, class_="tick", text_anchor="middle"),
        ]
    return join(*parts)


def _whiskers(one: Series, frame: _Frame) -> Iterator[Markup]:
    """Yield thin lines over each point's interval, cut at the axes' ends."""
    for (x, y), half in zip(one.points, one.spread, strict=bool(one.spread)):
        if half is not None:
            for ends in (((x - half[0], y), (x + half[0], y)), ((x, y - half[1]), (x, y + half[1]))):
                (x1, y1), (x2, y2) = map(frame.at, ends)
                yield el("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=f"whisker {one.classes}")


def _mark(x: float, y: float, classes: str, style: int = 0) -> Markup:
    """Return the mark of a style: circle, square, triangle, diamond, cross, ring."""
    class_ = f"mark {classes}"
    match style % 6:
        case 0:
            return el("circle", cx=x, cy=y, r=2.8, class_=class_)
        case 1:
            return el("rect", x=x - 2.5, y=y - 2.5, width=5, height=5, class_=class_)
        case 2:
            return el("path", d=f"M{x:.1f} {y - 3.4:.1f}l3.2 5.8h-6.4z", class_=class_)
        case 3:
            return el("path", d=f"M{x:.1f} {y - 3.6:.1f}l3.6 3.6l-3.6 3.6l-3.6 -3.6z", class_=class_)
        case 4:
            return el("path", d=f"M{x - 2.8:.1f} {y - 2.8:.1f}l5.6 5.6m0 -5.6l-5.6 5.6", class_=f"{class_} open")
        case _:
            return el("circle", cx=x, cy=y, r=2.8, class_=f"{class_} open")


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if 0.001 <= abs(value) < 100_000:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.0e}"
