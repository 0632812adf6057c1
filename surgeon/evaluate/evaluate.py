"""`surgeon evaluate`: compare models on the same held-out text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.hub import check_id
from surgeon.common import devices
from surgeon.common.listener import Listener, Quiet
from surgeon.common.tables import FittedTable
from surgeon.errors import BadInput, printable
from surgeon.evaluate.cells import ratio_cell
from surgeon.evaluate.sources import open_sources

if TYPE_CHECKING:
    from surgeon.evaluate.labels import LabelEvaluation
    from surgeon.evaluate.models import Evaluation, SourceScores


@overload
def evaluate(
    models: str | Path | Sequence[str | Path],
    data: str | Path | Sequence[str | Path] | Mapping[str, str | Path],
    *,
    base: str | Path | None = ...,
    sources: Sequence[str] | None = ...,
    length: int | None = ...,
    batch: int = ...,
    most: int = ...,
    labels: Literal[False] = ...,
    dtype: str = ...,
    device: str = ...,
    trust_remote_code: bool = ...,
    listener: Listener | None = ...,
) -> Evaluation: ...
@overload
def evaluate(
    models: str | Path | Sequence[str | Path],
    data: str | Path | Sequence[str | Path] | Mapping[str, str | Path],
    *,
    base: str | Path | None = ...,
    sources: Sequence[str] | None = ...,
    length: int | None = ...,
    batch: int = ...,
    most: int = ...,
    labels: Literal[True],
    dtype: str = ...,
    device: str = ...,
    trust_remote_code: bool = ...,
    listener: Listener | None = ...,
) -> LabelEvaluation: ...
def evaluate(
    models: str | Path | Sequence[str | Path],
    data: str | Path | Sequence[str | Path] | Mapping[str, str | Path],
    *,
    base: str | Path | None = None,
    sources: Sequence[str] | None = None,
    length: int | None = None,
    batch: int = 8,
    most: int = 500,
    labels: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Evaluation | LabelEvaluation:
    """Loss, perplexity, bits per byte and accuracy of `models` on the same held-out text, with confidence intervals.

    A model is a folder, or `user/name[@revision]` on the Hub. `data` is one or more text files or folders (`NAME=FILE`
    gives a name), a data file, a training config (its held-out text), or files by name. The first row is `base` if it
    is given; the others are compared with it, document by document. It takes at most `most` documents of each source
    (0: all), in windows of `length` tokens (None: the smallest context, at most 2048), `batch` at a time.

    With `labels` the texts have labels and the models are classifiers: accuracy, F1 and Matthews' correlation. Raises
    BadInput for an option out of range, for models and texts that cannot be opened, and for models of another kind.
    """
    listener = listener or Quiet()
    for option, given, least in (("length", length, 2), ("batch", batch, 1), ("most", most, 0)):
        if given is not None and given < least:
            raise BadInput(f"{option} is {given}; it must be at least {least}")
    given_models = [models] if isinstance(models, str | Path) else list(models)
    if not given_models:
        raise BadInput("no model to evaluate: give a folder or a Hub id")
    devices.check(device)
    given_models = [*([base] if base is not None else []), *given_models]
    for model in given_models:
        check_model(model, trust_remote_code=trust_remote_code)
    held = open_sources(data, only=sources or (), most=most, say=listener.say, labels=labels)

    from surgeon.evaluate.labels import evaluate_labels
    from surgeon.evaluate.models import Candidate, evaluate_models

    device = devices.resolve(device)
    candidates = [Candidate.open(model, trust_remote_code=trust_remote_code) for model in given_models]
    return (evaluate_labels if labels else evaluate_models)(
        candidates,
        held,
        length=length,
        batch=batch,
        dtype=dtype,
        device=device,
        listener=listener,
    )


def check_model(model: str | Path, *, trust_remote_code: bool) -> None:
    """Raise BadInput for a model that cannot be one, before torch is loaded; the Hub is asked later."""
    name = str(model)
    if Path(name).exists():
        CheckpointFolder.open(Path(name), trust_remote_code=trust_remote_code)
    else:
        check_id(name.partition("@")[0])


def evaluation_view(evaluation: Evaluation | LabelEvaluation) -> RenderableType:
    """One row for each source and model: scores with intervals, and differences to the first model."""
    from surgeon.evaluate.labels import LabelEvaluation, labels_view

    if isinstance(evaluation, LabelEvaluation):
        return labels_view(evaluation)
    compared = len(evaluation.models) > 1
    table = FittedTable("source", "model", names=2)
    for column in ("loss", "perplexity", "bits/byte", "right"):
        table.add_column(column)
    if compared:
        table.add_column(f"Δ to {printable(evaluation.models[0].model, 40)}")
    for number, first in enumerate(evaluation.models[0].sources):
        if number and compared:
            table.add_row()
        for row in evaluation.models:
            found = row.sources[number]
            cells = [
                Text(found.source if found is first else "", style="bold"),
                Text(printable(row.model)),
                ratio_cell(found.loss, ".4f"),
                ratio_cell(found.perplexity, ".4g"),
                ratio_cell(found.bits_per_byte, ".4f"),
                Text(f"{found.accuracy.value:.1%}"),
            ]
            table.add_row(*cells, *([_difference_cell(found)] if compared else []))
    sizes = ", ".join(
        f"{found.source} {found.documents:,} documents, {found.tokens:,} tokens"
        for found in evaluation.models[0].sources
    )
    notes = f"{sizes}; windows of at most {evaluation.length:,} tokens; [ ] 95 % confidence, over documents"
    return Group(table, Text(), Text(notes, style="dim"))


def _difference_cell(found: SourceScores) -> Text:
    """In nats a token, or in bits per byte where tokens differ; coloured where the interval does not contain 0."""
    shown, unit = found.loss_difference, ""
    if shown is None:
        shown, unit = found.bits_difference, " bits/byte"
    if shown is None:
        return Text()
    if shown.value == 0 and shown.interval in (None, (0, 0)):
        return Text(f"0, exactly{unit}", style="dim")
    style = ""
    if shown.interval is not None and shown.interval[1] < 0:
        style = "green"
    elif shown.interval is not None and shown.interval[0] > 0:
        style = "yellow"
    text = Text(f"{shown.value:+.4f}", style=style)
    if shown.interval is not None:
        text.append(f" [{shown.interval[0]:+.4f}, {shown.interval[1]:+.4f}]", style="dim")
    return text.append(unit)
