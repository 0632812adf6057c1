"""What a study has found, as the page, the terminal and results.json show it; and its sentences.

These say what full fine-tuning beats, and which run to take.
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

# How the frontier of runs and their blends is named, after the remedy.
BLENDED = ", blended"


@dataclass(frozen=True)
class Point:
    """A finished run: its losses on new and original text, in the result's unit; infinite where it diverged.

    `share` is the run's in its blend with what it began with, `kl` KL(base ‖ run) on new text in nats a token (None: it
    was not measured), `chosen` the losses on the documents by which runs are chosen (None: by the same ones).
    """

    rate: float
    seed: int
    new: float
    original: float
    diverged: str = ""
    share: float = 1.0
    kl: float | None = None
    chosen: Pair | None = None

    @property
    def sum(self) -> float:
        """Both losses together, by which the best run is chosen."""
        return math.fsum(self.chosen or (self.new, self.original))

    @property
    def shown_rate(self) -> str:
        """Its rate, and the run's share in a blend."""
        return f"{self.rate:g}" + (f", α {self.share:g}" if self.share != 1.0 else "")

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `share`, `kl` and `chosen` where they differ from a run of a study without them."""
        usual = (("share", 1.0), ("kl", None), ("chosen", None))
        return plain_fields(self, without=[key for key, value in usual if getattr(self, key) == value])


def frontier_of(points: Sequence[Point]) -> list[Pair]:
    """The losses of the points that none beats on both axes, on the documents by which runs are chosen; x ascending."""
    kept = {*envelope([point.chosen or (point.new, point.original) for point in points])}
    return sorted({(p.new, p.original) for p in points if (p.chosen or (p.new, p.original)) in kept})


@dataclass(frozen=True)
class Row:
    """A method with a remedy: its runs, and how its frontier lies beside full fine-tuning's with the same remedy.

    `against` is the difference in original loss at equal new loss (negative: this one forgets less), None of full
    fine-tuning itself, and `verdict` what it says of a claim that this one forgets less. `beaten` are the runs that a
    run of full fine-tuning with the same seed beats on both axes. `area` is that between frontier and the base's
    corner, over the new losses that all rows reach but those that hardly learn, which have none. `best` has the
    smallest sum of both losses, seeds in the mean. A `blended` row has the runs of another one and their blends.
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
    blended: bool = False

    @property
    def runs(self) -> int:
        """How many runs were made for it."""
        return 0 if self.blended else len(self.points)

    def seeds(self) -> list[int]:
        """Seeds with a point that is finite."""
        return sorted({point.seed for point in self.points if math.isfinite(point.new)})

    def frontier(self, seed: int) -> list[Pair]:
        """Return the frontier of one seed."""
        return frontier_of([point for point in self.points if point.seed == seed])

    def means(self) -> list[Point]:
        """A point a rate and share, seeds in the mean; rates that some seed still lacks are of those that are there."""
        found = []
        for rate, share in sorted({(point.rate, point.share) for point in self.points}):
            there = [point for point in self.points if (point.rate, point.share) == (rate, share)]
            new, original = (fmean(getattr(each, axis) for each in there) for axis in ("new", "original"))
            chosen = [each.chosen for each in there if each.chosen is not None]
            kl = [each.kl for each in there if each.kl is not None]
            point = Point(rate, -1, new, original, share=share, kl=fmean(kl) if kl else None)
            if chosen:
                point = replace(point, chosen=(fmean(each[0] for each in chosen), fmean(each[1] for each in chosen)))
            found.append(point)
        return [point for point in found if math.isfinite(point.new) and math.isfinite(point.original)]

    def mean_frontier(self) -> list[Pair]:
        """The envelope of the means."""
        return frontier_of(self.means())


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
    the second's (negative: it learns more at its most). `width` is that of the new losses that both cover, seeds in the
    mean; `documents` the 95 % interval of the mean difference over documents, with these seeds (None: not kept document
    by document); `verdict` says whether the first forgets less, corrected for all remedies of the study. None where the
    frontiers have no new loss in common.
    """

    method: str
    label: str
    with_: str
    beside: str
    forgets: tuple[Interval | None, Interval | None]
    share: Interval | None
    apart: Interval | None
    reach: Interval | None
    width: float | None
    verdict: Verdict
    documents: Pair | None


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
            `rows`: each method with each remedy: `method`, `remedy`, `label`, `kind`, `trained`, `open_end`, `blended`
                (runs of another row and their blends); `points` (`rate`, `seed`, `new`, `original`, `diverged`; where
                measured, `share` of the run in a blend, `kl` of base and run on new text, losses `chosen` by);
                `frontiers` by seed; `best` (`rate`, `share`, `new`, `original`, `kl`:
                the smallest sum); `against_full` and `area`, each `mean`, `half` (null: fewer than three seeds),
                `seeds`; `shared`, the new losses that it and full fine-tuning reach; `width` of these, seeds in the
                mean; `verdict` (that it forgets less than full fine-tuning); `beaten`, the runs that full fine-tuning
                beats on both axes
            `remedies`: each method with a second remedy: `method`, `with`, `beside`, `forgets` (both: original loss
                above the base's at equal new loss), `share`, `apart` and `reach` (difference of the lowest new losses),
                each as `against_full`; `width` of the new losses that both reach; `verdict` (that the first forgets
                less); `documents`, the ends of the difference's 95 % interval over documents (null: not kept)
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
                    **plain_fields(row, without=("against", "best")),
                    "frontiers": {str(seed): [list(pair) for pair in row.frontier(seed)] for seed in row.seeds()},
                    "best": None
                    if row.best is None
                    else {k: getattr(row.best, k) for k in ("rate", "share", "new", "original", "kl")},
                    "against_full": plain(row.against and row.against.difference),
                    "width": row.against and row.against.width,
                }
                for row in self.rows
            ],
            "remedies": [
                {"with": each.with_, **plain_fields(each, without=("label", "with_"))} for each in self.remedies
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
    """What full fine-tuning beats, which is said before anything else; empty where it beats nothing.

    How many runs it beats on both axes says something also where frontiers have no range in common.
    """
    others = [row for row in rows if row.against is not None and row.best is not None and not row.blended]
    runs, beaten = sum(len(row.points) for row in others), sum(row.beaten for row in others)
    more = [row for row in others if row.verdict == "disagrees"]
    if not others or (not more and 2 * beaten < runs):
        return ""
    words = [f"Full fine-tuning with the same remedy beats {beaten} of {runs} runs of other methods on both losses."]
    if more:
        rest = [row for row in others if row not in more]
        # The shorter list is named; labels have commas of their own.
        named = rest if 0 < len(rest) < len(more) else more
        names = ("all but " if named is rest else "") + "; ".join(row.label for row in named)
        words.append(f"It forgets less at equal new loss than {len(more)} of {len(others)}: {names}.")
    open_ = sum(row.verdict in ("no common range", "range too narrow") for row in others)
    few = sum(row.verdict in ("points its way", "points against it") for row in others)
    words += [f"{open_} have too little in common with it to be judged."] * bool(open_)
    words += [f"For {few} more seeds are needed."] * bool(few)
    return " ".join(words)


def advice_of(study: Study, rows: Sequence[Row], corner: Pair) -> str:
    """The row with the smallest sum of losses, its rate, and what full fine-tuning reaches beside it.

    Nothing before every row has a finished run, as the one that lacks might be the best.
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
    return math.inf if point is None else point.sum


def _beside(row: Row, point: Point, ranked: Sequence[Row]) -> str:
    """What full fine-tuning with the same remedy reaches; of full fine-tuning itself, what the best other does."""
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
    """How far the advice is to be trusted."""
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
    return f"{count} seed{'' if count == 1 else 's'}: three are needed to tell methods apart"
