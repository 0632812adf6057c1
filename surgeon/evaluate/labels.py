"""Judge several classification models on the same labelled texts and compare each with the first, text by text."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.checkpoint.labels import is_classifier, label_names
from surgeon.common.listener import Listener
from surgeon.common.tables import FittedTable
from surgeon.data.classification_metrics import Judged, judge
from surgeon.data.examples import Example, ExampleEncoder, example_at
from surgeon.data.scoring import Ratio, difference
from surgeon.data.sources import HeldOut
from surgeon.errors import BadInput, printable
from surgeon.evaluate.cells import ratio_cell
from surgeon.evaluate.models import LONGEST, Candidate, as_data, number_of
from surgeon.models.encoders import load_encoder, positions_of
from surgeon.models.load import CLASSIFIER


@dataclass(frozen=True)
class LabelScores:
    """One model on one source: cross-entropy in nats an example and accuracy, with 95 % confidence intervals.

    `f1` is that of the second of two labels, `matthews` Matthews' correlation (`Judged`); None where there is none.
    `accuracy_difference` is to the first model, paired by text; None for the first.
    """

    source: str
    examples: int
    loss: Ratio
    accuracy: Ratio
    f1: float | None
    matthews: float | None
    accuracy_difference: Ratio | None


@dataclass(frozen=True)
class LabelEvaluation:
    """Several classification models on the same texts: (name, its scores) of each; `length` is the most tokens read."""

    models: tuple[tuple[str, tuple[LabelScores, ...]], ...]
    length: int
    dtype: str
    device: str
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        shown = "; ".join(
            f"{name}: " + ", ".join(f"{found.source} {found.accuracy.value:.1%}" for found in rows[:4])
            for name, rows in self.models[:4]
        )
        return f"LabelEvaluation({len(self.models)} models, right {shown})"

    def of(self, model: str, source: str) -> LabelScores:
        """One cell. Raises KeyError where there is none."""
        for name, rows in self.models:
            for found in rows:
                if (name, found.source) == (model, source):
                    return found
        raise KeyError(f"{model}, {source}")

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`; NaN and infinity are written as strings."""
        return {
            "length": self.length,
            "dtype": self.dtype,
            "device": self.device,
            "confidence": 0.95,
            "models": [
                {
                    "model": name,
                    "sources": {
                        found.source: {
                            "examples": found.examples,
                            "loss": as_data(found.loss),
                            "accuracy": as_data(found.accuracy),
                            "f1": number_of(found.f1),
                            "matthews": number_of(found.matthews),
                            "accuracy_difference": as_data(found.accuracy_difference),
                        }
                        for found in rows
                    },
                }
                for name, rows in self.models
            ],
            "notes": list(self.notes),
        }


def evaluate_labels(
    candidates: Sequence[Candidate],
    sources: Sequence[HeldOut],
    *,
    length: int | None,
    batch: int,
    dtype: str,
    device: str,
    listener: Listener,
) -> LabelEvaluation:
    """Judge every model on every source, one model in memory at a time.

    Texts are cut at `length` tokens (None: the smallest context, at most 2048). Raises BadInput where a model is no
    classifier, has other labels than the texts or than the first model, or cannot be loaded.
    """
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        listener.say(line)

    for candidate in candidates:
        for line in candidate.folder.notes:
            note(f"{candidate.name}: {line}")
        if not is_classifier(candidate.folder.config):
            raise BadInput(
                f"{printable(candidate.name)}: no classification model, and the data has labels; evaluate models with a"
                " head for labels (`ForSequenceClassification`) together, others on text"
            )
    window = min(length or LONGEST, *(candidate.context for candidate in candidates))
    rows: list[tuple[str, tuple[LabelScores, ...]]] = []
    first: dict[str, Judged] = {}
    known: tuple[str, ...] = ()
    for candidate in candidates:
        labels = label_names(candidate.folder.config)
        known = known or labels
        if labels != known:
            raise BadInput(
                f"{printable(candidate.name)}: its labels ({printable(', '.join(labels))}) are not those of"
                f" {printable(candidates[0].name)} ({printable(', '.join(known))}); evaluate them one by one"
            )
        found = _judged(candidate, window, sources, batch, dtype, device, note, listener)
        rows.append((candidate.name, tuple(_scores(name, each, first.get(name)) for name, each in found.items())))
        first = first or found
    return LabelEvaluation(tuple(rows), window, dtype, device, tuple(notes))


def _judged(
    candidate: Candidate,
    window: int,
    sources: Sequence[HeldOut],
    batch: int,
    dtype: str,
    device: str,
    note: Callable[[str], None],
    listener: Listener,
) -> dict[str, Judged]:
    listener.say(f"loading {candidate.name}")
    model = load_encoder(candidate.folder, dtype=dtype, device=device, auto=CLASSIFIER, say=note)
    room = positions_of(model)
    encoder = ExampleEncoder(
        candidate.encoder.tokenizer,
        candidate.folder.config,
        length=window if room is None else min(window, room),
        vocabulary=candidate.encoder.vocabulary,
    )
    examples: dict[str, list[Example]] = {
        held.name: [example_at(held.documents, int(number), encoder, held.name) for number in held.numbers]
        for held in sources
    }
    listener.begin(f"judging {candidate.name}", sum(map(len, examples.values())), "texts")
    found = {
        name: judge(model, each, micro_batch=batch, pad=encoder.pad, advance=listener.advance)
        for name, each in examples.items()
    }
    # Free the memory for the next model.
    del model
    gc.collect()
    return found


def _scores(name: str, found: Judged, first: Judged | None) -> LabelScores:
    ones = np.ones(len(found.nats))
    return LabelScores(
        source=name,
        examples=len(ones),
        loss=found.loss,
        accuracy=found.accuracy,
        f1=found.f1,
        matthews=found.matthews,
        accuracy_difference=None if first is None else difference(found.right, ones, first.right, ones),
    )


def labels_view(evaluation: LabelEvaluation) -> RenderableType:
    """One row for each source and model: scores with intervals, and differences to the first model."""
    compared = len(evaluation.models) > 1
    table = FittedTable("source", "model", names=2)
    for column in ("loss", "right", "F1", "Matthews"):
        table.add_column(column)
    if compared:
        table.add_column(f"Δ right to {printable(evaluation.models[0][0], 40)}")
    for number, first in enumerate(evaluation.models[0][1]):
        if number and compared:
            table.add_row()
        for name, rows in evaluation.models:
            found = rows[number]
            cells = [
                Text(found.source if found is first else "", style="bold"),
                Text(printable(name)),
                ratio_cell(found.loss, ".4f"),
                ratio_cell(found.accuracy, ".1%"),
                Text("" if found.f1 is None else f"{found.f1:.3f}"),
                Text("" if found.matthews is None else f"{found.matthews:.3f}"),
            ]
            changed = found.accuracy_difference
            table.add_row(*cells, *([Text() if changed is None else ratio_cell(changed, "+.1%")] if compared else []))
    sizes = ", ".join(f"{found.source} {found.examples:,} texts" for found in evaluation.models[0][1])
    notes = f"{sizes}; at most {evaluation.length:,} tokens of each; [ ] 95 % confidence, over texts"
    return Group(table, Text(), Text(notes, style="dim"))
