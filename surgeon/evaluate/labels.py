"""Judge several classification models on the same labelled texts and compare each with the first, text by text."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence

from surgeon import Checkpoint, HeldOut, Judged, judge
from surgeon.common.listener import Listener
from surgeon.errors import BadInput, printable
from surgeon.evaluate.results import Evaluation, LabelScores, ModelScores
from surgeon.evaluate.texts import LONGEST, narrowest_of


def evaluate_labels(
    models: Sequence[Checkpoint],
    texts: Sequence[HeldOut],
    *,
    length: int | None,
    batch: int,
    dtype: str,
    device: str,
    listener: Listener,
) -> Evaluation[LabelScores]:
    """Judge every model on every source, one model in memory at a time.

    Texts are cut at `length` tokens (None: the smallest context, at most 2048). Raises BadInput where a model is no
    classifier, has other labels than the texts or than the first model, or cannot be loaded.
    """
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        listener.say(line)

    for model in models:
        for line in model.notes:
            note(f"{model.name}: {line}")
        if not model.is_classifier:
            raise BadInput(
                f"{printable(model.name)}: no classification model, and the data has labels; evaluate models with a"
                " head for labels (`ForSequenceClassification`) together, others on text"
            )
    window = min(length or LONGEST, narrowest_of(models).context or sys.maxsize)
    rows: list[ModelScores[LabelScores]] = []
    first: dict[str, Judged] = {}
    known: tuple[str, ...] = ()
    for model in models:
        known = known or model.labels
        if model.labels != known:
            raise BadInput(
                f"{printable(model.name)}: its labels ({printable(', '.join(model.labels))}) are not those of"
                f" {printable(models[0].name)} ({printable(', '.join(known))}); evaluate them one by one"
            )
        found = _judged(model, window, texts, batch, dtype, device, note, listener)
        scores = tuple(_scores(name, each, first.get(name)) for name, each in found.items())
        rows.append(ModelScores(model.name, None, scores))
        first = first or found
    return Evaluation(tuple(rows), window, dtype, device, tuple(notes))


def _judged(
    checkpoint: Checkpoint,
    window: int,
    texts: Sequence[HeldOut],
    batch: int,
    dtype: str,
    device: str,
    note: Callable[[str], None],
    listener: Listener,
) -> dict[str, Judged]:
    listener.say(f"loading {checkpoint.name}")
    model = checkpoint.load(dtype=dtype, device=device, say=note)
    listener.begin(f"judging {checkpoint.name}", sum(map(len, texts)), "texts")
    found = judge(model, texts, checkpoint, length=window, batch=batch, advance=listener.advance)
    # Free the memory for the next model.
    del model
    gc.collect()
    return found


def _scores(name: str, found: Judged, first: Judged | None) -> LabelScores:
    return LabelScores(
        source=name,
        examples=len(found.nats),
        loss=found.loss,
        accuracy=found.accuracy,
        f1=found.f1,
        matthews=found.matthews,
        accuracy_difference=None if first is None else found.accuracy_difference(first),
    )
