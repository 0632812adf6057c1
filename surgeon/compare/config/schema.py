"""study.yaml: the schema of what is compared (methods, and remedies against forgetting), on what text, at which rates.

Strict: nothing unknown gets through, and what can be refused before the first run is.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from surgeon import GenerateSpec, LoraSpec, PreserveSpec, RunSettings
from surgeon.common.schema import Entry, check_shares, first_doubled
from surgeon.common.suggestions import did_you_mean

_NAME = r"^[A-Za-z0-9_.-]{1,60}$"

# Every comparison has these; what a study leaves out of them is added.
PEERS = ("full", "lora", "partial")
# A frontier has at least so many rates, and neighbours are about this far apart.
FEWEST_RATES = 4
_NEAREST, _FARTHEST = 1.5, 4.0


class StudyText(Entry):
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
    kind: Annotated[Literal["text", "chat"], Field(description="text, or chat: the assistant's words alone count")] = (
        "text"
    )
    field: Annotated[str | None, Field(description="key of the text or the messages")] = None
    validation: Annotated[
        float | str,
        Field(description="held-out text that losses are measured on: a share of the documents, or a file"),
    ] = 0.1

    @property
    def called(self) -> str:
        """Its name; by default the file's."""
        return self.name or re.sub(r"[^A-Za-z0-9_-]", "_", Path(self.path).name.partition(".")[0])[:60] or "text"

    @model_validator(mode="after")
    def _held_out(self) -> StudyText:
        if isinstance(self.validation, float) and not 0 < self.validation < 1:
            raise ValueError(
                "validation must be a share above 0 and below 1, or a file: losses are compared on held-out text"
            )
        return self


class ReplaySpec(Entry):
    """Text of what the base knows, mixed into training."""

    source: Annotated[
        Literal["text", "recall"],
        Field(description="text: `replayed`, or `original` without it; recall: text that the base writes"),
    ] = "recall"
    share: Annotated[
        float, Field(ge=0, lt=1, description="share of the training sequences; 0: the text is read for `fisher` alone")
    ] = 0.1


def _fair(rates: list[float]) -> list[float]:
    """The rates. Raises ValueError for those of which no fair frontier comes."""
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


def _check_enough(rates: list[float] | None) -> None:
    """Raise ValueError for fewer rates than a frontier needs."""
    if rates is not None and len(set(rates)) < FEWEST_RATES:
        several = f"{len(set(rates))} different rate{'s' if len(set(rates)) > 1 else ''}"
        raise ValueError(
            f"{several} given; a frontier needs at least {FEWEST_RATES}, each two or three times the one before,"
            " such as [1e-4, 3e-4, 1e-3, 3e-3]"
        )


Rates = Annotated[list[float], Field(min_length=1, max_length=40), AfterValidator(_fair)]


class Remedy(Entry):
    """A remedy against forgetting. Every method runs with every remedy."""

    name: Annotated[str, Field(pattern=_NAME, description="name in results")]
    replay: Annotated[ReplaySpec | None, Field(description="text mixed into training; default: none")] = None
    preserve: Annotated[PreserveSpec | None, Field(description="the base as teacher, as in a training config")] = None
    rates: Annotated[Rates | None, Field(description="rates instead of the method's")] = None
    sweep: Annotated[
        dict[str, Annotated[list[Any], Field(min_length=1)]] | None,
        Field(
            description="values for its keys, such as {replay.share: [0.1, 0.25], preserve.loss: [kl, [kl, fisher]]}:"
            " a remedy for each combination, named NAME-0.1-kl"
        ),
    ] = None

    @property
    def fisher(self) -> int:
        """How many sequences of original text it reads before the first step at most."""
        return 0 if self.preserve is None else self.preserve.fisher

    @model_validator(mode="after")
    def _has_what_it_teaches_on(self) -> Remedy:
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
        taught = self.preserve.taught is not None and self.preserve.on == "original"
        if taught and (self.replay is None or not self.replay.share):
            raise ValueError(
                f"remedy {self.name}: `preserve` teaches on original text, and nothing is replayed; add `replay: {{}}`,"
                " or `on: all`"
            )
        return self


class Partial(Entry):
    """Whole layers of the base that train; all else is frozen."""

    every: Annotated[int, Field(ge=1, le=1000, description="4: every fourth layer, counted from the bottom")] = 4


class TrainSettings(RunSettings):
    """How runs train. Keys mean what they mean in a training config, with its defaults.

    Of `optimizer`: a cosine to a tenth of the peak rate, 5 % warm-up, betas 0.9 and 0.95, no weight decay, clip 1.
    """

    @model_validator(mode="after")
    def _no_rate(self) -> TrainSettings:
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
        Field(
            min_length=1, description="shipped plan, plan file, or sweep (a method per point); its new tensors train"
        ),
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
        """`plan`, or which of PEERS."""
        return next(key for key in ("plan", *PEERS) if getattr(self, key) is not None)

    @property
    def called(self) -> str:
        """Its name in results."""
        if self.name is not None:
            return self.name
        if self.plan is None:
            return self.kind
        stem = self.plan.removesuffix(".yaml").removesuffix(".yml")
        return re.sub(r"[^A-Za-z0-9_.-]", "-", stem).strip("-")[-60:] or "plan"

    @property
    def words(self) -> str:
        """What people call it."""
        if self.label is not None:
            return self.label
        plain = {"full": "full fine-tuning", "lora": "LoRA", "partial": "partial tuning"}
        return plain.get(self.kind, self.called) if self.name is None else self.name


class Claim(Entry):
    """A comparison that a paper makes: `better` beats `worse`, both names of methods (or `METHOD/REMEDY`)."""

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
                _check_enough(rates)
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
        """All of them, full fine-tuning first, with the peers that the file left out."""
        there = {method.kind for method in self.methods}
        added = [_method(kind) for kind in PEERS if self.peers and kind not in there]
        order = {kind: number for number, kind in enumerate(PEERS)}
        return sorted([*self.methods, *added], key=lambda method: order.get(method.kind, len(PEERS)))

    @property
    def entries(self) -> list[tuple[MethodSpec, Remedy]]:
        """What has a frontier of its own: every method with each of its remedies."""
        return [
            (method, remedy)
            for method in self.all_methods
            for remedy in self.remedies
            if method.remedies is None or remedy.name in method.remedies
        ]

    def rates_of(self, method: MethodSpec, remedy: Remedy) -> list[float]:
        """The rates that an entry begins with, ascending."""
        return sorted(remedy.rates or method.rates or self.rates)

    def seeds_of(self, method: MethodSpec) -> int:
        """How many seeds a method runs with."""
        return method.seeds or self.seeds

    @property
    def run_steps(self) -> int | None:
        """Optimizer steps of every run; None where runs have so many bytes, and each its own steps."""
        if self.bytes is not None:
            return None
        return self.steps or math.ceil((self.tokens or 1) / (self.batch * self.length))

    @property
    def run_tokens(self) -> int | None:
        """Tokens of every run; None where each has its own."""
        return None if self.run_steps is None else self.run_steps * self.batch * self.length

    @property
    def budget(self) -> dict[str, int]:
        """What every run has."""
        text = {"bytes": self.bytes or 0}
        if self.run_steps is not None and self.run_tokens is not None:
            text = {"steps": self.run_steps, "tokens": self.run_tokens}
        more = {"choosing": self.choosing} if self.choosing else {}
        return {**text, "batch": self.batch, "length": self.length, "seeds": self.seeds, **more}

    @property
    def budget_words(self) -> str:
        """How much text a run has, in words."""
        return f"{self.run_tokens:,} tokens" if self.bytes is None else f"{self.bytes:,} bytes of new text"

    @property
    def recalls(self) -> bool:
        """Whether the base has to write text."""
        replays = [remedy.replay for _, remedy in self.entries]
        return not self.original or any(replay is not None and replay.source == "recall" for replay in replays)


def study_replays(study: Study) -> bool:
    """Whether a remedy replays text that is given."""
    replays = [remedy.replay for _, remedy in study.entries]
    return any(replay is not None and replay.source == "text" for replay in replays)


def _method(name: str) -> MethodSpec:
    """A method that is given by its name alone: a peer, or a plan."""
    return MethodSpec.model_validate(spelled_out(name))


def spelled_out(method: str) -> dict[str, Any]:
    """The entry of a method that is given by its name alone."""
    match method:
        case "full":
            return {"full": True}
        case "lora" | "partial":
            return {method: {}}
    return {"plan": method}
