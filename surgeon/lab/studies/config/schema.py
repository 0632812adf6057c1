"""The schema of study.yaml: methods and remedies against forgetting to compare, the texts, and the learning rates.

Unknown keys are refused, and so is everything else that can be refused before the first run.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from surgeon import GenerateSpec, PreserveSpec
from surgeon.common.formatting import did_you_mean
from surgeon.common.schema import Entry, check_shares, first_doubled
from surgeon.lab.studies.config.entries import (
    FEWEST_RATES,
    PEERS,
    Claim,
    MethodSpec,
    Rates,
    Remedy,
    ReplaySpec,
    StudyText,
    TrainSettings,
    check_enough,
)


class Study(Entry):
    """A comparison of methods."""

    surgeon_study: Annotated[Literal[1], Field(description="version of this format")]
    methods: Annotated[
        list[MethodSpec],
        Field(min_length=1, max_length=200, description="full, lora, partial, a plan's name, or a mapping"),
    ]
    new: Annotated[list[StudyText], Field(max_length=50, description="texts to learn; or --new")] = []  # noqa: RUF012  # pydantic copies it
    original: Annotated[
        list[StudyText],
        Field(max_length=50, description="texts that must not be forgotten; default: text that the base writes"),
    ] = []  # noqa: RUF012
    replayed: Annotated[
        list[StudyText], Field(max_length=50, description="texts for `replay: {source: text}`; default: `original`")
    ] = []  # noqa: RUF012
    remedies: Annotated[
        list[Remedy],
        Field(
            min_length=1,
            max_length=20,
            description="remedies against forgetting; default: one, `recalled`: 10 % recalled text, with `preserve`",
        ),
    ] = [  # noqa: RUF012
        Remedy(name="recalled", replay=ReplaySpec(), preserve=PreserveSpec())
    ]
    rates: Annotated[Rates, Field(description="peak learning rates")] = [  # noqa: RUF012
        1e-4,
        3e-4,
        1e-3,
        3e-3,
    ]
    most_rates: Annotated[
        int, Field(ge=FEWEST_RATES, le=40, description="most rates of one method, those that surgeon adds included")
    ] = 8
    extend: Annotated[
        bool,
        Field(
            description="add rates while a method's best lies at an end; false: the rates as given, two or more, for"
            " remedies that are compared with each other at equal loss"
        ),
    ] = True
    seeds: Annotated[
        int,
        Field(
            ge=1,
            le=100,
            description="runs of each point, with other new weights and document orders; three make an interval",
        ),
    ] = 1
    steps: Annotated[int | None, Field(ge=1, description="optimizer steps of every run")] = None
    tokens: Annotated[int | None, Field(ge=1, description="tokens of every run, instead of steps")] = None
    bytes: Annotated[
        int | None,
        Field(
            ge=1,
            description="UTF-8 bytes of new text of every run, instead of steps; for methods whose tokenizers differ",
        ),
    ] = None
    batch: Annotated[int, Field(ge=1, description="sequences a step")] = 8
    length: Annotated[int, Field(ge=2, description="tokens a sequence")] = 256
    train: Annotated[TrainSettings, Field(description="how runs train, where a method has no own settings")] = (
        TrainSettings()
    )
    recall: Annotated[
        GenerateSpec | None, Field(description="how the base writes text; default: as much as runs use")
    ] = None
    documents: Annotated[int, Field(ge=1, description="held-out documents that losses are measured on, per text")] = 32
    choosing: Annotated[
        int,
        Field(
            ge=0,
            description="further held-out documents, per text: rates and the runs of a frontier are chosen by their"
            " losses, and those of `documents` are reported; 0: both by `documents`",
        ),
    ] = 0
    blend: Annotated[
        list[Annotated[float, Field(gt=0, lt=1)]],
        Field(
            max_length=9,
            description="shares α, such as [0.5, 0.75]: every run is also measured blended with what it began with"
            " (`surgeon blend`), and each method and remedy has a second frontier, of runs and blends",
        ),
    ] = []  # noqa: RUF012
    peers: Annotated[bool, Field(description="add full fine-tuning, LoRA and partial tuning where missing")] = True
    claims: Annotated[list[Claim], Field(max_length=500, description="papers' claims to judge")] = []  # noqa: RUF012

    @model_validator(mode="after")
    def _fits(self) -> Study:
        """Raise ValueError for repeated or unknown names, too few rates, wrong shares, and other than one budget."""
        if sum(given is not None for given in (self.steps, self.tokens, self.bytes)) != 1:
            raise ValueError("give one of `steps`, `tokens` and `bytes`: every run has the same")
        texts = [text.called for group in (self.new, self.original, self.replayed) for text in group]
        for what, names in (
            ("texts", texts),
            ("methods", [method.called for method in self.methods]),
            ("remedies", [remedy.name for remedy in self.remedies]),
        ):
            if doubled := first_doubled(names):
                raise ValueError(f"two {what} are called {doubled!r}; give one of them another `name:`")
        if self.extend:
            of_methods = [method.rates for method in self.methods]
            for rates in (self.rates, *of_methods, *(remedy.rates for remedy in self.remedies)):
                check_enough(rates)
        for group in (self.new, self.original, self.replayed):
            check_shares([text.share for text in group], of="the texts'")
        known = [remedy.name for remedy in self.remedies]
        for method in self.methods:
            for name in method.remedies or ():
                if name not in known:
                    raise ValueError(f"method {method.called}: no remedy `{name}`{did_you_mean(name, known)}")
        rows = {method.called for method in self.all_methods}
        rows |= {f"{method.called}/{remedy.name}" for method, remedy in self.entries}
        for claim in self.claims:
            for name in (claim.better, claim.worse):
                if name not in rows:
                    raise ValueError(f"claim {claim.says!r}: no method `{name}`{did_you_mean(name, sorted(rows))}")
        return self

    @property
    def all_methods(self) -> list[MethodSpec]:
        """All methods, full fine-tuning first, including the peers that the file left out."""
        there = {method.kind for method in self.methods}
        added = [MethodSpec.model_validate(spelled_out(kind)) for kind in PEERS if self.peers and kind not in there]
        order = {kind: number for number, kind in enumerate(PEERS)}
        return sorted([*self.methods, *added], key=lambda method: order.get(method.kind, len(PEERS)))

    @property
    def entries(self) -> list[tuple[MethodSpec, Remedy]]:
        """All pairs (method, one of its remedies); each pair has its own frontier."""
        return [
            (method, remedy)
            for method in self.all_methods
            for remedy in self.remedies
            if method.remedies is None or remedy.name in method.remedies
        ]

    def rates_of(self, method: MethodSpec, remedy: Remedy) -> list[float]:
        """Return the initial rates of a method with a remedy, ascending."""
        return sorted(remedy.rates or method.rates or self.rates)

    def seeds_of(self, method: MethodSpec) -> int:
        """Return the number of seeds of a method."""
        return method.seeds or self.seeds

    @property
    def run_steps(self) -> int | None:
        """Optimizer steps of every run; None where the budget is in bytes, and steps differ between runs."""
        if self.bytes is not None:
            return None
        return self.steps or math.ceil((self.tokens or 1) / (self.batch * self.length))

    @property
    def run_tokens(self) -> int | None:
        """Tokens of every run; None where the budget is in bytes."""
        return None if self.run_steps is None else self.run_steps * self.batch * self.length

    @property
    def budget(self) -> dict[str, int]:
        """The budget of every run, as shown in results: text, batch, length and seeds."""
        text = {"bytes": self.bytes or 0}
        if self.run_steps is not None and self.run_tokens is not None:
            text = {"steps": self.run_steps, "tokens": self.run_tokens}
        more = {"choosing": self.choosing} if self.choosing else {}
        return {**text, "batch": self.batch, "length": self.length, "seeds": self.seeds, **more}

    @property
    def budget_words(self) -> str:
        """The amount of text of a run, in words."""
        return f"{self.run_tokens:,} tokens" if self.bytes is None else f"{self.bytes:,} bytes of new text"

    @property
    def recalls(self) -> bool:
        """Whether the base has to write text."""
        return not self.original or self.replays("recall")

    def replays(self, source: Literal["text", "recall"]) -> bool:
        """Return whether a remedy replays given text (`text`), or text that the base writes (`recall`)."""
        replays = [remedy.replay for _, remedy in self.entries]
        return any(replay is not None and replay.source == source for replay in replays)


def spelled_out(method: str) -> dict[str, Any]:
    """Return the mapping for a method that the file gives only by name."""
    match method:
        case "full":
            return {"full": True}
        case "lora" | "partial":
            return {method: {}}
    return {"plan": method}
