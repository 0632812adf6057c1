"""Compute the results of a study from its finished runs.

The results are frontiers, differences from full fine-tuning, effects of remedies, and verdicts on papers' claims.
"""

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

# By text, the indices of some of its held-out documents.
Documents = Mapping[str, Sequence[int]]

# A row that learns less than this share of what the best row learns has no area. With it, areas of the other rows would
# cover hardly any range of losses.
_LEARNED = 0.1


def find(
    loaded: LoadedStudy,
    base: str,
    start: Record,
    records: Mapping[Run, Record],
    names: tuple[list[str], list[str]],
) -> Findings:
    """Return the results of a study; `start` is the base's record, `names` are (new texts, original texts)."""
    study = loaded.config
    by_byte = _other_tokens(start, records)
    choosing, reported = parted(study, start)
    losses = partial(losses_of, names=names, by_byte=by_byte)

    def point(run: Run, share: float) -> Point:
        """Return the point of a run, or of its blend with this share of the run."""
        record = records[run]
        new, original = losses(record, documents=reported, share=share)
        chosen = losses(record, documents=choosing, share=share) if choosing else None
        return Point(run.rate, run.seed, new, original, record.diverged, share, chosen)

    corner = losses(start, documents=reported)
    chosen_by = {run: losses(record, documents=choosing) for run, record in records.items()}
    made = [row for method, remedy in study.entries for row in _rows(study, method, remedy, records, chosen_by, point)]
    nat = _nat(start, names) if by_byte else 1.0
    rows, claims = judge(made, study.claims, corner, nat)
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
        remedies=tuple(remedied(rows, corner, nat)),
        claims=tuple(claims),
        first=first_sentence(rows),
        advice=advice_of(study, rows, corner),
        missing=tuple(_missing(study, chosen_by)),
        notes=tuple(notes),
    )


def parted(study: Study, start: Record) -> tuple[Documents | None, Documents | None]:
    """Return (documents that choose runs, documents whose losses are reported), by text; (None, None): all for both.

    The documents for choosing are spread evenly over all documents, which are in the order of their file.
    """
    assert start.measured is not None
    if not study.choosing:
        return None, None
    part = study.choosing / (study.choosing + study.documents)
    choosing, reported = {}, {}
    for name, loss in start.measured.items():
        count, many = loss.documents, round(loss.documents * part)
        # One document cannot be divided: it is used for both.
        some = {nth * count // many for nth in range(many)} if many else {0}
        choosing[name], reported[name] = sorted(some), sorted({*range(count)} - some) or [0]
    return choosing, reported


def _other_tokens(start: Record, records: Mapping[Run, Record]) -> bool:
    """Return whether some run predicts a different number of tokens on the same text than the base."""
    assert start.measured is not None
    return any(
        source.tokens != start.measured[name].tokens
        for record in records.values()
        if record.measured is not None
        for name, source in record.measured.items()
    )


def _nat(start: Record, names: tuple[list[str], list[str]]) -> float:
    """Return how many bits a byte equal one nat a token, for the base on the study's texts."""
    bits, nats = (math.fsum(losses_of(start, names, by_byte=by_byte)) for by_byte in (True, False))
    return bits / nats


def judge(
    made: Sequence[Row], claims: Sequence[Claim], corner: Pair, nat: float = 1.0
) -> tuple[list[Row], list[Judged]]:
    """Return (rows compared with full fine-tuning, claims with verdicts); all verdicts are corrected together.

    `corner` contains the base's losses. `nat` is the value of one nat a token in the unit of `corner`.
    """
    limits = _limits(made, corner, nat)
    rows, claimed = _beside_full(made, corner, limits), _claimed(claims, made, limits)
    every = [row.against for row in rows if row.against is not None] + [apart for _, _, apart in claimed]
    every = list(dict.fromkeys(every))
    said = dict(zip(every, verdicts(every), strict=True))
    judged = [Judged(claim, remedy, apart, said[apart]) for claim, remedy, apart in claimed]
    return [replace(row, verdict=said[row.against]) if row.against is not None else row for row in rows], judged


def _limits(rows: Sequence[Row], corner: Pair, nat: float) -> Pair:
    """Return the smallest common ranges, of new and of original loss, on which two frontiers get a verdict.

    Each is a share of the range that full fine-tuning covers on that axis (that all rows cover, where there is no full
    fine-tuning), but at least a fixed number of nats a token, which `nat` converts to the unit.
    """
    full = [row for row in rows if row.kind == "full"] or list(rows)
    points = [point for row in full for frontier in _frontiers(row) for point in frontier]
    learned = max((corner[0] - new for new, _ in points), default=0.0)
    forgotten = max((original - corner[1] for _, original in points), default=0.0)
    return max(NARROW * nat, NARROW_SHARE * learned), max(NARROW * nat, NARROW_SHARE * forgotten)


def _beside_full(made: Sequence[Row], corner: Pair, limits: Pair) -> list[Row]:
    """Return the rows with their differences from full fine-tuning with the same remedy, and with their areas."""
    full = {row.remedy: row for row in made if row.kind == "full"}
    level = _level(made, corner)
    rows = []
    for row in made:
        found: dict[str, Any] = {}
        if row.points and (peer := full.get(row.remedy)) is not None and peer.method != row.method:
            found = {"against": between(row, peer, limits), "beaten": _beaten(row, peer)}
        frontiers = _frontiers(row)
        # Where one seed does not reach `level`, the row has no area: its mean would cover fewer losses.
        whole = level is not None and all(frontier[0][0] <= level for frontier in frontiers)
        areas = [area(frontier, corner, level) for frontier in frontiers] if whole and level is not None else []
        rows.append(replace(row, **found, area=interval(areas)))
    return rows


def _beaten(row: Row, other: Row) -> int:
    """Return how many runs of `row` lose on both axes to a run of `other` with the same seed."""
    return sum(
        any(
            peer.seed == point.seed and peer.new < point.new and peer.original < point.original for peer in other.points
        )
        for point in row.points
    )


def _level(rows: Sequence[Row], corner: Pair) -> float | None:
    """Return the lowest new loss that all rows reach, without the rows that hardly learn; areas begin there.

    Below it, areas of different rows would cover different losses. None where no row learned anything.
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
    """Return the row of a method with a remedy, and where there are blends a second row of its runs and blends."""
    of_row = sorted(
        (run for run in records if (run.method, run.remedy) == (method.called, remedy.name)),
        key=lambda run: (run.rate, run.seed),
    )
    several = len({each.name for _, each in study.entries}) > 1 or bool(study.blend)
    found = []
    for shares in ([1.0], *([[1.0, *study.blend]] if study.blend else ())):
        # A run that diverged has no blend.
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
            open_end="" if blended else rates_of(study, method, remedy, losses).open_end,
            blended=blended,
        )
        found.append(replace(row, best=min(row.means(), key=lambda each: (each.sum, each.rate), default=None)))
    return found


def _pairs(one: Row, other: Row) -> list[tuple[list[Pair], list[Pair]]]:
    """Return (frontier of `one`, frontier of `other`) for each seed that both rows have."""
    return [(one.frontier(seed), other.frontier(seed)) for seed in sorted({*one.seeds()} & {*other.seeds()})]


def between(one: Row, other: Row, limits: Pair, *, on: str = "forgets") -> Apart:
    """Return the difference of two rows' frontiers, computed for each seed that both rows have.

    With `on` "forgets" it is the difference in original loss at equal new loss; with "learns" it is the difference in
    new loss at equal original loss.
    """
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
    # Index 0: the least range of new loss; 1: of original loss.
    return Apart(interval(found), width, width >= limits[on != "forgets"])


def _claimed(claims: Sequence[Claim], rows: Sequence[Row], limits: Pair) -> list[tuple[Claim, str, Apart]]:
    """Return (claim, remedy in words, difference) for each pair of rows that a claim compares.

    A claim compares its two methods under each remedy that both have, or under the remedies that the claim names.
    """
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
    """Return comparisons of every method's remedies with its first remedy.

    A row of blends is also compared with the first remedy's blends and with its own unblended runs. `corner` contains
    the base's losses, `nat` is the value of one nat a token in their unit. Verdicts are corrected together.
    """
    found, limits = [], _limits(rows, corner, nat)
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method and row.best is not None]
        for row in own[1:]:
            peers = [own[0]]
            if row.blended:
                # Compare blends with blends: the effect of a remedy where both sides are blended.
                peers += [each for each in own[1:] if each.remedy == f"{own[0].remedy}{BLENDED}" and each is not row]
                peers += [each for each in own[1:] if row.remedy == f"{each.remedy}{BLENDED}"]
            found += [_beside_itself(row, other, corner, limits) for other in peers]
    said = verdicts([each.apart for each in found])
    return [replace(each, verdict=verdict) for each, verdict in zip(found, said, strict=True)]


def _beside_itself(row: Row, other: Row, corner: Pair, limits: Pair) -> Remedied:
    """Compare two rows of one method with different remedies, seed by seed; the verdict is filled in later."""
    forgets: list[tuple[float, float]] = []
    reach = []
    for mine, theirs in _pairs(row, other):
        reach.append(mine[0][0] - theirs[0][0])
        if (shared := common_range(mine, theirs)) is not None:
            forgets.append((mean_height(mine, shared) - corner[1], mean_height(theirs, shared) - corner[1]))
    # Where the other row forgets nothing, a share of its forgetting is not defined.
    shares = [ours / its for ours, its in forgets] if all(its > 0 for _, its in forgets) else []
    return Remedied(
        method=row.method,
        label=row.label.removesuffix(f", {row.remedy}"),
        with_=row.remedy,
        beside=other.remedy,
        forgets=(interval([ours for ours, _ in forgets]), interval([its for _, its in forgets])),
        share=interval(shares),
        apart=between(row, other, limits),
        reach=interval(reach),
        verdict="no common range",
    )


def _named(rows: Sequence[Row], name: str) -> list[Row]:
    """Return the rows that a claim's `METHOD` or `METHOD/REMEDY` names; a method alone names no blends."""
    return [row for row in rows if name == f"{row.method}/{row.remedy}" or (name == row.method and not row.blended)]


def _missing(study: Study, losses: Mapping[Run, Pair]) -> list[str]:
    """Return the runs that are left, a line per row and seed; for seeds whose rates are unknown, a line per row."""
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
