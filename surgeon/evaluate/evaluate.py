"""`surgeon evaluate`: compare models on the same held-out text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon import Checkpoint, HeldOut, check_model, open_checkpoint
from surgeon.common import devices
from surgeon.common.listener import Listener, Quiet
from surgeon.common.tables import FittedTable
from surgeon.errors import BadInput, printable
from surgeon.evaluate.open_texts import open_texts
from surgeon.evaluate.results import Cell, Evaluation, LabelScores, SourceScores

# A model as `evaluate` takes it.
Model = str | Path | Checkpoint


@overload
def evaluate(
    models: Model | Sequence[Model],
    data: str | Path | HeldOut | Sequence[str | Path | HeldOut] | Mapping[str, str | Path],
    *,
    base: Model | None = ...,
    sources: Sequence[str] | None = ...,
    length: int | None = ...,
    batch: int = ...,
    most: int = ...,
    labels: Literal[False] = ...,
    dtype: str = ...,
    device: str = ...,
    trust_remote_code: bool = ...,
    listener: Listener | None = ...,
) -> Evaluation[SourceScores]: ...
@overload
def evaluate(
    models: Model | Sequence[Model],
    data: str | Path | HeldOut | Sequence[str | Path | HeldOut] | Mapping[str, str | Path],
    *,
    base: Model | None = ...,
    sources: Sequence[str] | None = ...,
    length: int | None = ...,
    batch: int = ...,
    most: int = ...,
    labels: Literal[True],
    dtype: str = ...,
    device: str = ...,
    trust_remote_code: bool = ...,
    listener: Listener | None = ...,
) -> Evaluation[LabelScores]: ...
def evaluate(
    models: Model | Sequence[Model],
    data: str | Path | HeldOut | Sequence[str | Path | HeldOut] | Mapping[str, str | Path],
    *,
    base: Model | None = None,
    sources: Sequence[str] | None = None,
    length: int | None = None,
    batch: int = 8,
    most: int = 500,
    labels: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Evaluation[SourceScores] | Evaluation[LabelScores]:
    """Return loss, perplexity, bits per byte and accuracy of models on the same held-out text, with intervals.

    With `labels` the texts have labels and the models are classifiers: accuracy, F1 and Matthews' correlation. The
    models are compared with the first, document by document.

    Args:
        models: A folder, `user/name[@revision]` on the Hub, an opened checkpoint, or several of them.
        data: Text files or folders (`NAME=FILE` gives a name), a data file, a training config (its held-out text),
            files by name, or texts that `open_texts` opened.
        base: A model for the first row.
        sources: The sources to take, by name; None: all.
        length: Tokens in a window; None: the smallest context, at most 2048.
        batch: How many windows are run at a time.
        most: How many documents are taken of each source at most; 0: all.
        labels: Whether the texts have labels.
        dtype: auto (the checkpoint's), float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        trust_remote_code: Whether the models' own code may run.
        listener: Receives progress and notes.

    Returns:
        A row for each model, a cell for each source.

    Raises:
        BadInput: An option is out of range, a model or text cannot be opened, or models are of different kinds.
    """
    listener = listener or Quiet()
    _check_numbers(length, batch, most)
    rows = _rows(models, base)
    devices.check(device)
    Checkpoint.check_dtype(dtype)
    for model in rows:
        if not isinstance(model, Checkpoint):
            check_model(model, trust_remote_code=trust_remote_code)
    texts = open_texts(data, only=sources or (), most=most, say=listener.say, labels=labels)

    from surgeon.evaluate.labels import evaluate_labels
    from surgeon.evaluate.texts import evaluate_texts

    device = devices.resolve(device)
    opened = [_opened(model, trust_remote_code=trust_remote_code) for model in rows]
    return (evaluate_labels if labels else evaluate_texts)(
        opened, texts, length=length, batch=batch, dtype=dtype, device=device, listener=listener
    )


def _check_numbers(length: int | None, batch: int, most: int) -> None:
    """Raise BadInput for a number that is too small."""
    for option, given, least in (("length", length, 2), ("batch", batch, 1), ("most", most, 0)):
        if given is not None and given < least:
            raise BadInput(f"{option} is {given}; it must be at least {least}")


def _rows(models: Model | Sequence[Model], base: Model | None) -> list[Model]:
    """Return the models in the order of their rows, the base first. Raises BadInput where there is none but a base."""
    given = [models] if isinstance(models, Model) else list(models)
    if not given:
        raise BadInput("no model to evaluate: give a folder or a Hub id")
    return given if base is None else [base, *given]


def _opened(model: Model, *, trust_remote_code: bool) -> Checkpoint:
    """Return the model opened, unless it is."""
    return model if isinstance(model, Checkpoint) else open_checkpoint(model, trust_remote_code=trust_remote_code)


def evaluation_view(evaluation: Evaluation[Any]) -> RenderableType:
    """One row for each source and model: scores with intervals, and differences to the first model."""
    cells: Sequence[Cell] = evaluation.models[0].sources
    compared = len(evaluation.models) > 1
    table = FittedTable("source", "model", names=2)
    for column in cells[0].columns:
        table.add_column(column)
    if compared:
        table.add_column(f"{cells[0].difference} to {printable(evaluation.models[0].model, 40)}")
    for number, first in enumerate(cells):
        if number and compared:
            table.add_row()
        for row in evaluation.models:
            found: Cell = row.sources[number]
            names = [Text(found.source if found is first else "", style="bold"), Text(printable(row.model))]
            table.add_row(*names, *found.figures(), *([found.difference_cell()] if compared else []))
    notes = f"{', '.join(cell.size for cell in cells)}; {cells[0].reading.format(length=evaluation.length)}"
    return Group(table, Text(), Text(notes, style="dim"))
