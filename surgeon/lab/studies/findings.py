"""The results of a study, as the page, the terminal and results.json show them, and the sentences that summarise them.

The sentences report what full fine-tuning beats, and which run to choose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from surgeon.common.json_results import plain, plain_fields
from surgeon.lab.studies.config.entries import Claim
from surgeon.lab.studies.config.schema import Study
from surgeon.lab.studies.frontier import Apart, Interval, Pair, Verdict, envelope, height

# Suffix of the remedy's name for a row of runs and their blends.
BLENDED = ", blended"


@dataclass(frozen=True)
class Point:
    """A finished run: its losses on new and original text, in the unit of the results; infinite where the run diverged.

    `share` is the run's share in its blend with the base (1: no blend). `chosen` contains the losses on the documents
    that are reserved for choosing runs (None: runs are chosen by `new` and `original`).
    """

    rate: float
    seed: int
    new: float
    original: float
    diverged: str = ""
    share: float = 1.0
    chosen: Pair | None = None

    @property
    def sum(self) -> float:
        """The sum of both losses, by which the best run is chosen."""
        return math.fsum(self.chosen or (self.new, self.original))

    @property
    def shown_rate(self) -> str:
        """The learning rate as text, with the run's share α where the point is a blend."""
        return f"{self.rate:g}" + (f", α {self.share:g}" if self.share != 1.0 else "")

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `share` and `chosen` are left out where they have their default values."""
        usual = (("share", 1.0), ("chosen", None))
        return plain_fields(self, without=[key for key, value in usual if getattr(self, key) == value])


def frontier_of(points: Sequence[Point]) -> list[Pair]:
    """Return the losses of the points that no other point beats on both axes, x ascending.

    Points are compared by the losses on the documents for choosing, where there are such documents.
    """
    kept = {*envelope([point.chosen or (point.new, point.original) for point in points])}
    return sorted({(p.new, p.original) for p in points if (p.chosen or (p.new, p.original)) in kept})


@dataclass(frozen=True)
class Row:
    """A method with a remedy: its runs, and how its frontier compares with full fine-tuning's with the same remedy.

    `against` is the difference in original loss at equal new loss (negative: this method forgets less); None for full
    fine-tuning itself. `verdict` is its verdict on the claim that this method forgets less. `beaten` counts the runs
    that a run of full fine-tuning with the same seed beats on both axes. `area` is the area between the frontier and
    the base's losses, over the new losses that all rows reach; rows that hardly learn are ignored there and have no
    area. `best` is the point with the smallest sum of both losses, averaged over seeds. A `blended` row contains the
    runs of another row and their blends. `steps` is the number of steps of a finished run; it differs between rows
    where all runs have equal bytes.
    """

    method: str
    remedy: str
    label: str
    kind: str
    trained: int
    steps: int
    points: tuple[Point, ...]
    open_end: str
    blended: bool = False
    best: Point | None = None
    against: Apart | None = None
    verdict: Verdict | None = None
    beaten: int = 0
    area: Interval | None = None

    @property
    def runs(self) -> int:
        """The number of runs that were made for this row."""
        return 0 if self.blended else len(self.points)

    def seeds(self) -> list[int]:
        """Return the seeds that have a finite point."""
        return sorted({point.seed for point in self.points if math.isfinite(point.new)})

    def frontier(self, seed: int) -> list[Pair]:
        """Return the frontier of one seed."""
        return frontier_of([point for point in self.points if point.seed == seed])

    def means(self) -> list[Point]:
        """Return one point per rate and share, averaged over the seeds that have finished it; only finite means."""
        found = []
        for rate, share in sorted({(point.rate, point.share) for point in self.points}):
            there = [point for point in self.points if (point.rate, point.share) == (rate, share)]
            new, original = (fmean(getattr(each, axis) for each in there) for axis in ("new", "original"))
            chosen = [each.chosen for each in there if each.chosen is not None]
            point = Point(rate, -1, new, original, share=share)
            if chosen:
                point = replace(point, chosen=(fmean(each[0] for each in chosen), fmean(each[1] for each in chosen)))
            found.append(point)
        return [point for point in found if math.isfinite(point.new) and math.isfinite(point.original)]

    def mean_frontier(self) -> list[Pair]:
        """Return the frontier of the means over seeds."""
        return frontier_of(self.means())


@dataclass(frozen=True)
class Judged:
    """A paper's claim and its verdict from the frontiers; a negative difference supports the claim."""

    claim: Claim
    remedy: str
    apart: Apart
    verdict: Verdict


@dataclass(frozen=True)
class Remedied:
    """A method with one remedy (`with_`) compared with itself with another remedy (`beside`), at equal new loss.

    `forgets` contains, for both remedies, the original loss above the base's, averaged over the new losses that both
    frontiers cover. `share` is the first divided by the second, `apart` the first minus the second. `reach` is the
    lowest new loss of the first minus the lowest of the second (negative: the first can learn more). `verdict` is about
    the claim that the first forgets less, corrected together with all remedies of the study. The intervals, except
    `reach`, are None where the frontiers have no new loss in common.
    """

    method: str
    label: str
    with_: str
    beside: str
    forgets: tuple[Interval | None, Interval | None]
    share: Interval | None
    apart: Apart
    reach: Interval | None
    verdict: Verdict


@dataclass(frozen=True)
class Findings:
    """All results of a study so far; `missing` lists the runs that are still to be made, one line per row and seed."""

    base: str
    budget: dict[str, int]
    unit: str
    texts: dict[str, list[str]]
    start: Pair
    rows: tuple[Row, ...]
    remedies: tuple[Remedied, ...]
    claims: tuple[Judged, ...]
    first: str
    advice: str
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data; numbers that are not finite are written as strings.

        Keys:
            `surgeon_study`: version of the format
            `base`: the model
            `budget`: of a run: `steps`, `tokens` (or `bytes`), `batch`, `length`, `seeds`, and `choosing` where given
            `unit`: of losses: nats a token or bits a byte
            `texts`: names of the texts, `new` and `original`
            `start`: the base's mean losses, `new` and `original`
            `rows`: each method with each remedy: `method`, `remedy`, `label`, `kind`, `trained`, `open_end`, `blended`
                (runs of another row and their blends); `points` (`rate`, `seed`, `new`, `original`, `diverged`; where
                measured, `share` of the run in a blend, `chosen`, the losses by which runs are chosen); `frontiers` by
                seed; `best` (`rate`, `share`, `new`, `original`: the point with the smallest sum); `against_full` and
                `area`, each `mean`, `half` (null: fewer than three seeds), `seeds`; `width` of the range of new losses
                that this row and full fine-tuning both reach, averaged over seeds; `verdict` on the claim that this
                row forgets less than full fine-tuning; `beaten`, how many runs full fine-tuning beats on both axes
            `remedies`: each method with a second remedy: `method`, `with`, `beside`, `forgets` (both: original loss
                above the base's at equal new loss), `share`, `apart` and `reach` (difference of the lowest new losses),
                each as `against_full`; `width` of the range of new losses that both reach; `verdict` on the claim that
                the first forgets less
            `claims`: each with `says`, `better`, `worse`, `on`, `paper`, `remedy`, `difference` (as `against_full`),
                `width` of the range that both reach on the other axis, `verdict`
            `first`: what full fine-tuning beats, in words, or empty
            `advice`: the sentence of advice
            `missing`: runs still to be made, a line for each row and seed
            `notes`: lines for the reader
        """
        return {
            "surgeon_study": 1,
            **plain_fields(self, without=("rows", "remedies", "claims", "start")),
            "start": {"new": self.start[0], "original": self.start[1]},
            "rows": [
                {
                    **plain_fields(row, without=("against", "best")),
                    "frontiers": {str(seed): [list(pair) for pair in row.frontier(seed)] for seed in row.seeds()},
                    "best": None
                    if row.best is None
                    else {k: getattr(row.best, k) for k in ("rate", "share", "new", "original")},
                    "against_full": plain(row.against and row.against.difference),
                    "width": row.against and row.against.width,
                }
                for row in self.rows
            ],
            "remedies": [
                {
                    "with": each.with_,
                    **plain_fields(each, without=("label", "with_")),
                    "apart": plain(each.apart.difference),
                    "width": each.apart.width,
                }
                for each in self.remedies
            ],
            "claims": [
                {
                    **judged.claim.model_dump(mode="json"),
                    **plain_fields(judged, without=("claim", "apart")),
                    "difference": plain(judged.apart.difference),
                    "width": judged.apart.width,
                }
                for judged in self.claims
            ],
        }


def first_sentence(rows: Sequence[Row]) -> str:
    """Return sentences on what full fine-tuning beats, which are shown before all other results.

    They are empty where full fine-tuning beats fewer than half of the runs and forgets less than no other row. The
    number of beaten runs is meaningful even where frontiers have no range in common.
    """
    others = [row for row in rows if row.against is not None and row.best is not None and not row.blended]
    runs, beaten = sum(len(row.points) for row in others), sum(row.beaten for row in others)
    more = [row for row in others if row.verdict == "disagrees"]
    if not others or (not more and 2 * beaten < runs):
        return ""
    words = [f"Full fine-tuning with the same remedy beats {beaten} of {runs} runs of other methods on both losses."]
    if more:
        rest = [row for row in others if row not in more]
        # Name the shorter list. Labels may contain commas, so `;` separates them.
        named = rest if 0 < len(rest) < len(more) else more
        names = ("all but " if named is rest else "") + "; ".join(row.label for row in named)
        words.append(f"It forgets less at equal new loss than {len(more)} of {len(others)}: {names}.")
    open_ = sum(row.verdict in ("no common range", "range too narrow") for row in others)
    few = sum(row.verdict in ("points its way", "points against it") for row in others)
    words += [f"{open_} have too little in common with it to be judged."] * bool(open_)
    words += [f"For {few} more seeds are needed."] * bool(few)
    return " ".join(words)


def advice_of(study: Study, rows: Sequence[Row], corner: Pair) -> str:
    """Return the advice: the row with the smallest sum of losses, its rate, and full fine-tuning's result beside it.

    There is no advice until every row has a finished run, because a row without runs might be the best.
    """
    waiting = [row for row in rows if not row.points]
    if waiting:
        return f"No advice before each of the {len(rows)} rows has a finished run: {len(waiting)} have none."
    ranked = sorted((row for row in rows if row.best is not None), key=lambda row: _sum(row.best))
    if not ranked:
        return "Every run diverged: try lower rates."
    row, point = ranked[0], ranked[0].best
    assert point is not None
    if point.new + point.original >= corner[0] + corner[1]:
        return (
            f"At {study.budget_words} a run nothing is worth it here: every run forgets more than it learns"
            f" (nearest: {row.label}, rate {point.shown_rate}). More text, or a gentler remedy, may help."
        )
    words = (
        f"For this data at this budget ({study.budget_words} a run): {row.label}, rate {point.shown_rate}: new loss"
        f" {corner[0]:.3f} → {point.new:.3f}, original {corner[1]:.3f} → {point.original:.3f}"
    )
    return f"{words}; {_beside(row, point, ranked)}{_sureness(row)}."


def _sum(point: Point | None) -> float:
    """Return the sum of a point's losses; infinite for None."""
    return math.inf if point is None else point.sum


def _beside(row: Row, point: Point, ranked: Sequence[Row]) -> str:
    """Return what full fine-tuning with the same remedy reaches; for full fine-tuning, what the best other row is."""
    peers = [each for each in ranked if each.remedy == row.remedy]
    if row.kind == "full":
        other = next((each for each in peers if each.kind != "full"), None)
        if other is None or other.best is None:
            return "nothing else was tried with this remedy"
        best = other.best
        return f"the best other is {other.label}, rate {best.shown_rate}: {best.new:.3f}, {best.original:.3f}"
    full = next((each for each in peers if each.kind == "full"), None)
    if full is None:
        return "full fine-tuning with the same remedy has no run to compare with"
    frontier = full.mean_frontier()
    if point.new < frontier[0][0]:
        return (
            f"full fine-tuning never learns as much: its lowest new loss is {frontier[0][0]:.3f}, with original"
            f" {frontier[0][1]:.3f}"
        )
    if point.new > frontier[-1][0]:
        return (
            f"full fine-tuning learns more even at its gentlest: new loss {frontier[-1][0]:.3f}, original"
            f" {frontier[-1][1]:.3f}"
        )
    return f"full fine-tuning reaches original {height(frontier, point.new):.3f} at that new loss"


def _sureness(row: Row) -> str:
    """Return, in parentheses, how certain the advice is."""
    if row.against is None:
        return "" if len(row.seeds()) > 2 else f" ({_seeds(len(row.seeds()))})"
    found = row.against.difference
    if found is None:
        return " (their frontiers have no new loss in common)"
    if not row.against.enough:
        return f" (their frontiers have {row.against.width:.2f} of new loss in common, too little to be judged)"
    if found.half is None:
        return f" ({_seeds(found.seeds)})"
    words = {"agrees": "forgets less than full fine-tuning", "disagrees": "forgets more than full fine-tuning"}
    said = words.get(row.verdict or "", "not told apart from full fine-tuning")
    return f" ({said}: {found.mean:+.3f} ± {found.half:.3f}, {found.seeds} seeds)"


def _seeds(count: int) -> str:
    """Return a note that so few seeds are not enough."""
    return f"{count} seed{'' if count == 1 else 's'}: three are needed to tell methods apart"
