"""Every shipped experiment of a paper, row by row, on a tiny base with two steps a stage: does one command run it?

`python -m benchmarks.papers`; the losses say nothing. Rates, stages, methods and what trains are the files' own.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import surgeon  # noqa: E402
from tests.lab.courses.paper_texts import base, tasks_of, texts  # noqa: E402
from tests.training.texts import corpus  # noqa: E402

SMALL = [
    "train.batch=2",
    "train.length=24",
    "train.steps=2",
    "train.epochs=null",
    "train.optimizer.warmup=1",
    "validation_sequences=4",
]
STUDY = ["steps=2", "batch=2", "length=24", "documents=2", "methods.lora.lora.rank=4"]


def main() -> None:
    """Run all of them and print a table."""
    print("| file | row | stages: tensors that trained | seconds |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as made:
        room = Path(made)
        model = base(room)
        for name in surgeon.shipped_tasks():
            given = texts(room, name)
            few = [f"tasks.{task}.train.{key}" for task in tasks_of(name) for key in ("steps=2", "epochs=null")]
            parts = [f"tasks.{task}.sources.0.validation=0.2" for task in tasks_of(name)]
            started = time.monotonic()
            run = surgeon.continual(
                name, model, room / name.replace("/", "-"), texts=given, overrides=[*SMALL, *few, *parts]
            )
            for row, found in run.to_json()["rows"].items():
                print(f"| {name} | {row} | {', '.join(str(each['tensors']) for each in found['trainings'])} | |")
            print(f"| {name} | {len(run.to_json()['rows'])} rows | | {time.monotonic() - started:.0f} |", flush=True)
        for name in [study for study in surgeon.shipped_studies() if study.startswith("papers/")]:
            for number, text in enumerate(("fr", "en")):
                corpus(room / f"{text}.jsonl", seed=number + 1, first=30 * number, count=8, documents=40)
            started = time.monotonic()
            found = surgeon.compare(
                name, model, room / "results", overrides=STUDY, new=[room / "fr.jsonl"], original=[room / "en.jsonl"]
            )
            rows = [row for row in found.findings.rows if row.best is not None]
            assert not found.findings.missing
            print(f"| {name} | {len(rows)} rows, {found.made} runs | | {time.monotonic() - started:.0f} |", flush=True)


if __name__ == "__main__":
    main()
