"""The evidence study's page in Markdown, from the folder that `surgeon compare frontier` goes on in.

    surgeon compare frontier BASE RESULTS --new FILE … --original FILE --replayed FILE
    python -m benchmarks.frontier RESULTS

RESULTS is `benchmarks/results/frontier_<base>`, of which git keeps results.json, comparison.html and runs.jsonl.gz.
From the last the same command goes on (with `--take-over`; the base writes its recalled text again). The page is
RESULTS.md beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What is asked for: with recalled text and the base as teacher at most this share of what text replay forgets, and no
# new loss given away beyond this.
SHARE, GIVEN_AWAY = 0.5, 0.02


def interval(found: dict[str, Any] | None, *, signed: bool = False) -> str:
    """`0.31 ± 0.02`; without the interval where there are too few seeds."""
    if found is None:
        return ""
    told = f"{found['mean']:{'+' if signed else ''}.3f}"
    return told if found["half"] is None else f"{told} ± {found['half']:.3f}"


def verdict(row: dict[str, Any]) -> str:
    """Whether a method with the second remedy forgets at most half of what it does with the first."""
    share, reach = row["share"], row["reach"]
    if share is None:
        return ""
    if share["half"] is None:
        return f"{share['seeds']} seed{'s' * (share['seeds'] > 1)}: not judged"
    mine, theirs = row["forgets"]
    overlap = mine["mean"] + mine["half"] >= theirs["mean"] - theirs["half"]
    # What each forgets differs from seed to seed with the text that is drawn; the difference does less.
    apart = row["apart"]["mean"] + row["apart"]["half"] < 0.0
    wrong = [
        *([f"{share['mean']:.2f} of it"] if share["mean"] > SHARE else []),
        *(["intervals overlap" + (", though the difference seed by seed is clear of 0" if apart else "")] * overlap),
        *([f"new loss {reach['mean']:+.3f}"] if reach["mean"] > GIVEN_AWAY else []),
    ]
    return f"no: {', '.join(wrong)}" if wrong else "yes"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of a table whose first `left` columns are words."""
    marks = ["---"] * left + ["---:"] * (len(header) - left)
    return [f"| {' | '.join(cells)} |" for cells in (header, marks, *rows)]


def page(found: dict[str, Any], name: str) -> str:
    """All that the study found so far."""
    labels = {row["method"]: row["label"].removesuffix(f", {row['remedy']}") for row in found["rows"]}
    sections = (head(found, name), methods(found, labels), remedies(found, labels), claims(found))
    return "\n".join(line for section in sections if section for line in (*section, ""))


def head(found: dict[str, Any], name: str) -> list[str]:
    """What was measured, and what it says in a sentence."""
    budget, start = found["budget"], found["start"]
    runs = sum(len(row["points"]) for row in found["rows"])
    command = "surgeon compare frontier" if name.startswith("frontier_") else "surgeon compare"
    lines = [
        f"# Learning without forgetting on {found['base']}",
        "",
        f"`{command}`, {runs} finished runs of {length(found)} of {budget['batch']} ×"
        f" {budget['length']} tokens; [how it is compared](../../docs/how-to/comparing.md#what-is-compared). New text:"
        f" {', '.join(found['texts']['new'])}; original text: {', '.join(found['texts']['original'])}. Losses in"
        f" {found['unit']}; the base: new {start['new']:.3f}, original {start['original']:.3f}. Every point is in"
        f" [results.json]({name}/results.json), drawn in [comparison.html]({name}/comparison.html).",
        "",
        *([found["first"], ""] if found["first"] else []),
        found["advice"],
    ]
    if found["missing"]:
        missing = len(found["missing"])
        lines += ["", f"**Not complete**: {missing} rows or seeds miss runs, which the command makes."]
    return lines


def length(found: dict[str, Any]) -> str:
    """How long a run is; where runs have equal bytes, each row's steps."""
    budget = found["budget"]
    if "bytes" not in budget:
        return f"{budget['steps']} steps"
    made = ", ".join(f"{row['label']} {row['steps']}" for row in found["rows"] if row["steps"])
    return f"{budget['bytes']:,} bytes of new text (steps: {made})"


def methods(found: dict[str, Any], labels: dict[str, str]) -> list[str]:
    """Each row's best run, and how its frontier lies beside full fine-tuning's."""
    rows = [row for row in found["rows"] if row["best"] is not None]
    untried = [labels[method] for method in labels if method not in {row["method"] for row in rows}]
    lines = [
        "## Methods",
        "",
        "Each method's run with the smallest sum of both losses; what it forgets beside full fine-tuning with the same"
        " remedy at equal new loss (negative: less), over how much new loss that both reach; how many of its runs full"
        " fine-tuning beats on both losses.",
        "",
        *table(
            (
                "method, remedy",
                "trained",
                "rate",
                "new",
                "original",
                "forgets beside full",
                "over",
                "beaten",
                "area",
                "seeds",
            ),
            [
                (
                    row["label"],
                    f"{row['trained']:,}",
                    f"{row['best']['rate']:g}",
                    f"{row['best']['new']:.3f}",
                    f"{row['best']['original']:.3f}",
                    interval(row["against_full"], signed=True),
                    "" if row["width"] is None else f"{row['width']:.3f}",
                    "" if row["kind"] == "full" else f"{row['beaten']} of {len(row['points'])}",
                    interval(row["area"]),
                    str(len(row["frontiers"])),
                )
                for row in rows
            ],
            1,
        ),
    ]
    return [*lines, "", f"No run yet: {'; '.join(untried)}."] if untried else lines


def remedies(found: dict[str, Any], labels: dict[str, str]) -> list[str]:
    """Each method with one remedy beside itself with the other; nothing where there is one alone."""
    if not found["remedies"]:
        return []
    return [
        "## Remedies",
        "",
        "The same method with recalled text and the base as teacher beside itself with original text of another kind"
        " replayed: what each forgets (original loss above the base's) at equal new loss, the first's part of the"
        f" second's, the difference of their lowest new losses. Asked for: a part of at most {SHARE:g}, intervals clear"
        f" of each other over three seeds, no new loss given away beyond {GIVEN_AWAY:g}.",
        "",
        *table(
            ("method", "recalled", "replayed", "part", "difference", "lowest new loss", "seeds", "as asked"),
            [
                (
                    labels[row["method"]],
                    *(interval(each) for each in row["forgets"]),
                    interval(row["share"]),
                    interval(row["apart"], signed=True),
                    interval(row["reach"], signed=True),
                    "" if row["reach"] is None else str(row["reach"]["seeds"]),
                    verdict(row),
                )
                for row in found["remedies"]
            ],
            1,
        ),
    ]


def claims(found: dict[str, Any]) -> list[str]:
    """What papers say, and what the frontiers do."""
    return [
        "## What papers say" if any(row["paper"] for row in found["claims"]) else "## What was asked",
        "",
        "[What verdicts mean](../../docs/how-to/comparing.md#what-is-compared); `over` is the range of the other loss"
        " that both reach.",
        "",
        *table(
            ("paper", "claim", "remedy", "here", "difference", "over"),
            [
                (
                    row["paper"],
                    row["says"],
                    row["remedy"],
                    row["verdict"],
                    interval(row["difference"], signed=True),
                    "" if row["width"] is None else f"{row['width']:.3f}",
                )
                for row in found["claims"]
            ],
            4,
        ),
    ]


def main() -> None:
    (folder,) = (Path(given).resolve() for given in sys.argv[1:])
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    folder.with_name(f"{folder.name}.md").write_text(page(found, folder.name), encoding="utf-8")


if __name__ == "__main__":
    main()
