"""What a study has found, as the page, the terminal and results.json show it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from surgeon.common.json_results import plain_fields
from surgeon.compare.config.schema import Claim
from surgeon.compare.frontier import Interval, Pair, envelope
from surgeon.compare.verdicts import Apart, Verdict


@dataclass(frozen=True)
class Point:
    """A finished run: its losses on new and original text, in the result's unit; infinite where it diverged."""

    rate: float
    seed: int
    new: float
    original: float
    diverged: str = ""


@dataclass(frozen=True)
class Row:
    """A method with a remedy: its runs, and how its frontier lies beside full fine-tuning's with the same remedy.

    `against` is the difference in original loss at equal new loss (negative: this one forgets less), None of full
    fine-tuning itself, and `verdict` what it says of a claim that this one forgets less. `beaten` are the runs that a
    run of full fine-tuning with the same seed beats on both axes. `area` is that between frontier and the base's
    corner, over the new losses that all rows reach but those that hardly learn, which have none. `best` has the
    smallest sum of both losses, seeds in the mean.
    `steps` are those of a finished run; where runs have equal bytes they differ from row to row.
    """

    method: str
    remedy: str
    label: str
    kind: str
    trained: int
    steps: int
    points: tuple[Point, ...]
    best: Point | None
    against: Apart | None
    verdict: Verdict | None
    beaten: int
    shared: Pair | None
    area: Interval | None
    open_end: str

    def seeds(self) -> list[int]:
        """Seeds with a point that is finite."""
        return sorted({point.seed for point in self.points if math.isfinite(point.new)})

    def frontier(self, seed: int) -> list[Pair]:
        """Return the frontier of one seed."""
        return envelope([(point.new, point.original) for point in self.points if point.seed == seed])

    def means(self) -> list[Point]:
        """A point a rate, seeds in the mean; rates that some seed still lacks are of those that are there."""
        found = []
        for rate in sorted({point.rate for point in self.points}):
            there = [point for point in self.points if point.rate == rate]
            new, original = (math.fsum(getattr(p, axis) for p in there) / len(there) for axis in ("new", "original"))
            found.append(Point(rate, -1, new, original))
        return [point for point in found if math.isfinite(point.new) and math.isfinite(point.original)]

    def mean_frontier(self) -> list[Pair]:
        """The envelope of the means."""
        return envelope([(point.new, point.original) for point in self.means()])


@dataclass(frozen=True)
class Judged:
    """A paper's claim, and what the frontiers say: a negative difference is for the claim."""

    claim: Claim
    remedy: str
    apart: Apart
    verdict: Verdict


@dataclass(frozen=True)
class Remedied:
    """A method with one remedy (`with_`) beside itself with another (`beside`), at equal new loss.

    `forgets` is what each forgets, original loss above the base's, in the mean over the new losses that both cover;
    `share` the first's part of the second's; `apart` their difference; `reach` the lowest new loss of the first minus
    the second's (negative: it learns more at its most). None where the frontiers have no new loss in common.
    """

    method: str
    label: str
    with_: str
    beside: str
    forgets: tuple[Interval | None, Interval | None]
    share: Interval | None
    apart: Interval | None
    reach: Interval | None


@dataclass(frozen=True)
class Findings:
    """Everything that a study has found so far; `missing` says what is still to be made, a line each."""

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
        """Return plain data; numbers that are not finite are texts.

        Keys:
            `surgeon_study`, `base`, `budget`, `unit`: version of the format; the model; `steps`, `batch`, `length`,
                `tokens`, `seeds`; nats a token or bits a byte
            `texts`, `start`: names of the texts, and the base's mean losses, each `new` and `original`
            `rows`: each method with each remedy: `method`, `remedy`, `label`, `kind`, `trained`, `open_end`; `points`
                (`rate`, `seed`, `new`, `original`, `diverged`); `frontiers` by seed; `best` (`rate`, `new`, `original`:
                the smallest sum); `against_full` and `area`, each `mean`, `half` (null: fewer than three seeds),
                `seeds`; `shared`, the new losses that it and full fine-tuning reach; `width` of these, seeds in the
                mean; `verdict` (that it forgets less than full fine-tuning); `beaten`, the runs that full fine-tuning
                beats on both axes
            `remedies`: each method with a second remedy: `method`, `with`, `beside`, `forgets` (both: original loss
                above the base's at equal new loss), `share`, `apart` and `reach` (difference of the lowest new losses),
                each as `against_full`
            `claims`: each with `says`, `better`, `worse`, `on`, `paper`, `remedy`, `difference` (as `against_full`),
                `width` of what both reach of the other axis, `verdict`
            `first`, `advice`: what full fine-tuning beats (or empty); the sentence of advice
            `missing`, `notes`: runs still to be made, a line for each row; lines for the reader
        """
        return {
            "surgeon_study": 1,
            **plain_fields(self, without=("rows", "remedies", "claims", "start")),
            "start": {"new": self.start[0], "original": self.start[1]},
            "rows": [
                {
                    **plain_fields(row, without=("against", "area", "best", "shared")),
                    "frontiers": {str(seed): [list(pair) for pair in row.frontier(seed)] for seed in row.seeds()},
                    "best": None
                    if row.best is None
                    else {k: getattr(row.best, k) for k in ("rate", "new", "original")},
                    "against_full": _interval(row.against and row.against.difference),
                    "width": row.against and row.against.width,
                    "shared": None if row.shared is None else list(row.shared),
                    "area": _interval(row.area),
                }
                for row in self.rows
            ],
            "remedies": [
                {
                    "method": each.method,
                    "with": each.with_,
                    "beside": each.beside,
                    "forgets": [_interval(one) for one in each.forgets],
                    **{key: _interval(getattr(each, key)) for key in ("share", "apart", "reach")},
                }
                for each in self.remedies
            ],
            "claims": [
                {
                    **judged.claim.model_dump(mode="json"),
                    "remedy": judged.remedy,
                    "difference": _interval(judged.apart.difference),
                    "width": judged.apart.width,
                    "verdict": judged.verdict,
                }
                for judged in self.claims
            ],
        }


def _interval(found: Interval | None) -> dict[str, Any] | None:
    return None if found is None else found._asdict()
