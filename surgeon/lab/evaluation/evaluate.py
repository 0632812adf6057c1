"""`surgeon evaluate`: compare models by scores on the same held-out text, and by answers to the same prompts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon import Answer, Checkpoint, HeldOut, check_model, kept_table, open_checkpoint, read_prompts
from surgeon.common import devices
from surgeon.common.formatting import windows
from surgeon.common.listener import Listener, Quiet
from surgeon.common.tables import FittedTable
from surgeon.errors import BadInput, printable
from surgeon.lab.evaluation.open_texts import open_texts
from surgeon.lab.evaluation.results import Cell, Evaluation, LabelScores, SourceScores

# A model that `evaluate` accepts.
Model: TypeAlias = str | Path | Checkpoint


@overload
def evaluate(
    models: Model | Sequence[Model],
    data: str | Path | HeldOut | Sequence[str | Path | HeldOut] | Mapping[str, str | Path] | None = ...,
    *,
    base: Model | None = ...,
    prompts: str | Sequence[str] = ...,
    answer_tokens: int = ...,
    answers: str | Path | None = ...,
    sources: Sequence[str] | None = ...,
    length: int | None = ...,
    batch: int = ...,
    most: int = ...,
    kl: bool = ...,
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
    data: str | Path | HeldOut | Sequence[str | Path | HeldOut] | Mapping[str, str | Path] | None = None,
    *,
    base: Model | None = None,
    prompts: str | Sequence[str] = (),
    answer_tokens: int = 64,
    answers: str | Path | None = None,
    sources: Sequence[str] | None = None,
    length: int | None = None,
    batch: int = 8,
    most: int = 500,
    kl: bool = False,
    labels: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Evaluation[SourceScores] | Evaluation[LabelScores]:
    """Measure loss, perplexity, bits per byte and accuracy of models on the same held-out text; collect their answers.

    With `labels` the texts have labels and the models are classifiers: accuracy, F1 and Matthews' correlation. The
    models are compared with the first, document by document. A prompt is a user's turn where a model has a chat
    template, else a text to continue; answers are decoded greedily.

    Args:
        models: A folder, `user/name[@revision]` on the Hub, an opened checkpoint, or several of them.
        data: Text files or folders (`NAME=FILE` gives a name), a data file, a training config (its held-out text),
            files by name, or texts that `open_texts` opened; None: only prompts.
        base: A model for the first row.
        prompts: What each model answers.
        answer_tokens: The most tokens of an answer.
        answers: Prompts by which every model's answers are compared with the first's: `shipped`, or a file
            (`read_prompts`).
        sources: The sources to take, by name; None: all.
        length: Tokens in a window; None: the smallest context, at most 2048.
        batch: How many windows are run at a time.
        most: The largest number of documents of each source; 0: all.
        kl: Whether KL(first ‖ model) is measured too, which needs two models in memory.
        labels: Whether the texts have labels.
        dtype: auto (the checkpoint's), float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        trust_remote_code: Whether the models' own code may run.
        listener: Receives progress and notes.

    Returns:
        A row for each model, a cell for each source, an answer for each prompt.

    Raises:
        BadInput: An option is out of range, there is neither text nor prompt, a model or text cannot be opened, a
            prompt is empty or longer than a context, or models are of different kinds.
    """
    listener = listener or Quiet()
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    _check_numbers(length, batch, most, answer_tokens)
    _check_given(prompts, data is not None, sources or (), labels, answers is not None)
    rows = _rows(models, base)
    if answers is not None and len(rows) < 2:
        raise BadInput("--answers compares a model's answers with its base's; give the base too (--base)")
    asked = None if answers is None else read_prompts(answers)
    if kl and (labels or data is None or len(rows) < 2):
        raise BadInput("--kl compares the next tokens that two models expect: give text, and a base (--base)")
    devices.check(device)
    Checkpoint.check_dtype(dtype)
    for model in rows:
        if not isinstance(model, Checkpoint):
            check_model(model, trust_remote_code=trust_remote_code)
    texts = []
    if data is not None:
        texts = open_texts(data, only=sources or (), most=most, say=listener.say, labels=labels)

    from surgeon.lab.evaluation.texts import How, evaluate_labels, evaluate_texts

    device = devices.resolve(device)
    opened = [
        model if isinstance(model, Checkpoint) else open_checkpoint(model, trust_remote_code=trust_remote_code)
        for model in rows
    ]
    how = How(length, batch, dtype, device, listener)
    if labels:
        return evaluate_labels(opened, texts, how)
    return evaluate_texts(opened, texts, how, prompts=prompts, answer_tokens=answer_tokens, kl=kl, asked=asked)


def _check_numbers(length: int | None, batch: int, most: int, answer_tokens: int) -> None:
    """Raise BadInput for a number that is too small."""
    numbers = (("length", length, 2), ("batch", batch, 1), ("most", most, 0), ("answer_tokens", answer_tokens, 1))
    for option, given, least in numbers:
        if given is not None and given < least:
            raise BadInput(f"{option} is {given}; it must be at least {least}")


def _check_given(prompts: Sequence[str], data: bool, sources: Sequence[str], labels: bool, answers: bool) -> None:
    """Raise BadInput where there is nothing to evaluate on, an empty prompt, or options that do not go together."""
    if not (data or prompts or answers):
        raise BadInput(
            "nothing to evaluate on: give text (--data), a prompt to answer (--prompt), or prompts by which answers are"
            " compared with the base's (--answers shipped)"
        )
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            raise BadInput(f"prompt {number} is empty; give the words that the models are to answer (--prompt)")
        if prompt.encode(errors="ignore").decode() != prompt:
            raise BadInput(f"prompt {number} ({printable(prompt, 40)}) is not UTF-8 text; give it in that encoding")
    if labels and (prompts or answers):
        option = "--prompt" if prompts else "--answers"
        raise BadInput(f"models with a head for labels (--labels) answer no prompts; leave {option} out")
    if sources and not data:
        raise BadInput(f"--source {printable(sources[0])}: there is no data to take it from; give --data too")


def _rows(models: Model | Sequence[Model], base: Model | None) -> list[Model]:
    """Return the models in the order of their rows, the base first. Raises BadInput where `models` is empty."""
    given = [models] if isinstance(models, Model) else list(models)
    if not given:
        raise BadInput("no model to evaluate: give a folder or a Hub id")
    return given if base is None else [base, *given]


def evaluation_view(evaluation: Evaluation[Any]) -> RenderableType:
    """Return tables for the terminal: scores and differences from the first model by source, then answers by prompt."""
    parts: list[RenderableType] = []
    if evaluation.length is not None:
        parts += _scores(evaluation, evaluation.length)
    if kept := [(row.model, row.kept) for row in evaluation.models if row.kept is not None]:
        # An empty line, except before the first table.
        parts += [Text()] * bool(parts) + [kept_table(kept)]
    for number, prompt in enumerate(evaluation.prompts):
        answers = FittedTable(headings=False)
        answers.add_row(Text("prompt", style="bold"), Text(visible(prompt), style="bold"))
        for row in evaluation.models:
            answers.add_row(printable(row.model), _answer(row.answers[number]))
        # An empty line, except before the first table.
        parts += [Text()] * bool(parts) + [answers]
    return Group(*parts)


def _answer(answer: Answer) -> Text:
    """Return the text of an answer, marked where it was cut off or has no words."""
    words = answer.text.strip()
    text = Text(visible(words)) if words else Text("(no words)", style="dim")
    return text if answer.ended else text.append(" …", style="dim")


def visible(text: str) -> str:
    """Return text of a model or a user with invisible characters escaped, except the ends of lines."""
    return "\n".join(printable(line, sys.maxsize) for line in text.split("\n"))


def _scores(evaluation: Evaluation[Any], length: int) -> list[RenderableType]:
    """Return a table with one row for each source and model, and its notes."""
    cells: Sequence[Cell] = evaluation.models[0].sources
    compared = len(evaluation.models) > 1
    table = FittedTable("source", "model", names=2)
    for column in cells[0].columns:
        table.add_column(column)
    apart = [found.apart for row in evaluation.models for found in row.sources if found.apart is not None]
    if apart:
        table.add_column("KL")
    if compared:
        table.add_column(f"{cells[0].difference} to {printable(evaluation.models[0].model, 40)}")
    for number, first in enumerate(cells):
        if number and compared:
            table.add_row()
        for row in evaluation.models:
            found: Cell = row.sources[number]
            names = [Text(found.source if found is first else "", style="bold"), Text(printable(row.model))]
            kl = [Text("" if found.apart is None else f"{found.apart.value:.4f}")] * bool(apart)
            table.add_row(*names, *found.figures(), *kl, *([found.difference_cell()] if compared else []))
    notes = f"{', '.join(cell.size for cell in cells)}; {windows(length)}; {cells[0].reading}"
    return [table, Text(), Text(notes, style="dim")]
