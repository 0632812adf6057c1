"""The schema of a study's entries: texts, remedies against forgetting, methods and claims.

Unknown keys are refused, and so is everything else that can be refused before the first run.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from surgeon import LoraSpec, PreserveSpec, RunSettings, UnlabelledSpec
from surgeon.common.schema import Entry

_NAME = r"^[A-Za-z0-9_.-]{1,60}$"

# Every comparison contains these methods; those that a study leaves out are added.
PEERS = ("full", "lora", "partial")
# The fewest rates of a frontier, and the smallest and largest factor between neighbouring rates.
FEWEST_RATES = 4
_NEAREST, _FARTHEST = 1.5, 4.0


class StudyText(UnlabelledSpec):
    """A text of a study."""

    path: Annotated[
        str,
        Field(min_length=1, description="file (.jsonl, .json, .txt, .parquet), folder of them, or dataset:USER/NAME"),
    ]
    name: Annotated[
        str | None, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$", description="name in results; default: the file's")
    ] = None
    share: Annotated[
        float | None,
        Field(gt=0, le=1, description="share among the texts of its list; default: by file size"),
    ] = None
    validation: Annotated[
        float | str,
        Field(description="held-out text that losses are measured on: a share of the documents, or a file"),
    ] = 0.1

    @property
    def called(self) -> str:
        """The text's name; by default made from the file's name."""
        return self.name or re.sub(r"[^A-Za-z0-9_-]", "_", Path(self.path).name.partition(".")[0])[:60] or "text"

    @model_validator(mode="after")
    def _held_out(self) -> StudyText:
        """Raise ValueError unless some of the text is held out."""
        if isinstance(self.validation, float) and not 0 < self.validation < 1:
            raise ValueError(
                "validation must be a share above 0 and below 1, or a file: losses are compared on held-out text"
            )
        return self


class ReplaySpec(Entry):
    """Replay: text that the base knows, mixed into training."""

    source: Annotated[
        Literal["text", "recall"],
        Field(description="text: `replayed`, or `original` without it; recall: text that the base writes"),
    ] = "recall"
    share: Annotated[
        float, Field(ge=0, lt=1, description="share of the training sequences; 0: the text is read for `fisher` alone")
    ] = 0.1


def _fair(rates: list[float]) -> list[float]:
    """Return the rates. Raises ValueError for rates that are repeated, out of range, or too close or too far apart."""
    ordered = sorted(rates)
    if len(set(rates)) < len(rates):
        raise ValueError("a rate is given twice; give each once")
    if ordered[0] <= 0 or ordered[-1] >= 1:
        wrong = ordered[0] if ordered[0] <= 0 else ordered[-1]
        raise ValueError(f"rate {wrong:g} is no learning rate; give rates above 0 and below 1")
    for low, high in itertools.pairwise(ordered):
        if not _NEAREST <= high / low <= _FARTHEST:
            raise ValueError(
                f"rates {low:g} and {high:g} are a factor {high / low:.3g} apart; give steps of 2 to 3"
                f" ({_NEAREST:g} to {_FARTHEST:g} is allowed)"
            )
    return rates


def check_enough(rates: list[float] | None) -> None:
    """Raise ValueError for fewer rates than a frontier needs."""
    if rates is not None and len(set(rates)) < FEWEST_RATES:
        several = f"{len(set(rates))} different rate{'s' if len(set(rates)) > 1 else ''}"
        raise ValueError(
            f"{several} given; a frontier needs at least {FEWEST_RATES}, each two or three times the one before,"
            " such as [1e-4, 3e-4, 1e-3, 3e-3]"
        )


Rates = Annotated[list[float], Field(min_length=1, max_length=40), AfterValidator(_fair)]


class Remedy(Entry):
    """A remedy against forgetting. A method runs with every remedy, or with those that its `remedies` names."""

    name: Annotated[str, Field(pattern=_NAME, description="name in results")]
    replay: Annotated[ReplaySpec | None, Field(description="text mixed into training; default: none")] = None
    preserve: Annotated[PreserveSpec | None, Field(description="the base as teacher, as in a training config")] = None
    rates: Annotated[Rates | None, Field(description="rates instead of the method's")] = None

    @property
    def fisher(self) -> int:
        """The largest number of sequences of original text that are read for `fisher` before the first step."""
        return 0 if self.preserve is None else self.preserve.fisher

    @model_validator(mode="after")
    def _has_what_it_teaches_on(self) -> Remedy:
        """Raise ValueError where `preserve` needs original text and nothing is replayed, or a share of 0 has no use."""
        if self.replay is not None and not self.replay.share and not self.fisher:
            raise ValueError(
                f"remedy {self.name}: `replay.share` 0 is for `preserve: {{loss: fisher}}`, which reads the text before"
                " the first step; give a share above 0, or leave `replay` out"
            )
        if self.preserve is None:
            return self
        if self.fisher and self.replay is None:
            raise ValueError(
                f"remedy {self.name}: fisher is estimated from original text, and there is none; add `replay: {{}}`, or"
                " `replay: {share: 0}`, which reads the text and trains on none of it"
            )
        taught = self.preserve.taught and self.preserve.on == "original"
        if taught and (self.replay is None or not self.replay.share):
            raise ValueError(
                f"remedy {self.name}: `preserve` teaches on original text, and nothing is replayed; add `replay: {{}}`,"
                " or `on: all`"
            )
        return self


class Partial(Entry):
    """Partial tuning: some whole layers of the base train, all other tensors are frozen."""

    every: Annotated[int, Field(ge=1, le=1000, description="4: every fourth layer, counted from the bottom")] = 4


class TrainSettings(RunSettings):
    """How runs train. Keys have the meaning and the defaults of a training config.

    Defaults of `optimizer` differ: cosine to a tenth of the peak rate, 5 % warm-up, betas 0.9 and 0.95, no weight
    decay, clip 1.
    """

    @model_validator(mode="after")
    def _no_rate(self) -> TrainSettings:
        """Raise ValueError where `optimizer` sets a learning rate."""
        if self.optimizer is not None and (self.optimizer.lr is not None or self.optimizer.min_lr is not None):
            raise ValueError("`lr` and `min_lr` come from the study's `rates`: leave them out")
        return self


class MethodSpec(Entry):
    """One way to learn: a plan whose new tensors train, or a way to train the base as it is."""

    name: Annotated[
        str | None, Field(pattern=_NAME, description="name in results; default: the plan's, or full, lora, partial")
    ] = None
    label: Annotated[str | None, Field(min_length=1, max_length=80, description="label in tables and figures")] = None
    plan: Annotated[
        str | None,
        Field(min_length=1, description="shipped plan or plan file; its new tensors train"),
    ] = None
    set: Annotated[
        dict[str, Any] | None,
        Field(min_length=1, description="values that replace the plan's, by dotted keys: {operations.0.alpha: 0.5}"),
    ] = None
    full: Annotated[
        Literal[True] | None,
        Field(description="full fine-tuning: every tensor of the base trains; with `plan`, of the grown model"),
    ] = None
    lora: Annotated[
        LoraSpec | None,
        Field(description="a LoRA on the base; `targets` default to attention where the base has experts, else to all"),
    ] = None
    partial: Annotated[
        Partial | None,
        Field(
            description="some whole layers of the base train; by default the last one where there are fewer than four"
        ),
    ] = None
    rates: Annotated[Rates | None, Field(description="peak learning rates; default: the study's")] = None
    remedies: Annotated[
        list[str] | None, Field(min_length=1, description="names of remedies; default: all of the study")
    ] = None
    seeds: Annotated[int | None, Field(ge=1, le=100, description="runs of each point; default: the study's")] = None
    train: Annotated[TrainSettings, Field(description="settings where they differ from the study's")] = TrainSettings()

    @model_validator(mode="after")
    def _one_way(self) -> MethodSpec:
        """Raise ValueError unless the method is exactly one way to train, and `set` only where there is a plan."""
        given = [key for key in ("plan", *PEERS) if getattr(self, key) is not None]
        if len(given) != 1 and given != ["plan", "full"]:
            raise ValueError(
                "a method is one of plan, full, lora and partial (or a plan with `full: true`, of which every tensor"
                f" trains); {' and '.join(given) or 'none'} given"
            )
        if self.set is not None and self.plan is None:
            raise ValueError(f"`set` gives a plan other values, and the method is `{given[0]}`; leave it out")
        return self

    @property
    def kind(self) -> str:
        """`plan`, or one of PEERS."""
        return next(key for key in ("plan", *PEERS) if getattr(self, key) is not None)

    @property
    def called(self) -> str:
        """The method's name in results."""
        if self.name is not None:
            return self.name
        if self.plan is None:
            return self.kind
        stem = self.plan.removesuffix(".yaml").removesuffix(".yml")
        return re.sub(r"[^A-Za-z0-9_.-]", "-", stem).strip("-")[-60:] or "plan"

    @property
    def words(self) -> str:
        """The method's name for people."""
        if self.label is not None:
            return self.label
        plain = {"full": "full fine-tuning", "lora": "LoRA", "partial": "partial tuning"}
        return plain.get(self.kind, self.called) if self.name is None else self.name


class Claim(Entry):
    """A paper's claim that `better` beats `worse`; both are names of methods, or `METHOD/REMEDY`."""

    says: Annotated[str, Field(min_length=1, max_length=300, description="the claim in words")]
    better: Annotated[str, Field(min_length=1, description="METHOD, or METHOD/REMEDY")]
    worse: Annotated[str, Field(min_length=1, description="METHOD, or METHOD/REMEDY")]
    on: Annotated[
        Literal["forgets", "learns"],
        Field(
            description="forgets: less original loss at equal new loss; learns: less new loss at equal original loss"
        ),
    ] = "forgets"
    paper: Annotated[str, Field(max_length=80, description="source of the claim")] = ""
