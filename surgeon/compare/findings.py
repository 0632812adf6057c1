"""What finished runs say: frontiers, differences to full fine-tuning, what papers claim, and a sentence of advice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgeon.common.json_results import plain_fields
from surgeon.compare.config.loading import LoadedStudy
from surgeon.compare.config.schema import Claim, MethodSpec, Remedy, Study
from surgeon.compare.frontier import (
    Interval,
    Pair,
    Verdict,
    area,
    common_range,
    difference,
    envelope,
    height,
    interval,
    mean_height,
    turned,
    verdict,
)
from surgeon.compare.records import Record, losses_of
from surgeon.compare.schedule import Run, rates_of, runs_left

# A row that learns less than this share of what the best one does has no area: the others' would be of hardly any loss.
_LEARNED = 0.1


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

    `against` is the mean difference in original loss at equal new loss (negative: this one forgets less), None of full
    fine-tuning itself and where the two have no new loss in common. `area` is that between frontier and the base's
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
    against: Interval | None
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
    difference: Interval | None
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
                `seeds`; `shared`, the new losses that it and full fine-tuning reach
            `remedies`: each method with a second remedy: `method`, `with`, `beside`, `forgets` (both: original loss
                above the base's at equal new loss), `share`, `apart` and `reach` (difference of the lowest new losses),
                each as `against_full`
            `claims`: each with `says`, `better`, `worse`, `on`, `paper`, `remedy`, `difference` (as `against_full`),
                `verdict`
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
                    "against_full": _interval(row.against),
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
                    "difference": _interval(judged.difference),
                    "verdict": judged.verdict,
                }
                for judged in self.claims
            ],
        }


def _interval(found: Interval | None) -> dict[str, Any] | None:
    return None if found is None else found._asdict()


def find(
    loaded: LoadedStudy,
    base: str,
    start: Record,
    records: Mapping[Run, Record],
    names: tuple[list[str], list[str]],
) -> Findings:
    """What the records say. `start` is the base's own, `names` those of the new and the original texts."""
    study = loaded.config
    by_byte = _other_tokens(start, records)
    losses = {run: losses_of(record, names, by_byte=by_byte) for run, record in records.items()}
    corner = losses_of(start, names, by_byte=by_byte)
    rows = _rows(study, records, losses, corner)
    shown = [row for row in rows if row.best is not None]
    notes = [*loaded.notes, *(f"{row.label}: {row.open_end}" for row in rows if row.open_end)]
    if not loaded.config.original:
        notes.append("no original text was given: `original` is held-out text that the base wrote itself")
    if by_byte:
        notes.append("a method has tokens of its own, so losses are in bits a byte")
    if not any(row.kind == "full" for row in rows):
        notes.append("full fine-tuning is left out (`peers: false`): nothing says whether any of these is worth it")
    return Findings(
        base=base,
        budget=study.budget,
        unit="bits a byte" if by_byte else "nats a token",
        texts={"new": names[0], "original": names[1]},
        start=corner,
        rows=tuple(rows),
        remedies=tuple(_remedied(study, rows, corner)),
        claims=tuple(_judged(study, rows)),
        first=_first(shown),
        advice=_advice(study, shown, corner),
        missing=tuple(_missing(study, losses)),
        notes=tuple(notes),
    )


def _other_tokens(start: Record, records: Mapping[Run, Record]) -> bool:
    """Whether some run predicts other tokens of the same text than the base does."""
    assert start.measured is not None
    return any(
        source.tokens != start.measured[name].tokens
        for record in records.values()
        if record.measured is not None
        for name, source in record.measured.items()
    )


def _rows(study: Study, records: Mapping[Run, Record], losses: Mapping[Run, Pair], corner: Pair) -> list[Row]:
    made = [_row(study, method, remedy, records, losses) for method, remedy in study.entries]
    full = {row.remedy: row for row in made if row.kind == "full"}
    level = _level(made, corner)
    rows = []
    for row in made:
        against = shared = None
        if (peer := full.get(row.remedy)) is not None and peer.method != row.method:
            against = between(row, peer)
            shared = common_range(row.mean_frontier(), peer.mean_frontier())
        frontiers = _frontiers(row)
        # Of a seed more that stopped short the row has no area either: a mean would be of other losses.
        whole = level is not None and all(frontier[0][0] <= level for frontier in frontiers)
        areas = [area(frontier, corner, level) for frontier in frontiers] if whole and level is not None else []
        rows.append(_changed(row, against=against, shared=shared, area=interval(areas)))
    return rows


def _level(rows: Sequence[Row], corner: Pair) -> float | None:
    """The new loss that every row reaches which learns something; beyond it an area would be of other things for each.

    None where nothing was learned.
    """
    reached = [max(frontier[0][0] for frontier in frontiers) for row in rows if (frontiers := _frontiers(row))]
    lowest = min(reached, default=math.inf)
    if lowest >= corner[0]:
        return None
    return max(new for new in reached if corner[0] - new >= _LEARNED * (corner[0] - lowest))


def _frontiers(row: Row) -> list[list[Pair]]:
    """Return the frontier of each seed that has a point."""
    return [frontier for seed in row.seeds() if (frontier := row.frontier(seed))]


def _changed(row: Row, **changes: Any) -> Row:
    return Row(**(vars(row) | changes))


def _row(
    study: Study,
    method: MethodSpec,
    remedy: Remedy,
    records: Mapping[Run, Record],
    losses: Mapping[Run, Pair],
) -> Row:
    of_row = sorted(
        (run for run in records if (run.method, run.remedy) == (method.called, remedy.name)),
        key=lambda run: (run.rate, run.seed),
    )
    points = tuple(Point(run.rate, run.seed, *losses[run], records[run].diverged) for run in of_row)
    several = len({each.name for _, each in study.entries}) > 1
    row = Row(
        method=method.called,
        remedy=remedy.name,
        label=f"{method.words}, {remedy.name}" if several else method.words,
        kind=method.kind,
        trained=max((records[run].trained for run in of_row), default=0),
        steps=study.run_steps or max((records[run].steps for run in of_row), default=0),
        points=points,
        best=None,
        against=None,
        shared=None,
        area=None,
        open_end=rates_of(study, method, remedy, losses).open_end,
    )
    best = min(row.means(), key=lambda point: (point.new + point.original, point.rate), default=None)
    return _changed(row, best=best)


def between(one: Row, other: Row, *, on: str = "forgets") -> Interval | None:
    """The difference of two rows' frontiers, seed by seed: in original loss at equal new loss, or (learns) turned."""
    found = []
    for seed in sorted(set(one.seeds()) & set(other.seeds())):
        pair = one.frontier(seed), other.frontier(seed)
        mine, theirs = pair if on == "forgets" else (turned(pair[0]), turned(pair[1]))
        if (apart := difference(mine, theirs)) is not None:
            found.append(apart)
    return interval(found)


def _judged(study: Study, rows: Sequence[Row]) -> list[Judged]:
    """Every claim with every remedy that both of its methods were tried with, or with those that it names."""
    found = []
    for claim in study.claims:
        pairs = [(one, other) for one in _named(rows, claim.better) for other in _named(rows, claim.worse)]
        explicit = "/" in claim.better or "/" in claim.worse
        for one, other in pairs:
            if explicit or one.remedy == other.remedy:
                if one.best is None or other.best is None:
                    continue
                apart = between(one, other, on=claim.on)
                remedy = one.remedy if one.remedy == other.remedy else f"{one.remedy}, {other.remedy}"
                found.append(Judged(claim, remedy, apart, verdict(apart)))
    return found


def _remedied(study: Study, rows: Sequence[Row], corner: Pair) -> list[Remedied]:
    """Every method with each remedy beside itself with those named before it."""
    found = []
    for method in study.all_methods:
        own = [row for row in rows if row.method == method.called and row.best is not None]
        for nth, row in enumerate(own):
            found += [_beside_itself(method.words, row, other, corner) for other in own[:nth]]
    return found


def _beside_itself(label: str, row: Row, other: Row, corner: Pair) -> Remedied:
    forgets: list[tuple[float, float]] = []
    reach = []
    for seed in sorted(set(row.seeds()) & set(other.seeds())):
        pair = row.frontier(seed), other.frontier(seed)
        reach.append(pair[0][0][0] - pair[1][0][0])
        if (shared := common_range(*pair)) is not None:
            forgets.append((mean_height(pair[0], shared) - corner[1], mean_height(pair[1], shared) - corner[1]))
    # Where the other forgets nothing there is no part of it.
    shares = [mine / theirs for mine, theirs in forgets] if all(theirs > 0 for _, theirs in forgets) else []
    return Remedied(
        method=row.method,
        label=label,
        with_=row.remedy,
        beside=other.remedy,
        forgets=(interval([mine for mine, _ in forgets]), interval([theirs for _, theirs in forgets])),
        share=interval(shares),
        apart=interval([mine - theirs for mine, theirs in forgets]),
        reach=interval(reach),
    )


def _named(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if name in (row.method, f"{row.method}/{row.remedy}")]


def _first(rows: Sequence[Row]) -> str:
    """What full fine-tuning beats, which is said before anything else; empty where it beats nothing."""
    others = [row for row in rows if row.kind != "full" and row.against is not None]
    beaten = [row for row in others if verdict(row.against) in ("disagrees", "points against it")]
    if not beaten:
        return ""
    sure = [row for row in beaten if verdict(row.against) == "disagrees"]
    rest = [row for row in others if row not in beaten]
    # The shorter list is named; labels have commas of their own.
    named = rest if 0 < len(rest) < len(beaten) else beaten
    names = ("all but " if named is rest else "") + "; ".join(row.label for row in named)
    how = (
        f"for {len(sure)} of them the interval over seeds excludes 0"
        if sure
        else "too few seeds to know whether that is more than chance"
    )
    return (
        f"Full fine-tuning with the same remedy forgets less at equal new loss than {len(beaten)} of"
        f" {len(others)}: {names} ({how})."
    )


def _advice(study: Study, rows: Sequence[Row], corner: Pair) -> str:
    """The row with the smallest sum of losses, its rate, and what full fine-tuning reaches beside it."""
    if not rows:
        return "No run is finished yet."
    ranked = sorted(rows, key=lambda row: _sum(row.best))
    row, point = ranked[0], ranked[0].best
    assert point is not None
    if _sum(point) >= corner[0] + corner[1]:
        return (
            f"At {study.budget_words} a run nothing is worth it here: every run forgets more than it learns"
            f" (nearest: {row.label}, rate {point.rate:g}). More text, or a gentler remedy, may help."
        )
    words = (
        f"For this data at this budget ({study.budget_words} a run): {row.label}, rate {point.rate:g}: new loss"
        f" {corner[0]:.3f} → {point.new:.3f}, original {corner[1]:.3f} → {point.original:.3f}"
    )
    return f"{words}; {_beside(row, point, ranked)}{_sureness(row, rows)}."


def _sum(point: Point | None) -> float:
    return math.inf if point is None else point.new + point.original


def _beside(row: Row, point: Point, ranked: Sequence[Row]) -> str:
    """What full fine-tuning reaches; of full fine-tuning itself, what the best other does."""
    if row.kind == "full":
        other = next((each for each in ranked if each.kind != "full"), None)
        if other is None or other.best is None:
            return "nothing else was tried"
        best = other.best
        return f"the best other is {other.label}, rate {best.rate:g}: {best.new:.3f}, {best.original:.3f}"
    full = next((each for each in ranked if each.kind == "full" and each.remedy == row.remedy), None)
    full = full or next((each for each in ranked if each.kind == "full"), None)
    if full is None or full.best is None:
        return "full fine-tuning has no finished run to compare with"
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


def _sureness(row: Row, rows: Sequence[Row]) -> str:
    """How far the advice is to be trusted."""
    full = next((each for each in rows if each.kind == "full" and each.remedy == row.remedy), None)
    if full is None or full is row:
        return "" if len(row.seeds()) > 2 else f" ({_seeds(len(row.seeds()))})"
    if row.against is None:
        return " (their frontiers have no new loss in common)"
    if row.against.half is None:
        return f" ({_seeds(row.against.seeds)})"
    words = {"agrees": "forgets less than full fine-tuning", "disagrees": "forgets more than full fine-tuning"}
    said = words.get(verdict(row.against), "not told apart from full fine-tuning")
    return f" ({said}: {row.against.mean:+.3f} ± {row.against.half:.3f}, {row.against.seeds} seeds)"


def _seeds(count: int) -> str:
    return f"{count} seed{'' if count == 1 else 's'}: three are needed to tell methods apart"


def _missing(study: Study, losses: Mapping[Run, Pair]) -> list[str]:
    """Runs that are left, a line for each row and seed; seeds whose rates are not known yet."""
    by_row: dict[tuple[str, str, int], list[float]] = {}
    for run in runs_left(study, losses):
        by_row.setdefault((run.method, run.remedy, run.seed), []).append(run.rate)
    lines = [
        f"{method}, {remedy}, seed {seed}: {'rates' if len(rates) > 1 else 'rate'}"
        f" {', '.join(f'{rate:g}' for rate in sorted(rates))}"
        for (method, remedy, seed), rates in by_row.items()
    ]
    lines += [
        f"{method.called}, {remedy.name}: {study.seeds_of(method) - 1} more seeds, once its rates are known"
        for method, remedy in study.entries
        if study.seeds_of(method) > 1 and not rates_of(study, method, remedy, losses).settled
    ]
    return lines
