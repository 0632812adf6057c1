"""The results of an evaluation: for each model a row with its answers and a cell for each source.

A source is a text, or texts with labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from rich.text import Text

from surgeon import Answer, KeptAnswers, Ratio
from surgeon.common.formatting import counted
from surgeon.common.json_results import plain

# The most models and sources that a repr names.
_MOST_SHOWN = 4


# Fields with another name in JSON.
_KEYS = {"nbytes": "bytes", "apart": "kl"}


@dataclass(frozen=True)
class Cell(ABC):
    """The scores of one model on one source, with their form in tables and in JSON."""

    # Headings of the scores' columns, heading of the difference's column, and words on intervals.
    columns: ClassVar[tuple[str, ...]]
    difference: ClassVar[str]
    reading: ClassVar[str]

    source: str

    @property
    def apart(self) -> Ratio | None:
        """KL(first ‖ this model) in nats a token; None where it was not measured."""
        return None

    @property
    @abstractmethod
    def size(self) -> str:
        """How much text the source has, in words."""

    @property
    @abstractmethod
    def headline(self) -> str:
        """The most important score, as text."""

    @abstractmethod
    def figures(self) -> list[Text]:
        """Return the scores for the table's columns."""

    @abstractmethod
    def difference_cell(self) -> Text:
        """Return the difference from the first model; empty for the first model itself."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields but `source` as plain data."""
        return {_KEYS.get(key, key): plain(value) for key, value in vars(self).items() if key != "source"}


CellT = TypeVar("CellT", bound=Cell)


@dataclass(frozen=True)
class SourceScores(Cell):
    """One model on one source: loss in nats a token, bits per byte of UTF-8, accuracy of greedy decoding.

    Each has a 95 % confidence interval over documents. The differences are from the first model, paired by document
    (None for the first model; the loss difference is also None where the tokens differ). `apart` is KL(first ‖ model)
    in nats a token, where it was requested and the tokens are the same.
    """

    columns: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "bits/byte", "right")
    difference: ClassVar[str] = "Δ"
    reading: ClassVar[str] = "[ ] 95 % confidence, over documents"

    documents: int
    tokens: int
    nbytes: int
    loss: Ratio
    perplexity: Ratio
    bits_per_byte: Ratio
    accuracy: Ratio
    loss_difference: Ratio | None
    bits_difference: Ratio | None
    apart: Ratio | None = None

    @property
    def size(self) -> str:
        """How much text the source has, in words."""
        return f"{self.source} {counted(self.documents, 'document')}, {self.tokens:,} tokens"

    @property
    def headline(self) -> str:
        """The loss, as text."""
        return f"{self.loss.value:.4f}"

    def figures(self) -> list[Text]:
        """Return loss, perplexity, bits per byte and accuracy."""
        return [
            _ratio_cell(self.loss, ".4f"),
            _ratio_cell(self.perplexity, ".4g"),
            _ratio_cell(self.bits_per_byte, ".4f"),
            Text(f"{self.accuracy.value:.1%}"),
        ]

    def difference_cell(self) -> Text:
        """Return the difference in nats a token, or in bits per byte where tokens differ.

        It is coloured where the interval does not contain 0.
        """
        shown, unit = self.loss_difference, ""
        if shown is None:
            shown, unit = self.bits_difference, " bits/byte"
        if shown is None:
            return Text()
        if shown.value == 0 and shown.interval in (None, (0, 0)):
            return Text(f"0, exactly{unit}", style="dim")
        low, high = shown.interval or (0, 0)
        return _ratio_cell(shown, "+.4f", "green" if high < 0 else "yellow" if low > 0 else "").append(unit)


@dataclass(frozen=True)
class LabelScores(Cell):
    """One model on one source: cross-entropy in nats an example and accuracy, with 95 % confidence intervals.

    `f1` is the F1 score of the second of two labels, `matthews` is Matthews' correlation (`Judged`); None where they
    are not defined. `accuracy_difference` is the difference from the first model, paired by text; None for the first
    model.
    """

    columns: ClassVar[tuple[str, ...]] = ("loss", "right", "F1", "Matthews")
    difference: ClassVar[str] = "Δ right"
    reading: ClassVar[str] = "[ ] 95 % confidence, over texts"

    examples: int
    loss: Ratio
    accuracy: Ratio
    f1: float | None
    matthews: float | None
    accuracy_difference: Ratio | None

    @property
    def size(self) -> str:
        """How much text the source has, in words."""
        return f"{self.source} {self.examples:,} texts"

    @property
    def headline(self) -> str:
        """The accuracy, as text."""
        return f"{self.accuracy.value:.1%}"

    def figures(self) -> list[Text]:
        """Return loss, accuracy, F1 and Matthews' correlation."""
        return [
            _ratio_cell(self.loss, ".4f"),
            _ratio_cell(self.accuracy, ".1%"),
            Text("" if self.f1 is None else f"{self.f1:.3f}"),
            Text("" if self.matthews is None else f"{self.matthews:.3f}"),
        ]

    def difference_cell(self) -> Text:
        """Return the difference in accuracy."""
        return Text() if self.accuracy_difference is None else _ratio_cell(self.accuracy_difference, "+.1%")


@dataclass(frozen=True)
class ModelScores(Generic[CellT]):
    """One model's scores on all sources, and its answers to all prompts.

    `same_tokens`: whether its tokens are the same as the first model's; None where no text is scored. `kept`: how much
    of the first model's answers it keeps; None for the first, or where that was not asked for.
    """

    model: str
    same_tokens: bool | None
    sources: tuple[CellT, ...]
    answers: tuple[Answer, ...] = ()
    kept: KeptAnswers | None = None


@dataclass(frozen=True)
class Evaluation(Generic[CellT]):
    """The scores of several models on the same held-out text, and their answers to the same prompts.

    Texts or prompts may be absent. All models are compared with the first. Cells are `SourceScores`, or `LabelScores`
    for labelled texts. `length` is the largest number of tokens in a window or a labelled text (None: no text); `notes`
    contains lines that explain the numbers.
    """

    models: tuple[ModelScores[CellT], ...]
    length: int | None
    dtype: str
    device: str
    notes: tuple[str, ...]
    prompts: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shown = "; ".join(
            f"{row.model}: "
            + ", ".join(
                [f"{found.source} {found.headline}" for found in row.sources[:_MOST_SHOWN]]
                + [f"{len(row.answers)} answers"] * bool(row.answers)
            )
            for row in self.models[:_MOST_SHOWN]
        )
        return f"Evaluation({len(self.models)} models, {shown})"

    def of(self, model: str, source: str) -> CellT:
        """Return the scores of a model on a source. Raises KeyError where there are none."""
        for row in self.models:
            for found in row.sources:
                if (row.model, found.source) == (model, source):
                    return found
        raise KeyError(f"{model}, {source}")

    def answer(self, model: str, prompt: str) -> Answer:
        """Return a model's answer to a prompt. Raises KeyError where there is none."""
        for row in self.models:
            for given, answer in zip(self.prompts, row.answers, strict=True):
                if (row.model, given) == (model, prompt):
                    return answer
        raise KeyError(f"{model}, {prompt}")

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`; NaN and infinity are written as strings.

        Keys:
            `models`: each with `model`, `same_tokens` and `sources`: by name `documents`, `tokens`, `bytes`, and
                `loss`, `perplexity`, `bits_per_byte`, `accuracy`, `loss_difference`, `bits_difference`, `kl` (null: not
                asked for), each with `value`, `low`, `high`; with `--labels` instead `examples`, `loss`, `accuracy`,
                `accuracy_difference` (with `value`, `low`, `high`), `f1`, `matthews` (null where they do not exist);
                with `--answers` also `kept`: `prompts`, `silent`, and `kl`, `prefix`, `same`, `right`, `right_of_base`
            `answers`: each with `prompt` and `models`: each with `model`, `text`, `tokens`, `ended` (whether the model
                ended it by itself)
            `length`, `dtype`, `device`, `confidence`, `notes`: the conditions; `length` is null without text
        """
        return {
            "length": self.length,
            "dtype": self.dtype,
            "device": self.device,
            "confidence": 0.95,
            "models": [
                {
                    "model": row.model,
                    **({} if row.same_tokens is None else {"same_tokens": row.same_tokens}),
                    "sources": {found.source: found.to_json() for found in row.sources},
                    **({} if row.kept is None else {"kept": row.kept.to_json()}),
                }
                for row in self.models
            ],
            "answers": [
                {
                    "prompt": prompt,
                    "models": [{"model": row.model, **row.answers[number].to_json()} for row in self.models],
                }
                for number, prompt in enumerate(self.prompts)
            ],
            "notes": list(self.notes),
        }


def _ratio_cell(found: Ratio, form: str, style: str = "") -> Text:
    """Return `3.1416 [3.1, 3.2]`, with each number in the format `form`; the interval, where there is one, is dim."""
    text = Text(f"{found.value:{form}}", style=style)
    if found.interval is not None:
        text.append(f" [{found.interval[0]:{form}}, {found.interval[1]:{form}}]", style="dim")
    return text
