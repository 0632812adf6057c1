"""Figures that pages of docs/ quote from benchmarks/results, written there by `python -m tests.quoted`.

A page marks the place with `<!-- figures: NAME -->` and `<!-- end of figures -->`; everything between is the table of
that name below.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import remedies as stronger_remedies
from benchmarks.frontier import interval, table

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.S)
BASES = ("en-llama-8m", "en-qwen3-4m")


def filled(page: str) -> str:
    """Return a page with every marked section as the results have it."""
    return MARKED.sub(lambda found: f"{found[1]}\n{FIGURES[found[2]]()}\n\n{found[3]}", page)


def _study(base: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / f"frontier_{base}" / "results.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    return "\n".join(table(header, rows, left))


def runs() -> str:
    """What the two studies ran, a column each."""
    studies = [_study(base) for base in BASES]
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("finished runs", lambda of: str(sum(len(row["points"]) for row in of["rows"]))),
        ("rows or seeds that miss runs", lambda of: str(len(of["missing"]))),
        ("tokens a run", lambda of: f"{of['budget']['tokens']:,}"),
        ("methods tried with text replayed; with three seeds", lambda of: _tried(of, "replayed")),
        ("methods tried with recalled text; with three seeds", lambda of: _tried(of, "recalled")),
        ("the base: loss on new text, on original text", lambda of: "{new:.2f}, {original:.2f}".format(**of["start"])),
        ("lowest new loss of full fine-tuning", lambda of: f"{_lowest(of, full=True):.2f}"),
        ("lowest new loss of any other method", lambda of: f"{_lowest(of, full=False):.2f}"),
    ]
    columns = [f"[{base}](../../benchmarks/results/frontier_{base}.md)" for base in BASES]
    return _lines(("", *columns), [(name, *map(of, studies)) for name, of in rows], 1)


def _tried(of: dict[str, Any], remedy: str) -> str:
    seeds = [len(row["frontiers"]) for row in of["rows"] if row["remedy"] == remedy and row["best"]]
    return f"{len(seeds)}; {sum(each >= 3 for each in seeds)}"


def _lowest(of: dict[str, Any], *, full: bool) -> float:
    rows = [row for row in of["rows"] if (row["kind"] == "full") == full]
    return min(float(point["new"]) for row in rows for point in row["points"])


def beside_full() -> str:
    """Every other method beside full fine-tuning with the same remedy, counted."""
    rows = [_beside_full(_study(base), base, remedy) for base in BASES for remedy in ("replayed", "recalled")]
    header = (
        "base, remedy",
        "forget more",
        "forget less",
        "not told apart",
        "too few seeds",
        "range too narrow",
        "no common range",
        "width in common",
        "beaten on both axes",
    )
    return _lines(header, [row for row in rows if row], 1)


def _beside_full(of: dict[str, Any], base: str, remedy: str) -> tuple[str, ...]:
    rows = [row for row in of["rows"] if row["remedy"] == remedy and row["best"]]
    full = [point for row in rows if row["kind"] == "full" for point in row["points"]]
    others = [row for row in rows if row["kind"] != "full"]
    if not others:
        return ()
    said = Counter(row["verdict"] for row in others)
    learned = of["start"]["new"] - min(float(point["new"]) for point in full)
    runs, beaten = sum(len(row["points"]) for row in others), sum(row["beaten"] for row in others)
    width = statistics.median(row["width"] for row in others if row["width"] is not None)
    return (
        f"{base}, {remedy}",
        *(str(said[each]) for each in ("disagrees", "agrees", "not told apart")),
        str(said["points its way"] + said["points against it"]),
        str(said["range too narrow"]),
        str(said["no common range"]),
        f"{width:.2f} nats ({100 * width / learned:.0f} %)",
        f"{beaten} of {runs} runs",
    )


def remedies() -> str:
    """What each method forgets with the base's own text and the base as teacher, beside itself with text replayed."""
    rows = []
    for base in BASES:
        of = _study(base)
        labels = {row["method"]: row["label"].removesuffix(f", {row['remedy']}") for row in of["rows"]}
        for row in of["remedies"]:
            assert (row["with"], row["beside"]) == ("recalled", "replayed")
            figures = [interval(each) for each in (*row["forgets"][::-1], row["share"])]
            seeds = str(row["share"]["seeds"])
            method = f"{labels[row['method']]} ({base})"
            rows.append((method, *figures, interval(row["reach"], signed=True), seeds))
    header = ("method (base)", "replayed", "recalled", "recalled / replayed", "lowest new loss, change", "seeds")
    return _lines(header, rows, 1)


def stronger() -> str:
    """What other remedies forget beside recalled text as `compare` has it by default, over ranges that are judged."""
    rows = []
    for base in stronger_remedies.BASES:
        found = stronger_remedies.found_in(base)
        for row in found["remedies"]:
            method, with_, beside, theirs, *figures = stronger_remedies.row_of(found, row)
            if beside == "recalled" and row["verdict"] not in ("range too narrow", "no common range"):
                rows.append((f"{method} ({base})", with_, theirs, *figures))
    header = (
        "method (base)",
        "remedy",
        "recalled forgets",
        "remedy forgets",
        "part",
        "difference",
        "over",
        "seeds",
        "so: forgets",
    )
    return _lines(header, rows, 2)


def claims() -> str:
    """Papers' claims, and what each base says."""
    rows = [
        (*claim, *(_said(found[base]) if base in found else "" for base in BASES)) for claim, found in _claims().items()
    ]
    return _lines(("paper", "claim", "remedy", *BASES), rows, len(BASES) + 3)


def _claims() -> dict[tuple[str, str, str], dict[str, dict[str, Any]]]:
    """Every claim with every remedy, by base."""
    found: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for base in BASES:
        for row in _study(base)["claims"]:
            found.setdefault((row["paper"], row["says"], row["remedy"]), {})[base] = row
    return found


def _said(row: dict[str, Any]) -> str:
    if row["difference"] is None:
        return str(row["verdict"])
    return f"{row['verdict']}, {interval(row['difference'], signed=True)} over {row['width']:.2f}"


def both_bases() -> str:
    """How many claims both bases judge, and which of them have the same verdict, or opposite ones."""
    judged: dict[tuple[str, ...], list[str]] = {}
    for (paper, says, _), found in _claims().items():
        verdicts = tuple(found[base]["verdict"] for base in BASES if base in found)
        if len(verdicts) == len(BASES) and set(verdicts) <= {"agrees", "disagrees", "not told apart"}:
            judged.setdefault(verdicts, []).append(f"{paper}: {says}")
    agree, disagree = (judged.pop((each, each), []) for each in ("agrees", "disagrees"))
    opposite = [claim for each in (("agrees", "disagrees"), ("disagrees", "agrees")) for claim in judged.pop(each, [])]
    rest = sum(map(len, judged.values()))
    return "\n".join(
        (
            f"Three seeds on both bases judge {len(agree) + len(disagree) + len(opposite) + rest} claims:",
            "",
            *(f"- agrees on both: {claim}" for claim in agree),
            *(f"- disagrees on both: {claim}" for claim in disagree),
            *(f"- agrees on one and disagrees on the other: {claim}" for claim in opposite),
            f"- not told apart on at least one base: {rest} claims",
        )
    )


FIGURES: dict[str, Callable[[], str]] = {
    each.__name__: each for each in (runs, beside_full, remedies, stronger, claims, both_bases)
}


if __name__ == "__main__":
    for path in (ROOT / "docs").rglob("*.md"):
        before = path.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            path.write_text(after, encoding="utf-8")
