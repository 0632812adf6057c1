"""The page of a study: what full fine-tuning beats, the advice, frontiers, tables, claims, what is still missing.

Frontiers are pictures: forgetting against learning, a panel a method, full fine-tuning in grey.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from surgeon.common.formatting import count
from surgeon.common.page.document import document, facts
from surgeon.common.page.markup import Child, Markup, el, figure, folded, section, table
from surgeon.common.page.plots import Axis, Pair, Series, lines
from surgeon.lab.studies.findings import Findings, Point, Row
from surgeon.lab.studies.frontier import NARROW, NARROW_SHARE, Interval, interval

# What verdicts on "forgets less" say of a row.
_FORGETS = {
    "agrees": "less",
    "disagrees": "more",
    "points its way": "points to less",
    "points against it": "points to more",
}


_BLENDS = " `blended`: runs, and each blended with what it began with, which costs no training."
# Where runs are chosen by other documents than those that are reported.
_CHOSEN = (
    " Rates, and the runs that a frontier joins, were chosen by losses on other held-out documents than those that are"
    " reported."
)


def render(found: Findings) -> str:
    """The page as HTML."""
    new, original = found.start
    budget = found.budget
    unit = "bytes" if "bytes" in budget else "tokens"
    runs = sum(row.runs for row in found.rows)
    state = f"incomplete: {len(found.missing)} rows lack runs" if found.missing else "complete"
    top: list[Child] = [
        el("h1", f"Learning without forgetting on {found.base}"),
        el("p", f"{runs} finished runs by `surgeon compare`; losses in {found.unit}, on held-out text", class_="soft"),
        *([el("p", found.first, class_="warn")] if found.first else []),
        el("p", found.advice),
        facts(
            [
                ("base, new text", f"{new:.4f}", None),
                ("base, original text", f"{original:.4f}", None),
                (f"{unit} a run", f"{budget[unit]:,}", None),
                ("steps", f"{_steps(found)} of {budget['batch']} × {budget['length']}", None),
                ("seeds", str(budget["seeds"]), "warn" if budget["seeds"] < 3 else None),
                ("study", state, "warn" if found.missing else "good"),
            ]
        ),
    ]
    sections = {
        "frontiers": ("Frontiers", _frontiers(found)),
        "methods": ("Methods", _methods(found)),
        "remedies": ("Remedies", _remedies(found)),
        "claims": ("Claims", _claims(found)),
        "runs": ("Runs", _runs(found)),
        "missing": ("Still to be made", _missing(found)),
        "how": ("How it is compared", _how(found)),
    }
    return document(f"{found.base}: surgeon's comparison", "comparison", top, sections)


def _steps(found: Findings) -> str:
    """The steps of a run: one number, or from the fewest to the most where runs have equal bytes."""
    made = sorted({row.steps for row in found.rows if row.steps} or {found.budget.get("steps", 0)})
    return f"{made[0]:,}" if len(made) == 1 else f"{made[0]:,} to {made[-1]:,}"


def _frontiers(found: Findings) -> Markup | None:
    """A panel for each method, the remedies in one, full fine-tuning in grey in each."""
    drawn = panels_of(found)
    if drawn is None:
        return None
    charts = [
        figure(drawn.figure(panel, f"frontier-{nth}"), el("strong", panel.title))
        for nth, panel in enumerate(drawn.panels)
    ]
    return section(
        "frontiers",
        "Frontiers",
        el(
            "p",
            "Learned is how far the loss on new text fell, forgotten how far the loss on original text rose: lower"
            " right is better. Each point is a finished run at one rate, seeds in the mean. Lines join the points that"
            " no other run of the method beats on both axes; faint points are beaten. Grey is full fine-tuning. Thin"
            " crosses are 95 % intervals over at least three seeds. A triangle at the rim points to a value beyond it."
            " Methods with the smallest area come first." + (_BLENDS if any(row.blended for row in found.rows) else ""),
        ),
        el("div", *charts, class_="panels"),
    )


def _methods(found: Findings) -> Markup:
    rows = [
        (
            row.label,
            count(row.trained) if row.trained else "",
            "" if row.best is None else row.best.shown_rate,
            "no run yet" if row.best is None else f"{row.best.new:.4f}",
            "" if row.best is None else f"{row.best.original:.4f}",
            "" if row.best is None or row.best.kl is None else f"{row.best.kl:.4f}",
            _words(row.against and row.against.difference, signed=True),
            "" if row.shared is None else f"{row.shared[0]:.3f} to {row.shared[1]:.3f}",
            "" if row.verdict is None else _FORGETS.get(row.verdict, row.verdict),
            "" if row.against is None else f"{row.beaten} of {len(row.points)}",
            _words(row.area),
            str(len(row.seeds())),
        )
        for row in found.rows
    ]
    return section(
        "methods",
        "Methods",
        table(
            "Each method's run with the smallest sum of both losses, and its frontier beside full fine-tuning's",
            (
                "method",
                "numbers trained",
                "rate",
                "new",
                "original",
                "KL on new",
                "forgets beside full",
                "at new loss",
                "so it forgets",
                "runs beaten",
                "area",
                "seeds",
            ),
            rows,
            numbers=(1, 2, 3, 4, 5, 6, 7, 9, 10, 11),
        ),
        el(
            "p",
            "`forgets beside full` is the mean difference in original loss at equal new loss to full fine-tuning with"
            " the same remedy, over the new losses that both reach; negative: it forgets less. `runs beaten`: full"
            " fine-tuning with the same seed has a run with both losses lower. `area` lies between the"
            " frontier and the base's corner, over the new losses that every row reaches; smaller is better. A row"
            " that learns less than a tenth of what the best one does has none. `KL on new` is KL(base ‖ run) on new"
            " text, in nats a token; arXiv 2509.04259 found that it predicts forgetting.",
            class_="soft",
        ),
        *(el("p", note, class_="warn") for note in found.notes),
    )


def _remedies(found: Findings) -> Markup | None:
    if not found.remedies:
        return None
    rows = [
        (
            each.label,
            each.with_,
            each.beside,
            *(_words(one) for one in each.forgets),
            _words(each.share),
            _words(each.apart, signed=True),
            "" if each.documents is None else "{:+.4f} to {:+.4f}".format(*each.documents),
            _words(each.reach, signed=True),
            "" if each.width is None else f"{each.width:.3f}",
            "" if each.reach is None else str(each.reach.seeds),
            _FORGETS.get(each.verdict, each.verdict),
        )
        for each in found.remedies
    ]
    return section(
        "remedies",
        "Remedies",
        table(
            "Each method with one remedy beside itself with another",
            (
                "method",
                "with",
                "beside",
                "forgets",
                "beside it",
                "part",
                "difference",
                "over documents",
                "lowest new",
                "width",
                "seeds",
                "so it forgets",
            ),
            rows,
            numbers=range(3, 11),
        ),
        el(
            "p",
            "`forgets` is original loss above the base's at equal new loss, in the mean over the new losses that both"
            " reach; `part` is the first's share of the second's. `lowest new` is the difference of the lowest new"
            " losses: negative, it learns more at its most. `width` is the range of new losses that both reach."
            " `over documents`: the difference's 95 % interval over documents (bootstrap), where they are kept.",
            class_="soft",
        ),
    )


def _claims(found: Findings) -> Markup | None:
    if not found.claims:
        return None
    rows = [
        (
            judged.claim.paper,
            judged.claim.says,
            judged.claim.on,
            judged.remedy,
            _words(judged.apart.difference, signed=True),
            "" if judged.apart.width is None else f"{judged.apart.width:.3f}",
            "" if judged.apart.difference is None else str(judged.apart.difference.seeds),
            judged.verdict,
        )
        for judged in found.claims
    ]
    return section(
        "claims",
        "What papers say",
        table(
            "Claims and what these frontiers say",
            ("paper", "claim", "on", "remedy", "difference", "width", "seeds", "here"),
            rows,
            numbers=(4, 5, 6),
            words=(1,),
        ),
        el(
            "p",
            "forgets: original loss at equal new loss; learns: new loss at equal original loss. Negative is for the"
            " claim. `width` is the range of the other loss that both reach. Agrees and disagrees: the range has at"
            f" least {NARROW:g} nats a token and {NARROW_SHARE:.0%} of what full fine-tuning covers, and the difference"
            " over at least three seeds is not 0 at 5 %, with Holm's correction for all differences on this page.",
            class_="soft",
        ),
    )


def _runs(found: Findings) -> Markup | None:
    rows = [
        (
            row.label,
            point.shown_rate,
            str(point.seed),
            "diverged" if point.diverged else f"{point.new:.4f}",
            "" if point.diverged else f"{point.original:.4f}",
        )
        for row in found.rows
        for point in row.points
        if not row.blended or point.share != 1.0
    ]
    if not rows:
        return None
    every = table("Every finished run", ("method", "rate", "seed", "new", "original"), rows, numbers=(1, 2, 3, 4))
    return section("runs", "Runs", folded(f"All {sum(row.runs for row in found.rows)} runs", every))


def _missing(found: Findings) -> Markup | None:
    if not found.missing:
        return None
    lines_of = el("ul", *(el("li", line) for line in found.missing), class_="plain")
    return section("missing", "Still to be made", el("p", "The same command makes these."), lines_of)


def _how(found: Findings) -> Markup:
    texts = found.texts
    budget = found.budget
    equal = f", as many as have {budget['bytes']:,} bytes of new text," if "bytes" in budget else ""
    return section(
        "how",
        "How it is compared",
        el(
            "p",
            f"Every run trains for {_steps(found)} steps of {budget['batch']} × {budget['length']} tokens"
            f"{equal} with its own peak rate: warm-up over 5 % of the steps, then a cosine down to a tenth,"
            " unless the study says otherwise. Rates are extended upwards while the highest learns most, and downwards"
            " while the lowest has the smallest sum of both losses. Only runs whose schedule ended are compared.",
        ),
        el(
            "p",
            f"New text: {', '.join(texts['new'])}. Original text: {', '.join(texts['original'])}. A loss is the mean"
            " over these texts of the mean loss a token on documents that no run trained on."
            + (_CHOSEN if any(point.chosen for row in found.rows for point in row.points) else ""),
        ),
    )


def _words(found: Interval | None, *, signed: bool = False) -> str:
    if found is None:
        return ""
    words = f"{found.mean:+.4f}" if signed else f"{found.mean:.4f}"
    return words if found.half is None else f"{words} ± {found.half:.4f}"


# A frontier's values are drawn to this share of them, in order; what lies beyond is at the rim, with its value.
_DRAWN = 0.95
# Forgetting is on a logarithmic axis where the largest value is so many times the smallest, which is at least so much.
_TIMES, _LEAST = 8.0, 0.01
_FULL = "full"


@dataclass(frozen=True)
class Panel:
    """One method's lines, a remedy each, full fine-tuning's in grey, and the points that none of them joins."""

    title: str
    words: str
    series: tuple[Series, ...]
    scattered: tuple[Series, ...]


@dataclass(frozen=True)
class Panels:
    """All panels of a study, on the same axes."""

    across: Axis
    up: Axis
    panels: tuple[Panel, ...]

    def figure(self, panel: Panel, key: str) -> Markup:
        """Return a panel as a picture of its own."""
        title = f"{panel.title}: forgetting against learning"
        return lines(title, panel.series, self.across, self.up, key=key, summary=panel.words, scattered=panel.scattered)


def panels_of(found: Findings) -> Panels | None:
    """Return the panels, methods with the smallest area first; None where nothing was finished."""
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
    return (row.area.mean if row.area is not None else math.inf, row.label)


def _up(words: str, values: Sequence[float]) -> Axis:
    """The axis of forgetting: without the outliers, and logarithmic where values are of several sizes."""
    ordered = sorted(values)
    high = ordered[math.ceil(_DRAWN * len(ordered)) - 1]
    low = max(ordered[0], _LEAST)
    if high > _TIMES * low:
        return Axis(f"{words} (log)", low / 1.1, high * 1.1, log=True)
    return Axis.over(words, ordered, high=high)


def _panel(found: Findings, rows: Sequence[Row], beside: Sequence[Series], remedies: Sequence[str]) -> Panel:
    """The panel of one method, whose rows differ by remedy."""
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
    """A row's frontier, with the interval of each point over seeds."""
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
    """Losses as what was learned and what was forgotten since the base."""
    new, original = found.start
    return [(new - point.new, point.original - original) for point in points]


def _half(row: Row, at: Point) -> Pair | None:
    """Half of a point's intervals over its seeds; None where there are too few."""
    seeds = [point for point in row.points if (point.rate, point.share) == (at.rate, at.share)]
    halves = [
        found.half for axis in ("new", "original") if (found := interval([getattr(p, axis) for p in seeds])) is not None
    ]
    return None if None in halves or len(halves) < 2 else (halves[0] or 0.0, halves[1] or 0.0)
