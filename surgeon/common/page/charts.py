"""Small charts as inline SVG: bars, lines, points, grids, 360 units wide, so that a phone shows them whole.

The style sheet sets the colours; series differ by dash and mark too. Every chart has a description for screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surgeon.common.page.markup import Markup, el, join
from surgeon.common.page.picture import drawing

WIDTH = 360
_LEFT, _RIGHT, _TOP = 46, 10, 20.0


@dataclass(frozen=True)
class Series:
    """A line: `points` are (x, y); `style` numbers its colour, dash and mark (0 to 5)."""

    name: str
    points: Sequence[tuple[float, float]]
    style: int


@dataclass(frozen=True)
class Bar:
    """One bar: `value` of at most `full`, and `words` at its end."""

    name: str
    value: float
    words: str
    style: int = 0


def bars(title: str, entries: Sequence[Bar], *, full: float, key: str, cap: str = "") -> Markup:
    """Draw horizontal bars on a scale to `full`, the right end of the frame; `cap` is its label."""
    row, left, right = 22, 64, 92
    span = WIDTH - left - right
    parts = []
    for number, entry in enumerate(entries):
        y = number * row + 4
        length = span * min(1.0, max(0.0, entry.value / full)) if full > 0 else 0.0
        parts += [
            el("text", entry.name, x=left - 6, y=y + 12, class_="tick", text_anchor="end"),
            el("rect", x=left, y=y, width=span, height=16, class_="trough"),
            el("rect", x=left, y=y, width=max(length, 0.5), height=16, class_=f"bar s{entry.style}"),
            el("text", entry.words, x=left + span + 6, y=y + 12, class_="tick"),
        ]
    height = len(entries) * row + (18 if cap else 4)
    if cap:
        parts.append(el("text", cap, x=left + span, y=height - 3, class_="tick", text_anchor="end"))
    summary = "; ".join(f"{entry.name}: {entry.words}" for entry in entries)
    return drawing(title, summary, (WIDTH, height), *parts, key=key)


def lines(
    title: str,
    series: Sequence[Series],
    *,
    key: str,
    across: str,
    up: str,
    low: float | None = None,
    high: float | None = None,
    scattered: Sequence[Series] = (),
    level: float | None = None,
) -> Markup:
    """Draw lines over a common pair of axes, with a legend beneath that names each.

    Args:
        title: the picture's name
        series: the lines
        key: unique on the page
        across: the horizontal axis, in words
        up: the vertical axis, in words
        low: the vertical axis' lower end; by default the smallest value
        high: its upper end; by default the largest
        scattered: series of which only the marks are drawn, without a legend
        level: a thin horizontal line
    """
    points = [point for one in (*series, *scattered) for point in one.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_range = _range(min(xs), max(xs))
    y_range = _range(min(ys) if low is None else low, max(ys) if high is None else high)
    height, bottom = 200.0, 34.0
    frame = _Frame(x_range, y_range, height - bottom)
    drawn = [_axes(frame, across, up)]
    if level is not None:
        y = frame.y(level)
        drawn.append(el("line", x1=_LEFT, y1=y, x2=WIDTH - _RIGHT, y2=y, class_="link"))
    drawn += [_mark(frame.x(x), frame.y(y), one.style) for one in scattered for x, y in one.points]
    for one in series:
        # A mark on each point as long as marks do not touch.
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in one.points)
        drawn.append(el("polyline", points=path, class_=f"line s{one.style}"))
        if len(one.points) <= 24:
            drawn += [_mark(frame.x(x), frame.y(y), one.style) for x, y in one.points]
    legend, legend_height = _legend([(one.name, one.style) for one in series], height)
    described = "; ".join(
        f"{one.name}: {_short(one.points[0][1])} to {_short(one.points[-1][1])}" for one in series if one.points
    )
    return drawing(title, described, (WIDTH, height + legend_height), *drawn, legend, key=key)


def points(
    title: str,
    groups: Sequence[tuple[str, Sequence[tuple[float, float]], int]],
    *,
    key: str,
    across: str,
    up: str,
    summary: str,
    links: Sequence[tuple[float, float, float, float]] = (),
) -> Markup:
    """Draw points in a plane, one style a group; `links` are thin lines between pairs."""
    every = [point for _, group, _ in groups for point in group]
    xs, ys = [x for x, _ in every], [y for _, y in every]
    height, bottom = 240.0, 34.0
    frame = _Frame(_range(min(xs), max(xs)), _range(min(ys), max(ys)), height - bottom)
    drawn = [_axes(frame, across, up)]
    drawn += [
        el("line", x1=frame.x(a), y1=frame.y(b), x2=frame.x(c), y2=frame.y(d), class_="link") for a, b, c, d in links
    ]
    drawn += [_mark(frame.x(x), frame.y(y), style) for _, group, style in groups for x, y in group]
    legend, legend_height = _legend([(name, style) for name, _, style in groups], height, line=False)
    return drawing(title, summary, (WIDTH, height + legend_height), *drawn, legend, key=key)


def grid(
    title: str,
    cells: Sequence[Sequence[float]],
    *,
    key: str,
    down: str,
    across: str,
    rows: Sequence[str],
    columns: Sequence[str],
    summary: str,
    full: float = 1.0,
) -> Markup:
    """Draw a matrix of shares from 0 to `full` as shaded cells; every few rows and columns have a label."""
    left, top = 64.0, 58.0
    side = (WIDTH - left - _RIGHT) / max(1, len(columns))
    tall = min(side, 24.0)
    parts = [
        el("text", across, x=left, y=10, class_="tick"),
        el("text", down, x=left - 6, y=top - 6, class_="tick", text_anchor="end"),
    ]
    for column in range(0, len(columns), _stride(side)):
        x = left + (column + 0.5) * side + 3
        parts.append(
            el("text", columns[column], class_="tick small", transform=f"translate({x:.1f} {top - 4}) rotate(-60)")
        )
    for number, row in enumerate(cells):
        y = top + number * tall
        if number % _stride(tall) == 0:
            parts.append(
                el("text", rows[number], x=left - 4, y=y + tall / 2 + 3, class_="tick small", text_anchor="end")
            )
        for column, value in enumerate(row):
            if value > 0.004 * full:
                shade = f"{min(1.0, value / full):.2f}"
                parts.append(
                    el("rect", x=left + column * side, y=y, width=side, height=tall, class_="heat", fill_opacity=shade)
                )
    height = top + len(cells) * tall
    parts.append(el("rect", x=left, y=top, width=WIDTH - left - _RIGHT, height=height - top, class_="frame"))
    return drawing(title, summary, (WIDTH, height + 4), *parts, key=key)


@dataclass(frozen=True)
class _Frame:
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    bottom: float

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        clipped = min(max(value, low), high)
        return self.bottom - (clipped - low) / (high - low) * (self.bottom - _TOP)


def _range(low: float, high: float) -> tuple[float, float]:
    if high - low > 1e-9 * max(abs(low), abs(high), 1e-300):
        return low, high
    spread = max(abs(low) * 0.1, 1e-6)
    return low - spread, high + spread


def _axes(frame: _Frame, across: str, up: str) -> Markup:
    parts = [
        el("text", up, x=4, y=11, class_="tick"),
        el("text", across, x=WIDTH - _RIGHT, y=frame.bottom + 28, class_="tick", text_anchor="end"),
    ]
    for nth in range(5):
        value = frame.y_range[0] + (frame.y_range[1] - frame.y_range[0]) * nth / 4
        y = frame.y(value)
        parts += [
            el("line", x1=_LEFT, y1=y, x2=WIDTH - _RIGHT, y2=y, class_="rule"),
            el("text", _short(value), x=_LEFT - 5, y=y + 3.5, class_="tick", text_anchor="end"),
        ]
    for value, anchor in ((frame.x_range[0], "start"), (frame.x_range[1], "end")):
        parts.append(
            el("text", _short(value), x=frame.x(value), y=frame.bottom + 14, class_="tick", text_anchor=anchor)
        )
    return join(*parts)


def _mark(x: float, y: float, style: int) -> Markup:
    """A shape for each style: circle, square, triangle, diamond, cross, ring."""
    class_ = f"mark s{style}"
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


def _legend(entries: Sequence[tuple[str, int]], top: float, *, line: bool = True) -> tuple[Markup, float]:
    parts = []
    for number, (name, style) in enumerate(entries):
        y = top + 8 + 16 * number
        if line:
            parts.append(el("line", x1=_LEFT, y1=y, x2=_LEFT + 24, y2=y, class_=f"line s{style}"))
        parts += [
            _mark(_LEFT + 12, y, style),
            el("text", name if len(name) <= 44 else f"{name[:43]}…", x=_LEFT + 30, y=y + 4, class_="tick"),
        ]
    return join(*parts), 16.0 * len(entries) + 4


def _stride(side: float) -> int:
    return max(1, math.ceil(10 / side)) if side > 0 else 1


def _short(value: float) -> str:
    if value == 0:
        return "0"
    if 0.001 <= abs(value) < 100_000:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.0e}"
