"""train.yaml: what is asked of a training run, and the papers' values for what it leaves out.

A strict schema; nothing unknown gets through.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from surgeon.common.json_results import plain_fields
from surgeon.common.yaml import (
    Place,
    check_yaml,
    editor_schema,
    keys_by_section,
    override,
    parse_yaml,
    read_text,
    where,
)
from surgeon.data.specs import NEW, ORIGINAL, Entry, SourceSpec
from surgeon.errors import bad_input, printable
from surgeon.manifest.trainable import LayersSpec
from surgeon.models.templates import TemplateName
from surgeon.operations import OPERATIONS
from surgeon.operations.operation import Schedule, TrainingDefaults
from surgeon.train.backends import AttentionName, TrackerName

_WHAT = "training config"

# Of one classification head.
MOST_LABELS = 1000

# Shares are written with a few decimals: 0.333 three times is meant to be 1.
SHARE_TOLERANCE = 0.005

# Beyond these a number is a slip: no run of this kind has them.
_MOST_STEPS, _MOST_EPOCHS, _MOST_SEQUENCES = 10**9, 10**6, 10**6


class OptimizerSpec(Entry):
    """AdamW and its schedule; what is left out has the paper's value."""

    lr: Annotated[float | None, Field(gt=0, description="peak learning rate")] = None
    min_lr: Annotated[float | None, Field(ge=0, description="rate at the end of the cosine")] = None
    schedule: Annotated[Literal["cosine", "linear", "constant"] | None, Field(description="after the warm-up")] = None
    warmup: Annotated[float | None, Field(ge=0, description="steps, or below 1 a share of them")] = None
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]] | None, Field(min_length=2, max_length=2)] = None
    weight_decay: Annotated[float | None, Field(ge=0, description="AdamW's; not on norms and biases")] = None
    clip: Annotated[float | None, Field(ge=0, description="largest norm of the gradient; 0: no limit")] = None


class TeacherSpec(Entry):
    """Which model teaches, and whether what it says is read once, before the first step, and kept on disk."""

    surgery: Annotated[
        Literal["last"] | None,
        Field(
            description="last: the model as it stood when the last surgery began; default where the first base is lost"
        ),
    ] = None
    cached: Annotated[
        int | None,
        Field(ge=1, description="its so many likeliest tokens, and one bucket for all others, at each token"),
    ] = None


class PreserveSpec(Entry):
    """What holds the model to the base: a term of the loss, on tokens of its own domain."""

    teacher: Annotated[
        Literal["base"] | TeacherSpec | None,
        Field(
            description="base: the first base inside the model, grafts off, inserted layers passed over, or a frozen"
            " copy where its own weights train; {surgery: last}: the model as it stood when the last surgery began;"
            " {cached: 64}: what it said before the first step, kept on disk; default: the first base, or where that"
            " is lost {surgery: last}"
        ),
    ] = None
    loss: Annotated[
        Literal["kl", "reverse_kl", "hidden_mse"],
        Field(description="kl: KL(base ‖ model); reverse_kl: KL(model ‖ base); hidden_mse: of what the head reads"),
    ] = "kl"
    on: Annotated[
        Literal["original", "all"], Field(description="tokens of sources with the role original, or of all")
    ] = "original"
    weight: Annotated[float, Field(gt=0, description="of the mean over these tokens, in the loss")] = 1.0
    temperature: Annotated[
        float, Field(gt=0, description="both distributions are taken at this temperature τ, the KL times τ²")
    ] = 1.0

    @property
    def cached(self) -> int | None:
        """How many tokens are kept on disk of what the base says; None: it says it during training."""
        return self.teacher.cached if isinstance(self.teacher, TeacherSpec) else None

    @property
    def last(self) -> bool | None:
        """Whether the model that the last surgery began with teaches; None: where the first base is lost."""
        if self.teacher == "base":
            return False
        return True if isinstance(self.teacher, TeacherSpec) and self.teacher.surgery else None

    @model_validator(mode="after")
    def _fits(self) -> PreserveSpec:
        if self.cached is not None and self.loss == "hidden_mse":
            raise ValueError(
                "`hidden_mse` compares hidden states, and `teacher: {cached: …}` keeps probabilities; use kl or"
                " reverse_kl, or `teacher: base`"
            )
        return self


class LoraSpec(Entry):
    """A LoRA over the frozen model, by PEFT (Hu et al., 2022): W + alpha / rank · B A, merged into RUN's weights."""

    rank: Annotated[int, Field(ge=1, le=4096, description="of each product B A")] = 16
    alpha: Annotated[
        float | None, Field(gt=0, description="the product's factor is alpha / rank; default 2 · rank")
    ] = None
    dropout: Annotated[float, Field(ge=0, lt=1, description="on what A reads")] = 0.0
    targets: Annotated[
        Literal["ffn", "attention", "all"] | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)],
        Field(
            description="linear modules of every layer: the FFN's, attention's, both; or modules by name, as in PEFT"
        ),
    ] = "all"

    @property
    def scale(self) -> float:
        """The factor of the product B A."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank


class TrainConfig(Entry):
    """What a training run is to do."""

    surgeon_train: Annotated[Literal[1], Field(description="version of this format")]
    steps: Annotated[int | None, Field(ge=1, le=_MOST_STEPS, description="optimizer steps")] = None
    epochs: Annotated[
        float | None,
        Field(gt=0, le=_MOST_EPOCHS, description="instead of steps: passes through the sources that are not original"),
    ] = None
    bytes: Annotated[
        int | None,
        Field(ge=1, description="instead of steps: UTF-8 bytes of text from the sources that are not original"),
    ] = None
    sources: Annotated[list[SourceSpec], Field(min_length=1, max_length=100)]
    seed: Annotated[int, Field(ge=0, lt=2**32, description="of the order of documents and of dropout")] = 0
    what: Annotated[
        Literal["last", "added", "base", "all", "head"] | LayersSpec | list[int] | None,
        Field(
            description="last (default): new tensors of the last surgery; added: of all; [0, 2]: of these operations of"
            " the last one; base: the tensors that are not new; all: every tensor; {layers: …}: all of these layers;"
            " head: the classification head alone, which with labels trains beside all others too"
        ),
    ] = None
    labels: Annotated[
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=2, max_length=MOST_LABELS)]
        | Annotated[int, Field(ge=2, le=MOST_LABELS)]
        | None,
        Field(
            description="of an encoder without a classification head: names of the labels by their numbers, or how many"
            " there are; default: those of the data"
        ),
    ] = None
    lora: Annotated[LoraSpec | None, Field(description="a LoRA over the frozen model, instead of `what`")] = None
    keep_base: Annotated[
        bool, Field(description="keep the base's own values of what trains beside RUN's weights, for `surgeon revert`")
    ] = False
    batch: Annotated[
        int | None, Field(ge=1, le=_MOST_SEQUENCES, description="sequences a step, over all processes")
    ] = None
    micro_batch: Annotated[
        int | None, Field(ge=1, le=_MOST_SEQUENCES, description="sequences at a time in one process")
    ] = None
    length: Annotated[int | None, Field(ge=2, description="tokens a sequence")] = None
    packing: Annotated[
        Literal["isolated", "joined"],
        Field(description="isolated: no attention across documents in a sequence; joined: one text after the other"),
    ] = "isolated"
    chat_template: Annotated[
        TemplateName | None,
        Field(description="for a base without one: how sources of the kind `chat` are written; goes into the output"),
    ] = None
    optimizer: OptimizerSpec = OptimizerSpec()
    preserve: Annotated[
        PreserveSpec | None, Field(description="the base inside the model teaches it what it says to original text")
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        Field(description="of the model while it trains; auto: the checkpoint's"),
    ] = "auto"
    attention: Annotated[
        AttentionName | None, Field(description="attention implementation; default: transformers' choice")
    ] = None
    checkpointing: Annotated[bool, Field(description="recompute activations in the backward pass, to save memory")] = (
        False
    )
    sharding: Annotated[
        Literal["none", "fsdp"],
        Field(description="under torchrun; fsdp: each process holds a share of every tensor (FSDP2)"),
    ] = "none"
    cross_entropy: Annotated[
        Literal["auto", "torch", "chunked", "liger"],
        Field(description="torch: all logits at once; chunked: some tokens at a time; liger: liger-kernel's, on CUDA"),
    ] = "auto"
    save_every: Annotated[int, Field(ge=1, description="steps between checkpoints")] = 500
    saving: Annotated[
        Literal["auto", "beside", "in_step"],
        Field(
            description="beside: checkpoints are written while training goes on, from a copy in memory; auto: where the"
            " copy is no larger than the model"
        ),
    ] = "auto"
    evaluate_every: Annotated[int, Field(ge=1, description="steps between evaluations")] = 500
    validation_sequences: Annotated[int, Field(ge=1, description="at most, for each source")] = 64
    keep_best: Annotated[
        str | None,
        Field(description="publish the evaluated step whose held-out loss on this source is lowest; default: the last"),
    ] = None
    log_every: Annotated[int, Field(ge=1, description="steps between lines of the log")] = 10
    report_to: Annotated[
        list[TrackerName],
        Field(description="trackers that get the log too, as transformers names them: tensorboard, wandb, mlflow, …"),
    ] = []  # noqa: RUF012  # pydantic copies it

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        total = math.fsum(source.share for source in self.sources)
        if abs(total - 1) > SHARE_TOLERANCE:
            raise ValueError(f"the sources' shares sum to {total:g}; they must sum to 1")
        if doubled := first_doubled([source.name for source in self.sources]):
            raise ValueError(f"two sources are called {doubled!r}; names must differ")
        if sum(given is not None for given in (self.steps, self.epochs, self.bytes)) != 1:
            raise ValueError("give `steps`, or `epochs` or `bytes` from which they are computed, and no two of them")
        if self.keep_best is not None:
            self._check_keep_best(self.keep_best)
        if self.lora is not None and self.what is not None:
            raise ValueError("`what` and `lora` exclude each other: under a LoRA the model is frozen; leave one out")
        if self.classifies:
            self._check_classifies()
        elif self.labels is not None or self.what == "head":
            key = "`what: head`" if self.labels is None else "`labels`"
            raise ValueError(f"{key} is for texts with labels; give every source `kind: labels`, or leave it out")
        return self

    @property
    def counts_text(self) -> bool:
        """Whether the steps are known once the text was counted."""
        return self.steps is None

    @property
    def classifies(self) -> bool:
        """Whether texts with labels train a classification head, and not texts a language model."""
        return any(source.kind == "labels" for source in self.sources)

    def _check_classifies(self) -> None:
        if other := next((source for source in self.sources if source.kind != "labels"), None):
            raise ValueError(
                f"source {other.name!r} is of the kind {other.kind}, others have labels; one run trains one task: give"
                " every source `kind: labels`, or none"
            )
        if self.preserve is not None:
            raise ValueError("`preserve` holds next tokens to the base's, which texts with labels do not ask for")
        if self.bytes is not None:
            raise ValueError("`bytes` counts text that a language model predicts; with labels give `epochs` or `steps`")
        if isinstance(self.labels, list) and (doubled := first_doubled(self.labels)):
            raise ValueError(f"`labels` names {doubled!r} twice; names must differ")
        for key, given in (("sharding", self.sharding != "none"), ("cross_entropy", self.cross_entropy != "auto")):
            if given:
                raise ValueError(f"`{key}` is for language models; leave it out with `kind: labels`")

    def _check_keep_best(self, wanted: str) -> None:
        held = {source.name: bool(source.validation) for source in self.sources}
        if not held.get(wanted):
            known = ", ".join(name for name, out in held.items() if out) or "none"
            raise ValueError(f"`keep_best` names {wanted!r}, no source that holds text out; those that do: {known}")

    def domain_of(self, source: SourceSpec) -> int:
        """What `domain_ids` call a source: 0 original, 1 new; tasks count from 1 in order of their first source."""
        if source.role in (ORIGINAL, NEW):
            return int(source.role == NEW)
        tasks = list(dict.fromkeys(other.role for other in self.sources if other.role not in (ORIGINAL, NEW)))
        return 1 + tasks.index(source.role)


def first_doubled(names: Sequence[str]) -> str | None:
    """The first name that stands there twice."""
    return next((name for name in names if names.count(name) > 1), None)


@dataclass(frozen=True)
class LoadedConfig:
    """A config and the file it came from; relative paths in it start at the file's folder.

    `lines` are those of its keys, `given` the options that set some of them instead.
    """

    config: TrainConfig
    source: Path
    lines: Mapping[Place, int] = field(default_factory=dict)
    given: Mapping[Place, str] = field(default_factory=dict)

    def where(self, *place: str | int) -> str:
        """How an error about a key begins: the file and line, or the option that set it."""
        if not self.lines and place not in self.given:
            return f"{printable(str(self.source))}: "
        return where(place, self.lines, str(self.source), self.given)

    def resolve(self, path: str) -> Path:
        """A path that the config names."""
        return self.source.parent / path


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read and check a config file, with `overrides` (`optimizer.lr=1e-4`) in it; BadInput names file and line."""
    text = read_text(path, what=_WHAT)
    data, lines = parse_yaml(
        text, str(path), what=_WHAT, needs="`surgeon_train: 1`, `steps:` (or `epochs:`, or `bytes:`) and `sources:`"
    )
    known_keys = keys_by_section(
        TrainConfig,
        {
            "sources": SourceSpec,
            "optimizer": OptimizerSpec,
            "preserve": PreserveSpec,
            "teacher": TeacherSpec,
            "lora": LoraSpec,
            "what": LayersSpec,
        },
    )
    given = override(data, overrides, example="optimizer.lr=1e-4")
    config = check_yaml(TrainConfig, data, lines, str(path), what=_WHAT, known_keys=known_keys, given=given)
    return LoadedConfig(config, path, lines, given)


def json_schema() -> dict[str, Any]:
    """The JSON schema of training configs, for editors that complete YAML by it."""
    return editor_schema(TrainConfig, "surgeon training config")


# Of what no operation made: all weights, some layers, a LoRA.
FINETUNING = TrainingDefaults(
    "Neutral Residues, section 4.1 and Table 8, its finetuning and LoRA: 5e-5, betas 0.9 and 0.95, 64 sequences of"
    " 4096, p = 0.1",
    lr=5e-5,
    betas=(0.9, 0.95),
    length=4096,
    original_share=0.1,
)

# Sequences at a time where the config does not say.
_MICRO_BATCH = 8


@dataclass(frozen=True)
class Settings:
    """Everything that numbers depend on. `batch` = `micro_batch` · `accumulation` · `processes`."""

    steps: int
    seed: int
    batch: int
    micro_batch: int
    accumulation: int
    length: int
    lr: float
    min_lr: float
    schedule: Schedule
    warmup_steps: int
    betas: tuple[float, float]
    weight_decay: float
    clip: float

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return plain_fields(self)


def settle(
    loaded: LoadedConfig, operations: Sequence[str], *, context: object, processes: int, steps: int | None = None
) -> tuple[Settings, list[str]]:
    """Settings for a model whose config names `context` positions (None: no limit), and notes about them.

    `operations` are those whose tensors train; none where the base's own do, or a LoRA. `steps` are those of the
    config's `epochs` or `bytes`; None: not counted yet.

    Raises BadInput where the config's numbers do not fit each other, the model or the processes.
    """
    config, paper = loaded.config, _defaults_for(operations)
    steps = steps or config.steps or sys.maxsize
    wrong: list[str] = []
    if not isinstance(context, int):
        context = sys.maxsize
    length = config.length or min(paper.length, context)
    if length > context:
        wrong.append(
            f"{loaded.where('length')}`length` is {length}, the model's context {context}; use {context} at most"
        )
    batch = config.batch or paper.batch
    share = max(1, batch // processes)
    if batch % processes:
        wrong.append(
            f"{loaded.where('batch')}a batch of {batch} sequences is no multiple of the {processes} processes; change"
            " `batch`"
        )
    micro_batch = config.micro_batch or max(n for n in range(1, min(_MICRO_BATCH, share) + 1) if share % n == 0)
    if share % micro_batch and not batch % processes:
        wrong.append(
            f"{loaded.where('micro_batch')}`micro_batch` {micro_batch} does not divide the {share} sequences a step of"
            " each process; use a divisor, or leave it out"
        )
    asked = config.optimizer
    lr = paper.lr if asked.lr is None else asked.lr
    min_lr = min(paper.min_lr, lr) if asked.min_lr is None else asked.min_lr
    if min_lr > lr:
        wrong.append(
            f"{loaded.where('optimizer', 'min_lr')}`optimizer.min_lr` {min_lr:g} is above the peak {lr:g}; use {lr:g}"
            " at most"
        )
    warmup = paper.warmup if asked.warmup is None else asked.warmup
    warmup_steps = round(warmup * steps) if warmup < 1 else int(warmup)
    last = printable(operations[-1]) if operations else "finetuning"
    notes = [f"settings that the config leaves out are those of {last}: {paper.source}; this run's peak rate: {lr:g}"]
    if asked.warmup is None and warmup_steps >= steps:
        warmup_steps = steps // 10
        notes.append(
            f"the warm-up of {last}, {paper.warmup} steps, is as long as this run; it takes {warmup_steps} instead"
        )
    elif warmup_steps > steps:
        wrong.append(
            f"{loaded.where('optimizer', 'warmup')}`optimizer.warmup` is {warmup_steps} steps, the run only"
            f" {steps}; use fewer"
        )
    if wrong:
        raise bad_input(wrong)
    notes += _about_original(config, paper, last)
    decay = paper.weight_decay + paper.decay_of_rate * lr
    return Settings(
        steps=steps,
        seed=config.seed,
        batch=batch,
        micro_batch=micro_batch,
        accumulation=share // micro_batch,
        length=length,
        lr=lr,
        min_lr=min_lr,
        schedule=asked.schedule or paper.schedule,
        warmup_steps=warmup_steps,
        betas=(asked.betas[0], asked.betas[1]) if asked.betas else paper.betas,
        weight_decay=decay if asked.weight_decay is None else asked.weight_decay,
        clip=paper.clip if asked.clip is None else asked.clip,
    ), notes


def _defaults_for(operations: Sequence[str]) -> TrainingDefaults:
    """Those of the last operation whose tensors train (an unknown one: transformers'), of finetuning without any."""
    if not operations:
        return FINETUNING
    last = OPERATIONS.get(operations[-1])
    if last is None:
        return TrainingDefaults("no paper's but transformers', as the operation is unknown here", lr=5e-5)
    return last.training


def _about_original(config: TrainConfig, paper: TrainingDefaults, operation: str) -> list[str]:
    originals = originals_of(config)
    share = sum(source.share for source in originals)
    # Of several tasks the earlier ones are what is replayed.
    tasks = {source.role for source in config.sources if source.share and source.role not in (ORIGINAL, NEW)}
    if paper.original_share and not share and len(tasks) < 2:
        lack = "the share of original text is 0" if originals else "no source has the role `original`"
        return [f"{lack}; the paper of {operation} mixes in {paper.original_share:.0%} of what the base knows"]
    return []


def originals_of(config: TrainConfig) -> list[SourceSpec]:
    """The sources of what the base knows, those with a share of 0 too."""
    return [source for source in config.sources if source.role == ORIGINAL]
