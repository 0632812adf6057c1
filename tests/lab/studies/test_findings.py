"""What records come to: rows, differences to full fine-tuning, claims, advice, what is missing; from losses made up."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from surgeon.lab.studies.analysis import find, remedied
from surgeon.lab.studies.findings import Findings
from surgeon.lab.studies.page import render
from surgeon.lab.studies.records import Record, SourceLoss
from surgeon.lab.studies.schedule import Run
from tests.lab.studies.test_config import SMALLEST, written

STUDY = (
    SMALLEST.replace("[neutral-residues]", "[full, {name: kept, plan: llama-pro}, {name: lost, plan: pmoe}]")
    + """\
peers: false
most_rates: 4
seeds: 3
claims:
  - {says: kept forgets less, better: kept, worse: full}
  - {says: lost forgets less, better: lost, worse: full}
  - {says: kept learns more, better: kept, worse: full, on: learns}
"""
)
RATES = (1e-4, 3e-4, 1e-3, 3e-3)
# Original loss above the base's for each nat learned; what seeds differ by.
FORGETS = {"full": 0.5, "kept": 0.25, "lost": 0.75}


def record(new: float, original: float, *, tokens: int = 100) -> Record:
    losses = {"new": new, "known": original}
    return Record({name: SourceLoss(2, tokens, 300, loss, loss / 2) for name, loss in losses.items()}, trained=7)


def records_of(seeds: int, noise: float = 0.01) -> dict[Run, Record]:
    """Each rate learns half a nat more; the third seed is unlucky, the second lucky, by the same for all methods."""
    found = {}
    for number, (method, slope) in enumerate(FORGETS.items()):
        for seed in range(seeds):
            for step, rate in enumerate(RATES):
                shift = noise * (0, -1, 1)[seed] * (1 + number / 10)
                learned = 0.5 * (step + 1)
                found[Run(method, "recalled", rate, seed)] = record(5 - learned, 2 + slope * learned + shift)
    return found


def found_in(folder: Path, records: dict[Run, Record]) -> Findings:
    return find(written(folder, STUDY), "base", record(5.0, 2.0), records, (["new"], ["known"]))


def test_rows_are_compared_with_full_fine_tuning_seed_by_seed(tmp_path: Path) -> None:
    found = found_in(tmp_path, records_of(3))
    full, kept, lost = found.rows
    # From 3 to 4.5 both learn 0.5 to 2 nats, 1.25 in the mean, and forget a quarter of that less or more.
    assert full.against is None
    assert kept.against is not None and kept.against.difference is not None
    assert lost.against is not None and lost.against.difference is not None
    apart = kept.against.difference
    assert apart.mean == pytest.approx(-0.25 * 1.25) and kept.against.width == pytest.approx(1.5)
    assert lost.against.difference.mean == pytest.approx(0.25 * 1.25)
    assert apart.half is not None and apart.half < 0.01 and apart.seeds == 3
    assert (kept.verdict, lost.verdict, full.verdict) == ("agrees", "disagrees", None)
    # At its highest rate full fine-tuning learns more than `lost` at the third and forgets less; the second rate's
    # 2.75 it only beats where the seed shifts what is lost by more.
    assert (kept.beaten, lost.beaten) == (0, 4)
    # Up to the base's corner: a triangle.
    assert kept.area is not None and kept.area.mean == pytest.approx(0.25 * 2 * 2 / 2, abs=0.02)
    assert [judged.verdict for judged in found.claims] == ["agrees", "disagrees", "agrees"]
    # Turned: at original 2.25 to 2.5 full has learned 0.5 to 1 nats, kept twice that.
    assert found.claims[2].apart.difference is not None
    assert found.claims[2].apart.difference.mean == pytest.approx(-0.75, abs=0.03)
    assert found.first == (
        "Full fine-tuning with the same remedy beats 4 of 24 runs of other methods on both losses. It forgets less at"
        " equal new loss than 1 of 2: lost."
    )
    assert found.advice == (
        "For this data at this budget (20,480 tokens a run): kept, rate 0.003: new loss 5.000 → 3.000, original 2.000 →"
        " 2.500; full fine-tuning reaches original 3.000 at that new loss (forgets less than full fine-tuning: -0.312 ±"
        f" {apart.half:.3f}, 3 seeds)."
    )
    assert not found.missing and found.unit == "nats a token"
    # Every rate learned more than the one below.
    assert all("beyond its highest rate, 0.003" in note for note in found.notes) and len(found.notes) == 3
    assert found.first in render(found) and found.to_json()["rows"][1]["against_full"]["seeds"] == 3


def test_of_many_that_are_beaten_the_others_are_named(tmp_path: Path) -> None:
    text = STUDY.replace("{name: lost, plan: pmoe}", "{name: lost, plan: pmoe}, {name: worse, plan: pmoe}")
    records = records_of(3)
    records |= {replace(run, method="worse"): found for run, found in records.items() if run.method == "lost"}
    found = find(written(tmp_path, text), "base", record(5.0, 2.0), records, (["new"], ["known"]))
    assert "than 2 of 3: all but kept." in found.first


def test_noise_tells_nothing_apart_and_few_seeds_only_point(tmp_path: Path) -> None:
    found = found_in(tmp_path, records_of(3, noise=20.0))
    assert [judged.verdict for judged in found.claims[:2]] == ["not told apart"] * 2
    found = found_in(tmp_path, records_of(2))
    assert [judged.verdict for judged in found.claims] == ["points its way", "points against it", "points its way"]
    assert "2 seeds: three are needed" in found.advice
    assert found.missing[0] == "full, recalled, seed 2: rates 0.0001, 0.0003, 0.001, 0.003" and len(found.missing) == 3


def test_a_method_that_hardly_learns_has_no_area_and_leaves_the_others_theirs(tmp_path: Path) -> None:
    records = records_of(3)
    areas = [row.area for row in found_in(tmp_path, records).rows]
    for run in records:
        if run.method == "lost":
            records[run] = record(4.9, 2.0)
    full, kept, lost = found_in(tmp_path, records).rows
    assert lost.area is None
    assert [full.area, kept.area] == areas[:2]
    # Nothing learned at all is no end of an area either.
    untouched = {run: record(5.0, 2.0) for run in records}
    assert [row.area for row in found_in(tmp_path, untouched).rows] == [None, None, None]


def test_what_diverged_is_no_point_and_what_is_not_made_is_listed(tmp_path: Path) -> None:
    records = {run: held for run, held in records_of(1).items() if run.method != "lost"}
    records[Run("full", "recalled", 3e-3, 0)] = Record(None, diverged="step 3: the loss is nan")
    found = found_in(tmp_path, records)
    full, _, lost = found.rows
    assert math.isinf(full.points[-1].new) and full.best is not None and full.best.rate == 1e-3
    assert found.advice == "No advice before each of the 3 rows has a finished run: 1 have none."
    assert lost.best is None and lost.against is None and "no run yet" in render(found)
    assert any(line.startswith("lost, recalled, seed 0: rates") for line in found.missing)
    assert "nan" not in str(found.to_json()["rows"][0]["frontiers"])


def test_other_tokens_are_compared_by_bytes(tmp_path: Path) -> None:
    records = records_of(1)
    records[Run("kept", "recalled", 1e-4, 0)] = record(4.5, 2.0, tokens=90)
    found = found_in(tmp_path, records)
    assert found.unit == "bits a byte" and found.start == (2.5, 1.0)


def test_where_nothing_is_worth_it_the_advice_says_so(tmp_path: Path) -> None:
    worse = {run: record(4.9, 2.5) for run in records_of(1)}
    assert "every run forgets more than it learns" in found_in(tmp_path, worse).advice
    assert found_in(tmp_path, {}).advice == "No advice before each of the 3 rows has a finished run: 3 have none."


def test_a_method_with_one_remedy_stands_beside_itself_with_another(tmp_path: Path) -> None:
    study = STUDY.replace(
        "peers: false", "remedies: [{name: replayed, replay: {source: text}}, {name: recalled}]\npeers: false"
    )
    records = records_of(3)
    # Replayed, the same rates forget twice as much, and learn an eighth less: 2.625 to 4.5 is reached by both.
    records |= {
        Run(run.method, "replayed", run.rate, run.seed): record(
            5 - (5 - held.measured["new"].loss) * 0.875, 2 + 2 * (held.measured["known"].loss - 2)
        )
        for run, held in records.items()
        if run.method == "full" and held.measured is not None
    }
    found = find(written(tmp_path, study), "base", record(5.0, 2.0), records, (["new"], ["known"]))
    (each,) = found.remedies
    assert (each.method, each.with_, each.beside) == ("full", "recalled", "replayed")
    # From 3.25 to 4.5, where 0.5 to 1.75 nats are learned: half of them forgotten, or half of them · 2 / 0.875.
    assert each.forgets[0] is not None and each.forgets[0].mean == pytest.approx(0.5 * 1.125)
    assert each.forgets[1] is not None and each.forgets[1].mean == pytest.approx(0.5 * 1.125 * 2 / 0.875, abs=1e-3)
    assert each.share is not None and each.share.mean == pytest.approx(0.875 / 2, abs=1e-3) and each.share.seeds == 3
    assert each.reach is not None and each.reach.mean == pytest.approx(-0.25) and each.reach.half == pytest.approx(0)
    assert each.apart.difference is not None and each.apart.difference.half is not None
    assert each.apart.difference.mean < -each.apart.difference.half
    assert found.to_json()["remedies"][0]["beside"] == "replayed" and "beside itself with another" in render(found)


def test_blends_have_a_frontier_of_their_own_and_other_documents_choose(tmp_path: Path) -> None:
    """Half-way a run has learned four fifths and forgotten a quarter; the documents that choose mislead."""
    found, study = {}, STUDY.replace("peers: false", "peers: false\nblend: [0.5]\nchoosing: 1\ndocuments: 2")
    corner = parted_record(5.0, 2.0)
    for run in records_of(3):
        learned = 0.5 * (RATES.index(run.rate) + 1) + 0.01 * run.seed
        forgot = FORGETS[run.method] * learned
        # On the first document the third rate forgets a fifth of that, and the fourth three times as much.
        luck = {1e-3: 0.2, 3e-3: 3.0}.get(run.rate, 1.0)
        half = parted_record(5 - 0.8 * learned, 2 + 0.25 * forgot)
        made = parted_record(5 - learned, 2 + forgot, chosen=2 + luck * forgot, spread=0.1)
        found[run] = replace(made, blended={0.5: half.measured or {}})
    told = find(written(tmp_path, study), "base", corner, found, (["new"], ["known"]))
    rows = {(row.method, row.remedy): row for row in told.rows}
    assert len(rows) == 6 and told.start == (5.0, 2.0)
    plain, blended = rows["kept", "recalled"], rows["kept", "recalled, blended"]
    assert (plain.runs, blended.runs, len(blended.points)) == (12, 0, 24) and plain.label == "kept, recalled"
    # Chosen by the first document, reported by the others.
    assert plain.frontier(0) == [pytest.approx(pair) for pair in ((3.0, 2.5), (3.5, 2.375))]
    assert plain.best is not None and (plain.best.rate, plain.best.original) == (1e-3, pytest.approx(2.3775))
    lines = [(3.0, 2.5), (3.4, 2.125), (3.5, 2.375), (4.2, 2.0625), (4.6, 2.03125)]
    assert blended.frontier(0) == [pytest.approx(pair) for pair in lines]
    # Blends stand beside the runs, and beside full fine-tuning's blends.
    (own,) = (each for each in told.remedies if each.method == "kept")
    assert (own.with_, own.beside) == ("recalled, blended", "recalled")
    assert own.apart.difference is not None and own.apart.difference.mean < 0
    assert own.apart.width == pytest.approx(0.5)
    more = [replace(row, remedy=row.remedy.replace("recalled", "more")) for row in told.rows if row.method == "kept"]
    pairs = [(each.with_, each.beside) for each in remedied([*told.rows, *more], told.start) if each.method == "kept"]
    assert pairs[:2] == [("recalled, blended", "recalled"), ("more", "recalled")]
    assert pairs[2:] == [("more, blended", other) for other in ("recalled", "recalled, blended", "more")]
    assert blended.against is not None and blended.verdict == "agrees"
    assert "All 36 runs" in render(told) and "0.001, α 0.5" in render(told)
    point = told.to_json()["rows"][1]["points"][-1]
    assert (
        point["share"] == 0.5 and len(point["chosen"]) == 2 and told.first.startswith("Full fine-tuning with the same")
    )


def parted_record(new: float, original: float, *, chosen: float | None = None, spread: float = 0.0) -> Record:
    """Three documents of a hundred tokens a text: the first chooses, the others are reported."""
    first = {"new": new, "known": original if chosen is None else chosen}
    losses = {
        name: tuple((100 * each, 100, 300) for each in (first[name], loss - apart, loss + apart))
        for name, loss, apart in (("new", new, 0.0), ("known", original, spread))
    }
    return Record({name: SourceLoss(3, 300, 900, 9.0, 9.0, each) for name, each in losses.items()}, trained=7)


def test_frontiers_that_hardly_meet_are_not_judged(tmp_path: Path) -> None:
    """What they have in common must be a tenth of a nat, and a twentieth of what full fine-tuning learns."""
    for ends_at, verdict in ((4.45, "range too narrow"), (4.35, "agrees")):
        records = records_of(3)
        for run, each in records.items():
            # From its gentlest rate's 4.5 on it learns hardly more.
            if run.method == "kept" and run.rate > 1e-4 and each.measured is not None:
                records[run] = record(ends_at, each.measured["known"].loss)
        _, kept, lost = found_in(tmp_path, records).rows
        assert (kept.verdict, lost.verdict) == (verdict, "disagrees"), kept.against
        # In bits a byte, of which a nat is half a one here, it is the same.
        records[Run("kept", "recalled", 1e-4, 0)] = record(4.5, 2.125, tokens=90)
        found = found_in(tmp_path, records)
        assert found.unit == "bits a byte" and found.rows[1].verdict == verdict
