"""What remedies against forgetting are worth beside `recalled`, on two small bases: the study of remedies.yaml.

    python -m benchmarks.remedies study CORPORA BASE RESULTS [--methods N] [--remedies N] [--minutes M]
    python -m benchmarks.remedies page

CORPORA has KIND.train.jsonl and KIND.val.jsonl for each of TEXTS. Losses are measured on the beginnings of held-out
documents, `LONGEST` characters of each, which are written beside RESULTS. With `--methods N` the first N methods of the
study run, with `--remedies N` the first N remedies; the same command with more goes on. `page` writes
benchmarks/results/remedies.md from the committed runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

import surgeon

HERE = Path(__file__).resolve().parent
STUDY = HERE / "remedies.yaml"
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


def study_of(corpora: Path, work: Path, study: dict[str, Any]) -> Path:
    """Write the study with its texts to `work`; return its file."""
    work.mkdir(parents=True, exist_ok=True)
    for name in (*NEW, ORIGINAL):
        _cut(corpora / f"{name}.val.jsonl", work / f"{name}.jsonl")
    study["new"] = [
        {"name": name, "path": str((corpora / f"{name}.train.jsonl").absolute()), "validation": f"{name}.jsonl"}
        for name in NEW
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("study")
    runs.add_argument("corpora", type=Path)
    runs.add_argument("base", type=Path)
    runs.add_argument("results", type=Path)
    runs.add_argument("--methods", type=int)
    runs.add_argument("--remedies", type=int)
    runs.add_argument("--minutes", type=float)
    asked = parser.parse_args()
    work = asked.results.with_name(f"{asked.results.name}_texts")
    with surgeon.ProgressListener() as listener:
        surgeon.compare(
            study_of(asked.corpora, work, study_data(asked.base.resolve().name, asked.methods, asked.remedies)),
            asked.base,
            asked.results,
            minutes=asked.minutes,
            jobs=1,
            device="cpu",
            listener=listener,
        )


if __name__ == "__main__":
    main()
