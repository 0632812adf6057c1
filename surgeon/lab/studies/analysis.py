"""What finished runs say: frontiers, differences to full fine-tuning, what remedies give, and papers' claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from surgeon.lab.studies.config.entries import Claim, MethodSpec, Remedy
from surgeon.lab.studies.config.loading import LoadedStudy
from surgeon.lab.studies.config.schema import Study
from surgeon.lab.studies.findings import BLENDED, Findings, Judged, Point, Remedied, Row, advice_of, first_sentence
from surgeon.lab.studies.frontier import (
    NARROW,
    NARROW_SHARE,
    Apart,
    Pair,
    area,
    common_range,
    difference,
    interval,
    mean_height,
    turned,
    verdicts,
)
from surgeon.lab.studies.records import Record, losses_of
from surgeon.lab.studies.schedule import Run, rates_of, runs_left

# By text, numbers of its held-out documents.
Documents = Mapping[str, Sequence[int]]

# How often documents are drawn for the interval over them.
_DRAWS = 100

# A row that learns less than this share of what the best one does has no area: the others' would be of hardly any loss.
_LEARNED = 0.1


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
    choosing, reported = parted(study, start)
    losses = {run: losses_of(each, names, by_byte=by_byte, documents=choosing) for run, each in records.items()}
    corner = losses_of(start, names, by_byte=by_byte, documents=reported)

    def point(reported: Documents | None, run: Run, share: float) -> Point:
        losses_on = partial(losses_of, records[run], names, by_byte=by_byte, share=share)
        new, original = losses_on(documents=reported)
        chosen = losses_on(documents=choosing) if choosing else None
        kl = _kl(records[run], names[0]) if share == 1.0 else None
        return Point(run.rate, run.seed, new, original, records[run].diverged, share, kl, chosen)

    def made_of(reported: Documents | None) -> list[Row]:
        of = partial(point, reported)
        return [row for method, remedy in study.entries for row in _rows(study, method, remedy, records, losses, of)]

    made = made_of(reported)
    nat = _nat(start, names) if by_byte else 1.0
    rows, claims = judge(made, study.claims, corner, nat)
    others = remedied(rows, corner, nat)
    if others and all(loss.by_document for loss in (start.measured or {}).values()):
        others = _over_documents(others, start, reported, lambda some: remedied(made_of(some), corner, nat))
    notes = [*loaded.notes, *(f"{row.label}: {row.open_end}" for row in rows if row.open_end)]
    if not loaded.config.original:
        notes.append("no original text was given: `original` is held-out text that the base wrote itself")
    if by_byte:
        notes.append("a method has tokens of its own, so losses are in bits a byte")
    if study.blend:
        unblended = {row.method for row in rows if row.runs} - {row.method for row in rows if row.blended}
        notes += [
            f"{method}: none of its runs is blended; only silent parts, copies and the base's own tensors can be"
            for method in sorted(unblended)
        ]
    if not any(row.kind == "full" for row in rows):
        notes.append("full fine-tuning is left out (`peers: false`): nothing says whether any of these is worth it")
    return Findings(
        base=base,
        budget=study.budget,
        unit="bits a byte" if by_byte else "nats a token",
        texts={"new": names[0], "original": names[1]},
        start=corner,
        rows=tuple(rows),
        remedies=tuple(others),
        claims=tuple(claims),
        first=first_sentence(rows),
        advice=advice_of(study, rows, corner),
        missing=tuple(_missing(study, losses)),
        notes=tuple(notes),
    )


def parted(study: Study, start: Record) -> tuple[Documents | None, Documents | None]:
    """By text, the documents by which runs are chosen, and those that are reported; None: all for both.

    Those that choose lie evenly among all, which are in the order of their file.
    """
    assert start.measured is not None
    if not study.choosing:
        return None, None
    part = study.choosing / (study.choosing + study.documents)
    choosing, reported = {}, {}
    for name, loss in start.measured.items():
        count, many = loss.documents, round(loss.documents * part)
        # Of one document there are no parts.
        some = {nth * count // many for nth in range(many)} if many else {0}
        choosing[name], reported[name] = sorted(some), sorted({*range(count)} - some) or [0]
    return choosing, reported


def _over_documents(
    found: Sequence[Remedied],
    start: Record,
    reported: Documents | None,
    again: Callable[[Documents], list[Remedied]],
) -> list[Remedied]:
    """The remedies with the bootstrap's intervals over documents, seeds and the choice of runs as they are.

    Documents of each text are drawn with replacement, and the difference is worked out by `again` (Efron 1979).
    """
    import numpy as np

    every = reported or {name: range(loss.documents) for name, loss in (start.measured or {}).items()}
    drawn: list[list[float]] = [[] for _ in found]
    for number in range(_DRAWS):
        draw = np.random.default_rng(number)
        some = {name: draw.choice(list(each), len(each)).tolist() for name, each in every.items()}
        for means, each in zip(drawn, again(some), strict=True):
            means += [] if each.apart is None else [each.apart.mean]
    middle = [np.quantile(means, [0.025, 0.975]).tolist() if means else None for means in drawn]
    return [replace(each, documents=ends and (ends[0], ends[1])) for each, ends in zip(found, middle, strict=True)]


def _kl(record: Record, new: Sequence[str]) -> float | None:
    """KL(base ‖ run) in nats a token, in the mean over the new texts; None where it was not measured on each."""
    found = [each.kl for name in new if record.measured is not None and (each := record.measured[name]).kl is not None]
    return fmean(found) if found and len(found) == len(new) else None


def _other_tokens(start: Record, records: Mapping[Run, Record]) -> bool:
    """Whether some run predicts other tokens of the same text than the base does."""
    assert start.measured is not None
    return any(
        source.tokens != start.measured[name].tokens
        for record in records.values()
        if record.measured is not None
        for name, source in record.measured.items()
    )


def _nat(start: Record, names: tuple[list[str], list[str]]) -> float:
    """How many bits a byte of the base's text one nat a token is."""
    bits, nats = (math.fsum(losses_of(start, names, by_byte=by_byte)) for by_byte in (True, False))
    return bits / nats


def judge(
    made: Sequence[Row], claims: Sequence[Claim], corner: Pair, nat: float = 1.0
) -> tuple[list[Row], list[Judged]]:
    """The rows beside full fine-tuning, and the claims, with verdicts corrected for all differences of the page.

    `corner` are the base's losses, in a unit of which `nat` are one nat a token.
    """
    limits = _limits(made, corner, nat)
    rows, claimed = _beside_full(made, corner, limits), _claimed(claims, made, limits)
    every = [row.against for row in rows if row.against is not None] + [apart for _, _, apart in claimed]
    every = list(dict.fromkeys(every))
    said = dict(zip(every, verdicts(every), strict=True))
    judged = [Judged(claim, remedy, apart, said[apart]) for claim, remedy, apart in claimed]
    return [replace(row, verdict=said[row.against]) if row.against is not None else row for row in rows], judged


def _limits(rows: Sequence[Row], corner: Pair, nat: float) -> Pair:
    """How much of the new and of the original loss two frontiers must both cover, for their difference to be judged.

    It is a part of what full fine-tuning covers of it (all rows, where there is none), and `nat` says what a nat is.
    """
    full = [row for row in rows if row.kind == "full"] or list(rows)
    points = [point for row in full for frontier in _frontiers(row) for point in frontier]
    learned = max((corner[0] - new for new, _ in points), default=0.0)
    forgotten = max((original - corner[1] for _, original in points), default=0.0)
    return max(NARROW * nat, NARROW_SHARE * learned), max(NARROW * nat, NARROW_SHARE * forgotten)


def _beside_full(made: Sequence[Row], corner: Pair, limits: Pair) -> list[Row]:
    """The rows, each beside full fine-tuning with the same remedy, and their areas."""
    full = {row.remedy: row for row in made if row.kind == "full"}
    level = _level(made, corner)
    rows = []
    for row in made:
        found: dict[str, Any] = {}
        if row.points and (peer := full.get(row.remedy)) is not None and peer.method != row.method:
            shared = common_range(row.mean_frontier(), peer.mean_frontier())
            found = {"against": between(row, peer, limits), "beaten": _beaten(row, peer), "shared": shared}
        frontiers = _frontiers(row)
        # Of a seed more that stopped short the row has no area either: a mean would be of other losses.
        whole = level is not None and all(frontier[0][0] <= level for frontier in frontiers)
        areas = [area(frontier, corner, level) for frontier in frontiers] if whole and level is not None else []
        rows.append(replace(row, **found, area=interval(areas)))
    return rows


def _beaten(row: Row, other: Row) -> int:
    """How many runs of a row a run of another with the same seed beats on both axes."""
    return sum(
        any(
            peer.seed == point.seed and peer.new < point.new and peer.original < point.original for peer in other.points
        )
        for point in row.points
    )


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


def _rows(
    study: Study,
    method: MethodSpec,
    remedy: Remedy,
    records: Mapping[Run, Record],
    losses: Mapping[Run, Pair],
    point: Callable[[Run, float], Point],
) -> list[Row]:
    """The row of an entry; and where its runs were blended with what they began with, another of runs and blends."""
    of_row = sorted(
        (run for run in records if (run.method, run.remedy) == (method.called, remedy.name)),
        key=lambda run: (run.rate, run.seed),
    )
    several = len({each.name for _, each in study.entries}) > 1 or bool(study.blend)
    found = []
    for shares in ([1.0], *([[1.0, *study.blend]] if study.blend else ())):
        # Of a run that diverged there is no blend.
        points = tuple(point(run, s) for s in shares for run in of_row if s == 1.0 or records[run].at(s) is not None)
        blended = len(shares) > 1
        if blended and all(each.share == 1.0 for each in points):
            continue
        called = f"{remedy.name}{BLENDED}" if blended else remedy.name
        row = Row(
            method=method.called,
            remedy=called,
            label=f"{method.words}, {called}" if several else method.words,
            kind=method.kind,
            trained=max((records[run].trained for run in of_row), default=0),
            steps=study.run_steps or max((records[run].steps for run in of_row), default=0),
            points=points,
            best=None,
            against=None,
            verdict=None,
            beaten=0,
            shared=None,
            area=None,
            open_end="" if blended else rates_of(study, method, remedy, losses).open_end,
            blended=blended,
        )
        found.append(replace(row, best=min(row.means(), key=lambda each: (each.sum, each.rate), default=None)))
    return found


def _pairs(one: Row, other: Row) -> list[tuple[list[Pair], list[Pair]]]:
    """Return the frontiers of two rows by seed, of the seeds that both have."""
    return [(one.frontier(seed), other.frontier(seed)) for seed in sorted({*one.seeds()} & {*other.seeds()})]


def between(one: Row, other: Row, limits: Pair, *, on: str = "forgets") -> Apart:
    """The difference of two rows' frontiers, seed by seed: in original loss at equal new loss, or (learns) turned."""
    found, widths = [], []
    for mine, theirs in _pairs(one, other):
        if on == "learns":
            mine, theirs = turned(mine), turned(theirs)
        apart, shared = difference(mine, theirs), common_range(mine, theirs)
        if apart is not None and shared is not None:
            found.append(apart)
            widths.append(shared[1] - shared[0])
    if not found:
        return Apart(None)
    width = fmean(widths)
    return Apart(interval(found), width, width >= limits[on != "forgets"])


def _claimed(claims: Sequence[Claim], rows: Sequence[Row], limits: Pair) -> list[tuple[Claim, str, Apart]]:
    """Every claim with every remedy that both of its methods were tried with, or with those that it names."""
    found = []
    for claim in claims:
        pairs = [(one, other) for one in _named(rows, claim.better) for other in _named(rows, claim.worse)]
        explicit = "/" in claim.better or "/" in claim.worse
        for one, other in pairs:
            if explicit or one.remedy == other.remedy:
                if one.best is None or other.best is None:
                    continue
                remedy = one.remedy if one.remedy == other.remedy else f"{one.remedy}, {other.remedy}"
                found.append((claim, remedy, between(one, other, limits, on=claim.on)))
    return found


def remedied(rows: Sequence[Row], corner: Pair, nat: float = 1.0) -> list[Remedied]:
    """Every method with each remedy beside itself with the first one; blends also beside its blends and their own runs.

    `corner` are the base's losses, in a unit of which `nat` are one nat a token; verdicts are corrected together.
    """
    found, limits = [], _limits(rows, corner, nat)
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method and row.best is not None]
        for row in own[1:]:
            peers = [own[0]]
            if row.blended:
                # Blends beside blends: what a remedy gives where both sides are blended.
                peers += [each for each in own[1:] if each.remedy == f"{own[0].remedy}{BLENDED}" and each is not row]
                peers += [each for each in own[1:] if row.remedy == f"{each.remedy}{BLENDED}"]
            found += [_beside_itself(row, other, corner) for other in peers]
    every = [Apart(each.apart, each.width, (each.width or 0.0) >= limits[0]) for each in found]
    return [replace(each, verdict=said) for each, said in zip(found, verdicts(every), strict=True)]


def _beside_itself(row: Row, other: Row, corner: Pair) -> Remedied:
    forgets: list[tuple[float, float]] = []
    reach, widths = [], []
    for mine, theirs in _pairs(row, other):
        reach.append(mine[0][0] - theirs[0][0])
        if (shared := common_range(mine, theirs)) is not None:
            forgets.append((mean_height(mine, shared) - corner[1], mean_height(theirs, shared) - corner[1]))
            widths.append(shared[1] - shared[0])
    # Where the other forgets nothing there is no part of it.
    shares = [ours / its for ours, its in forgets] if all(its > 0 for _, its in forgets) else []
    return Remedied(
        method=row.method,
        label=row.label.removesuffix(f", {row.remedy}"),
        with_=row.remedy,
        beside=other.remedy,
        forgets=(interval([ours for ours, _ in forgets]), interval([its for _, its in forgets])),
        share=interval(shares),
        apart=interval([ours - its for ours, its in forgets]),
        reach=interval(reach),
        width=fmean(widths) if widths else None,
        verdict="no common range",
        documents=None,
    )


def _named(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if name == f"{row.method}/{row.remedy}" or (name == row.method and not row.blended)]


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
