"""The committed studies as `surgeon compare` found them, read back from results.json, for pages and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surgeon.compare.config.schema import Claim
from surgeon.compare.findings import Findings, Judged, Point, Remedied, Row
from surgeon.compare.frontier import Interval

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
STUDIES = sorted(file.parent.name for file in RESULTS.glob("*/comparison.html"))


def findings_of(study: str) -> Findings:
    """Return what results.json of a study says."""
    found = json.loads((RESULTS / study / "results.json").read_text(encoding="utf-8"))
    rows = [_row_of(row) for row in found["rows"]]
    labels = {row.method: row.label.removesuffix(f", {row.remedy}") for row in rows}
    remedies = [
        Remedied(
            each["method"],
            labels[each["method"]],
            each["with"],
            each["beside"],
            (_interval_of(each["forgets"][0]), _interval_of(each["forgets"][1])),
            *(_interval_of(each[key]) for key in ("share", "apart", "reach")),
        )
        for each in found["remedies"]
    ]
    claims = [
        Judged(
            Claim(**{key: each[key] for key in Claim.model_fields}),
            each["remedy"],
            _interval_of(each["difference"]),
            each["verdict"],
        )
        for each in found["claims"]
    ]
    plain = {key: found[key] for key in ("base", "budget", "unit", "texts", "first", "advice")}
    return Findings(
        **plain,
        start=(found["start"]["new"], found["start"]["original"]),
        rows=tuple(rows),
        remedies=tuple(remedies),
        claims=tuple(claims),
        missing=tuple(found["missing"]),
        notes=tuple(found["notes"]),
    )


def _row_of(row: dict[str, Any]) -> Row:
    points = tuple(
        Point(**point | {axis: float(point[axis]) for axis in ("new", "original")}) for point in row["points"]
    )
    plain = {key: row[key] for key in ("method", "remedy", "label", "kind", "trained", "steps", "open_end")}
    best = row["best"] and Point(row["best"]["rate"], -1, row["best"]["new"], row["best"]["original"])
    shared = row["shared"] and (row["shared"][0], row["shared"][1])
    against, area = _interval_of(row["against_full"]), _interval_of(row["area"])
    return Row(**plain, points=points, best=best, against=against, shared=shared, area=area)


def _interval_of(found: dict[str, Any] | None) -> Interval | None:
    return None if found is None else Interval(**found)
