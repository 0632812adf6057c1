"""The commands that write, and what they work on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import surgeon
from tests.injection.command import Command
from tests.injection.pushing import Push


def _recall(inputs: Path, work: Path) -> None:
    surgeon.recall(inputs / "base", tokens=500, length=16, batch=6, to=work / "memory.jsonl", device="cpu")


def _training(name: str, of: str = "deeper") -> Callable[[Path, Path], object]:
    return lambda inputs, work: surgeon.train(inputs / of, inputs / f"{name}.yaml", work / "out", device="cpu")


def _continual(inputs: Path, work: Path) -> None:
    surgeon.continual(inputs / "tasks.yaml", inputs / "base", work / "out", device="cpu")


def _push(_: Path, work: Path) -> None:
    surgeon.push(work / "out", "user/model")


COMMANDS = (
    Command("apply", lambda inputs, work: surgeon.apply("llama-pro", str(inputs / "base"), work / "out")),
    Command("revert", lambda inputs, work: surgeon.revert(inputs / "deeper", work / "out")),
    Command("delta", lambda inputs, work: surgeon.make_delta(inputs / "deeper", work / "out")),
    Command(
        "apply --delta",
        lambda inputs, work: surgeon.apply_delta(inputs / "delta", str(inputs / "base"), work / "out"),
    ),
    Command("export-slot", lambda inputs, work: surgeon.export_slot(inputs / "slots", 0, work / "out")),
    Command(
        "report",
        lambda inputs, work: surgeon.report(inputs / "deeper", html=work / "report.html"),
        result="report.html",
        again=True,
    ),
    Push("push", _push),
    Push("push, new", _push, new=True),
    Command("merge", lambda inputs, work: surgeon.merge(inputs / "branched", work / "out", windows=1), every=5),
    Command("recall", _recall, result="memory.jsonl", beside=("memory.jsonl.recall",)),
    Command("train", _training("train"), every=9),
    # The model writes the text on which the base within it teaches; what else the base has said is there already, and
    # a frozen copy of it teaches.
    Command("train, preserve", _training("preserve"), every=9),
    Command("train, all of it, preserve", _training("all"), every=9),
    Command("train, all of it, cached", _training("cached"), every=9),
    # The gate is fitted, and taken up as it was.
    Command("train, gate", _training("gate", "gated"), every=9),
    Command("continual", _continual, every=25),
)


def inputs(folder: Path) -> Path:
    """What the commands work on, made once: nothing in it is written to again."""
    from tests import tiny
    from tests.training.texts import add_tokenizer, corpus

    base = add_tokenizer(tiny.checkpoint(folder / "base", "llama", num_hidden_layers=8))
    plans = {"deeper": "llama-pro", "slots": "pmoe", "branched": "control-llm", "gated": "domain-gate"}
    for name, plan in plans.items():
        surgeon.apply(plan, str(base), folder / name)
    surgeon.make_delta(folder / "deeper", folder / "delta")
    corpus(folder / "text.jsonl", documents=20)
    for number, name in enumerate(("fr", "en")):
        corpus(folder / f"{name}.jsonl", documents=60, seed=number, first=50 * number, count=50)
    training = {
        "steps": 2,
        "batch": 2,
        "length": 16,
        "save_every": 1,
        "evaluate_every": 2,
        "validation_sequences": 2,
    }
    source = {"name": "text", "path": "text.jsonl", "share": 1.0, "validation": 0.2}
    new = source | {"share": 0.5}
    known = {"name": "known", "share": 0.5, "role": "original", "validation": 0}
    itself = known | {"generate": {"tokens": 250, "length": 16, "batch": 4}}
    for name, changes in {
        "train": {"sources": [source]},
        "preserve": {"preserve": {"loss": "kl"}, "sources": [new, itself]},
        "gate": {
            "recall_for_gate": 100,
            "sources": [
                new | {"name": "fr", "path": "fr.jsonl"},
                known | {"name": "en", "path": "en.jsonl", "validation": 0.2},
            ],
        },
        "cached": {
            "what": "all",
            "preserve": {"teacher": {"cached": 8}},
            "sources": [new, known | {"path": "text.jsonl"}],
        },
        "all": {"what": "all", "preserve": {"loss": "kl"}, "sources": [new, known | {"path": "text.jsonl"}]},
    }.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"surgeon_train": 1, **training, **changes}))
    del training["validation_sequences"]
    tasks = [{"name": name, "sources": [{"path": "text.jsonl", "validation": 0.2}]} for name in "ab"]
    plan = {"rank": 2, "threshold": 2}
    (folder / "tasks.yaml").write_text(
        json.dumps({"surgeon_continual": 1, "plan": plan, "train": training, "validation_sequences": 2, "tasks": tasks})
    )
    return folder
