"""The committed studies, worked out from their runs: `python -m tests.studies` writes results.json and the page anew.

Every figure and verdict of a study follows from runs.jsonl.gz beside it; a test compares the two.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks import remedies
from surgeon.lab.studies.analysis import find, judge, remedied
from surgeon.lab.studies.compare import write_study
from surgeon.lab.studies.config.entries import Claim
from surgeon.lab.studies.config.loading import load_study
from surgeon.lab.studies.findings import Findings, Point, Row, first_sentence
from surgeon.lab.studies.records import BASE, RUNS_FILE, Packed, Record, read_packed
from surgeon.lab.studies.schedule import Run

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
STUDIES = sorted(file.parent.name for file in RESULTS.glob("*/comparison.html"))


@cache
def findings_of(study: str) -> Findings:
    """What a committed study found, worked out anew."""
    found = json.loads((RESULTS / study / "results.json").read_text(encoding="utf-8"))
    packed = read_packed(RESULTS / study / RUNS_FILE)
    return _of_points(found) if packed is None else _of_runs(study, found, packed)


def _of_runs(study: str, found: dict[str, Any], packed: Packed) -> Findings:
    """From the losses of every run by text; results.json says which texts they are."""
    every = {name: Record.parse(entry["record"]) for name, entry in packed.records.items()}
    start = every.pop(BASE)
    runs = {Run(*_run_of(name)): record for name, record in every.items()}
    # Which texts they were has no part in what is worked out of losses.
    given = {group: [f"{name}=dataset:not/here" for name in names] for group, names in found["texts"].items()}
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_study(_file_of(study, Path(folder)), **given)
    return find(loaded, found["base"], start, runs, (found["texts"]["new"], found["texts"]["original"]))


def _file_of(study: str, folder: Path) -> str | Path:
    """The study's file; that of remedies is written for its base."""
    kind, _, base = study.partition("_")
    if kind != "remedies":
        return kind
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(remedies.study_data(base)), encoding="utf-8")
    return path


def _run_of(name: str) -> tuple[str, str, float, int]:
    method, remedy, rate, seed = name.split("+")
    return method, remedy, float(rate), int(seed)


def _of_points(found: dict[str, Any]) -> Findings:
    """From the points in results.json, of a study of which git keeps no more."""
    corner = found["start"]["new"], found["start"]["original"]
    claims = list(dict.fromkeys(Claim(**{key: each[key] for key in Claim.model_fields}) for each in found["claims"]))
    rows, judged = judge([_row_of(row) for row in found["rows"]], claims, corner)
    plain = {key: found[key] for key in ("base", "budget", "unit", "texts", "advice")}
    return Findings(
        **plain,
        start=corner,
        rows=tuple(rows),
        remedies=tuple(remedied(rows, corner)),
        claims=tuple(judged),
        first=first_sentence(rows),
        missing=tuple(found["missing"]),
        notes=tuple(found["notes"]),
    )


def _row_of(row: dict[str, Any]) -> Row:
    """A row as its points say, not yet beside another."""
    points = tuple(
        Point(**point | {axis: float(point[axis]) for axis in ("new", "original")}) for point in row["points"]
    )
    plain = {key: row[key] for key in ("method", "remedy", "label", "kind", "trained", "steps", "open_end")}
    best = row["best"] and Point(row["best"]["rate"], -1, row["best"]["new"], row["best"]["original"])
    return Row(**plain, points=points, best=best)


if __name__ == "__main__":
    for name in STUDIES:
        write_study(RESULTS / name, findings_of(name))
