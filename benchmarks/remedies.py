"""What remedies against forgetting are worth beside `recalled`, on two small bases: the study of remedies.yaml.

    python -m benchmarks.remedies study CORPORA BASE RESULTS [--new KIND …] [--methods N] [--remedies N] [--minutes M]
                                                             [--take-over]
    python -m benchmarks.remedies page

CORPORA has KIND.train.jsonl and KIND.val.jsonl for what is learned, French where `--new` names nothing else
(benchmarks/texts.py makes some), and for `ORIGINAL`. Losses are measured on the beginnings of held-out
documents, `LONGEST` characters of each, which are written beside RESULTS. With `--methods N` the first N methods of the
study run, with `--remedies N` the first N remedies; the same command with more goes on, and with `--take-over` from
the committed runs. `page` writes benchmarks/results/remedies.md from those.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

import surgeon
from benchmarks.frontier import interval, table
from surgeon.lab.studies.records import RUNS_FILE, read_packed
from surgeon.lab.studies.schedule import Run

HERE = Path(__file__).resolve().parent
STUDY, RESULTS = HERE / "remedies.yaml", HERE / "results"
BASES = ("en-llama-8m", "en-qwen3-4m")
# The studies on the page, by what the folders of their results are called: a base, and what it learns but French.
STUDIES = (*BASES, "en-llama-8m_german", "en-llama-8m_code")
# What is learned, and what must not be forgotten.
NEW, ORIGINAL = ("fr_man", "fr_office"), "en_man"
# Characters of a held-out document.
LONGEST = 300
# What a base's rates are multiplied by.
FACTORS = {"en-qwen3-4m": 3.0}


def study_data(base: str, methods: int | None = None, remedies: int | None = None) -> dict[str, Any]:
    """The study without its texts, with the rates of a base; of its methods and remedies the first ones."""
    study: dict[str, Any] = yaml.safe_load(STUDY.read_text(encoding="utf-8"))
    study |= {"methods": study["methods"][:methods], "remedies": study["remedies"][:remedies]}
    for method in study["methods"]:
        method["rates"] = [float(f"{rate * FACTORS.get(base, 1.0):.3g}") for rate in method["rates"]]
    return study


def study_of(corpora: Path, work: Path, study: dict[str, Any], new: Sequence[str]) -> Path:
    """Write the study with its texts, `new` to be learned, to `work`; return its file."""
    work.mkdir(parents=True, exist_ok=True)
    for name in (*new, ORIGINAL):
        _cut(corpora / f"{name}.val.jsonl", work / f"{name}.jsonl")
    study["new"] = [
        {"name": name, "path": str((corpora / f"{name}.train.jsonl").absolute()), "validation": f"{name}.jsonl"}
        for name in new
    ]
    study["original"] = [{"name": ORIGINAL, "path": f"{ORIGINAL}.jsonl"}]
    path = work / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    return path


def _cut(source: Path, target: Path) -> None:
    """Write the beginning of every document, up to the last blank before `LONGEST` characters."""
    with source.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as out:
        for line in lines:
            text = json.loads(line)["text"]
            text = text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0] or text[:LONGEST]
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def found_in(base: str) -> dict[str, Any]:
    """What the study found on a base."""
    path = RESULTS / f"remedies_{base}" / "results.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


HEADER = (
    "method",
    "with",
    "beside",
    "beside: forgets",
    "forgets",
    "part",
    "difference",
    "over",
    "seeds",
    "so: forgets",
)
_SAYS = {
    "agrees": "less",
    "disagrees": "more",
    "points its way": "points to less",
    "points against it": "points to more",
}


def row_of(found: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    """A method with one remedy beside itself with another: what both forget, the part, range, seeds and verdict."""
    labels = {each["method"]: each["label"].removesuffix(f", {each['remedy']}") for each in found["rows"]}
    mine, theirs = (interval(each) for each in row["forgets"])
    figures = theirs, mine, interval(row["share"]), interval(row["apart"], signed=True)
    width = "" if row["width"] is None else f"{row['width']:.2f}"
    seeds = str(row["apart"]["seeds"]) if row["apart"] else ""
    names = labels[row["method"]], row["with"], row["beside"]
    return *names, *figures, width, seeds, _SAYS.get(row["verdict"], row["verdict"])


HEAD = """# Remedies against forgetting beside the default

What remedies are worth on two English bases of 4 and 8 million parameters that learn 25,600 tokens of French, one also
of German and of Python code; nothing of larger bases or longer training.
`python -m benchmarks.remedies`: [the study](../remedies.yaml).

- *recalled*, `compare`'s default: a tenth of the sequences is text that the base wrote, with KL(base ‖ model) on it.
- *more*: a quarter, weight 2.
- *fisher*: the weights are held by the Fisher information of such text (weight 100); none is replayed.
- *both*: *recalled* and *fisher*.
- *blended*: the run, and half and three quarters of it with the rest of the base, at no training cost.

Forgotten is original loss above the base's, in nats a token, at equal new loss, in the mean over the range that both
reach (`over`). Intervals are 95 %, over seeds, paired; verdicts by Holm's correction over a base's table, and none for
a range below 0.1 nats or 5 % of what full fine-tuning learns. Rates, and the runs of a frontier, are chosen on other
documents than those reported. Of a row with one rate the range is that of its blends, or a point, of which there is no
verdict. The baseline replays the base's own text already;
[text of another kind](frontier_en-llama-8m.md) protects less. One recalled file serves all seeds of a base."""


def page() -> str:
    """All that both studies say."""
    lines = [HEAD]
    for name in STUDIES:
        found = found_in(name)
        budget, start, folder = found["budget"], found["start"], f"remedies_{name}"
        runs = sum(len(row["points"]) for row in found["rows"] if not row["blended"])
        lines += [
            f"\n## {name}\n",
            f"{runs} runs of {budget['steps']} steps of {budget['batch']} × {budget['length']} tokens; the base: new"
            f" {start['new']:.3f}, original {start['original']:.3f}. Every point is in"
            f" [results.json]({folder}/results.json), drawn in [comparison.html]({folder}/comparison.html).\n",
            *table(HEADER, [row_of(found, row) for row in found["remedies"]], 3),
            f"\n{factor_line(found)}",
            f"\n{kl_line(name, found)}",
        ]
        if found["missing"]:
            lines.append(
                f"\n**Not complete**: {len(found['missing'])} rows or seeds miss runs, which the command makes."
            )
    return "\n".join([*lines, ""])


# What a pilot of one seed had found: *both* forgets so much of what *recalled* does.
PILOT = 0.5


def factor_line(found: dict[str, Any]) -> str:
    """Whether what a pilot found holds, method by method: by the part's interval, where the range is wide enough."""
    lines = []
    for with_, beside in (("both", "recalled"), ("both, blended", "recalled"), ("both, blended", "recalled, blended")):
        rows = [row for row in found["remedies"] if (row["with"], row["beside"]) == (with_, beside)]
        said = [f"{of} {', '.join(names)}" for of, names in _parted(found, rows).items() if names]
        lines += [f"- *{with_}* beside *{beside}*: it {'; '.join(said)}."] if said else []
    return "\n".join(["The pilot's factor of two (half is forgotten; one seed), by the part's interval:", "", *lines])


def _parted(found: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The methods of which it holds, does not, or cannot be told."""
    every = {key: list[str]() for key in ("holds for", "does not hold for", "is open for", "cannot be judged for")}
    labels = {each["method"]: each["label"].removesuffix(f", {each['remedy']}") for each in found["rows"]}
    for row in rows:
        part, said = row["share"], "is open for"
        if row["verdict"] in ("range too narrow", "no common range") or part is None or part["half"] is None:
            said = "cannot be judged for"
        elif part["mean"] + part["half"] <= PILOT:
            said = "holds for"
        elif part["mean"] - part["half"] > PILOT:
            said = "does not hold for"
        every[said].append(labels[row["method"]])
    return every


def kl_line(name: str, found: dict[str, Any]) -> str:
    """How KL(base ‖ run) on new text goes with what is forgotten, over single runs; the runs' records have it."""
    packed = read_packed(RESULTS / f"remedies_{name}" / RUNS_FILE)
    assert packed is not None
    pairs: dict[str, list[tuple[float, float]]] = {}
    for row in (row for row in found["rows"] if not row["blended"]):
        for point in row["points"]:
            key = Run(row["method"], row["remedy"], point["rate"], point["seed"]).key
            measured = packed.records[key]["record"]["measured"]
            if measured is not None:
                kl = fmean(measured[text]["kl"] for text in found["texts"]["new"])
                pairs.setdefault(row["remedy"], []).append((kl, point["original"]))
    every = [pair for of_remedy in pairs.values() for pair in of_remedy]
    said = f"over its {len(every)} runs {spearman(every):+.2f}"
    for remedy, some in pairs.items():
        said += f", with *{remedy}* {spearman(some):+.2f}" if len(some) > 3 else ""
    return f"Rank correlation of KL(base ‖ run) on new text with what is forgotten: {said}."


def spearman(pairs: list[tuple[float, float]]) -> float:
    """Spearman's rank correlation."""
    from scipy.stats import spearmanr

    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("study")
    runs.add_argument("corpora", type=Path)
    runs.add_argument("base", type=Path)
    runs.add_argument("results", type=Path)
    runs.add_argument("--new", nargs="+", default=NEW)
    runs.add_argument("--methods", type=int)
    runs.add_argument("--remedies", type=int)
    runs.add_argument("--minutes", type=float)
    runs.add_argument("--take-over", action="store_true")
    commands.add_parser("page")
    asked = parser.parse_args()
    if asked.command == "page":
        (RESULTS / "remedies.md").write_text(page(), encoding="utf-8")
        return
    work = asked.results.with_name(f"{asked.results.name}_texts")
    study = study_data(asked.base.resolve().name, asked.methods, asked.remedies)
    with surgeon.ProgressListener() as listener:
        surgeon.compare(
            study_of(asked.corpora, work, study, asked.new),
            asked.base,
            asked.results,
            minutes=asked.minutes,
            jobs=1,
            take_over=asked.take_over,
            device="cpu",
            listener=listener,
        )


if __name__ == "__main__":
    main()
