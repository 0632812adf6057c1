"""The schema of train.yaml, which configures a training run. It is strict: unknown keys are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from surgeon.common.schema import NEW, ORIGINAL, Entry, check_shares, first_doubled
from surgeon.data.specs import SourceSpec
from surgeon.manifest.trainable import LayersSpec
from surgeon.models.templates import TemplateName
from surgeon.training.backends import AttentionName, TrackerName

# The most labels of a classification head.
MOST_LABELS = 1000

# Values that several config formats share.
Packing = Literal["isolated", "joined"]
TrainingDtype = Literal["auto", "bfloat16", "float32"]
CrossEntropy = Literal["auto", "torch", "chunked"]

# Larger numbers are taken for typing errors.
MOST_STEPS, _MOST_EPOCHS, _MOST_SEQUENCES = 10**9, 10**6, 10**6


# Terms of `preserve`, and their default weights; fisher's values have another size than the others'.
PreserveLoss = Literal["kl", "fisher"]
_DEFAULT_WEIGHTS: dict[PreserveLoss, float] = {"kl": 1.0, "fisher": 100.0}
_FISHER_SEQUENCES = 64


class OptimizerSpec(Entry):
    """AdamW and its schedule. In a training config, keys left out have the operation's defaults."""

    lr: Annotated[float | None, Field(gt=0, description="peak learning rate")] = None
    min_lr: Annotated[
        float | None, Field(ge=0, description="learning rate at the last step of `cosine` and `linear`")
    ] = None
    schedule: Annotated[
        Literal["cosine", "linear", "constant"] | None,
        Field(description="course of the learning rate after the warm-up"),
    ] = None
    warmup: Annotated[
        float | None, Field(ge=0, description="warm-up steps; a value below 1 is a share of all steps")
    ] = None
    betas: Annotated[
        list[Annotated[float, Field(ge=0, lt=1)]] | None,
        Field(min_length=2, max_length=2, description="AdamW's β₁ and β₂, such as [0.9, 0.95]"),
    ] = None
    weight_decay: Annotated[float | None, Field(ge=0, description="AdamW's; norms and biases have none")] = None
    clip: Annotated[float | None, Field(ge=0, description="maximum gradient norm; 0: no limit")] = None


class TeacherSpec(Entry):
    """The teacher of `preserve`, where it is not the first base in memory."""

    surgery: Annotated[
        Literal["last"] | None,
        Field(description="last: the model before the last surgery; default where the first base is lost"),
    ] = None
    cached: Annotated[
        int | None,
        Field(
            ge=1,
            description="keep predictions on disk, computed before the first step: at each token the probabilities of"
            " so many likeliest next tokens, and the sum of all others",
        ),
    ] = None


class PreserveSpec(Entry):
    """Terms of the loss that keep the model near the base: its predictions, or the numbers that train."""

    teacher: Annotated[
        Literal["base"] | TeacherSpec | None,
        Field(
            description="base: the first base, as the model without its additions, or as a frozen copy where the base's"
            " own weights train; {surgery: last}: the model before the last surgery; {cached: 64}: predictions computed"
            " before the first step and kept on disk; default: base, or {surgery: last} where the base is lost"
        ),
    ] = None
    loss: Annotated[
        PreserveLoss | Annotated[list[PreserveLoss], Field(min_length=1)],
        Field(description="kl: KL(base ‖ model), of next tokens; fisher: EWC, without a teacher; or [kl, fisher]"),
    ] = "kl"
    on: Annotated[
        Literal["original", "all"],
        Field(
            description="where the base teaches: tokens of sources with `role: original`, or of all sources; fisher"
            " always reads the original ones"
        ),
    ] = "original"
    weight: Annotated[
        Annotated[float, Field(gt=0)] | dict[PreserveLoss, Annotated[float, Field(gt=0)]] | None,
        Field(
            description=f"factor of the term in the loss; of two terms by name, {{kl: 2, fisher: 10}}; default 1, of"
            f" fisher {_DEFAULT_WEIGHTS['fisher']:g}"
        ),
    ] = None
    sequences: Annotated[
        int | None,
        Field(
            ge=1,
            le=_MOST_SEQUENCES,
            description=f"of fisher: sequences of original text that it is estimated from; default {_FISHER_SEQUENCES}",
        ),
    ] = None
    temperature: Annotated[
        float, Field(gt=0, description="temperature τ of both distributions; the KL is multiplied by τ²")
    ] = 1.0

    @property
    def losses(self) -> list[PreserveLoss]:
        """The names of the terms."""
        return self.loss if isinstance(self.loss, list) else [self.loss]

    @property
    def taught(self) -> bool:
        """Whether a term compares the model with a teacher."""
        return "kl" in self.losses

    @property
    def fisher(self) -> int:
        """The most sequences from which the Fisher information is estimated; 0: fisher is not among the terms."""
        return (self.sequences or _FISHER_SEQUENCES) if "fisher" in self.losses else 0

    def weight_of(self, loss: PreserveLoss) -> float:
        """Return the weight of a term in the loss: the config's, else the term's default."""
        given = self.weight.get(loss) if isinstance(self.weight, dict) else self.weight
        return given or _DEFAULT_WEIGHTS[loss]

    @property
    def cached(self) -> int | None:
        """How many of the likeliest next tokens are recorded on disk per position; None: the base runs in training."""
        return self.teacher.cached if isinstance(self.teacher, TeacherSpec) else None

    @property
    def last(self) -> bool | None:
        """Whether the model before the last surgery teaches; None: only where the first base is lost."""
        if self.teacher == "base":
            return False
        return True if isinstance(self.teacher, TeacherSpec) and self.teacher.surgery else None

    @model_validator(mode="after")
    def _fits(self) -> PreserveSpec:
        """Raise ValueError for terms, weights and teacher options that do not fit each other."""
        if doubled := first_doubled(self.losses):
            raise ValueError(f"`loss` names {doubled} twice; give each term once")
        if isinstance(self.weight, dict):
            if absent := [name for name in self.weight if name not in self.losses]:
                raise ValueError(f"`weight` is given for {absent[0]}, which `loss` does not name; leave it out")
        elif self.weight is not None and len(self.losses) > 1:
            raise ValueError(
                f"`weight` {self.weight:g} is one number for two terms, whose sizes differ; give it by name, such as"
                f" {{{', '.join(f'{name}: {_DEFAULT_WEIGHTS[name]:g}' for name in self.losses)}}}"
            )
        unused = ("teacher", "temperature", "on") if not self.taught else () if self.fisher else ("sequences",)
        defaults = type(self).model_fields
        if given := [name for name in unused if getattr(self, name) != defaults[name].default]:
            why = "for a teacher, and fisher has none" if self.fisher else "for fisher, which `loss` does not name"
            raise ValueError(f"`{given[0]}` is {why}; leave it out")
        return self


class LoraSpec(Entry):
    """A LoRA over the frozen model, by PEFT (Hu et al., 2022): W + alpha / rank · B A, merged into RUN's weights."""

    rank: Annotated[int, Field(ge=1, le=4096, description="rank of B A")] = 16
    alpha: Annotated[float | None, Field(gt=0, description="B A is multiplied by alpha / rank; default 2 · rank")] = (
        None
    )
    dropout: Annotated[float, Field(ge=0, lt=1, description="dropout on A's input")] = 0.0
    dora: Annotated[
        bool, Field(description="DoRA (Liu et al., 2024): the lengths of the matrix's rows are learned apart")
    ] = False
    targets: Annotated[
        Literal["ffn", "attention", "all"] | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)],
        Field(description="linear modules of every layer: the FFN's, attention's, or all; or module names as in PEFT"),
    ] = "all"

    @property
    def scale(self) -> float:
        """The factor of the product B A."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank


class RunSettings(Entry):
    """Settings of each of several runs. Keys mean what they mean in a training config."""

    optimizer: Annotated[OptimizerSpec | None, Field(description="as in a training config")] = None
    micro_batch: Annotated[
        int | None, Field(ge=1, le=_MOST_SEQUENCES, description="sequences at a time in one process")
    ] = None
    packing: Annotated[
        Packing | None, Field(description="isolated: no attention across documents; joined: with it")
    ] = None
    dtype: Annotated[TrainingDtype | None, Field(description="dtype of the model in training")] = None
    attention: Annotated[AttentionName | None, Field(description="attention implementation")] = None
    checkpointing: Annotated[bool | None, Field(description="recompute activations, to save memory")] = None
    cross_entropy: Annotated[CrossEntropy | None, Field(description="as in a training config")] = None

    def given(self) -> dict[str, Any]:
        """Return the keys that were given, without the optimizer's, as plain data."""
        return self.model_dump(mode="json", exclude_none=True, exclude={"optimizer"})

    def given_optimizer(self) -> dict[str, Any]:
        """Return the optimizer's keys that were given, as plain data."""
        return {} if self.optimizer is None else self.optimizer.model_dump(mode="json", exclude_none=True)


class TrainConfig(Entry):
    """A training run."""

    surgeon_train: Annotated[Literal[1], Field(description="version of this format")]
    steps: Annotated[int | None, Field(ge=1, le=MOST_STEPS, description="optimizer steps")] = None
    epochs: Annotated[
        float | None,
        Field(
            gt=0, le=_MOST_EPOCHS, description="instead of `steps`: passes through the sources that are not original"
        ),
    ] = None
    bytes: Annotated[
        int | None,
        Field(ge=1, description="instead of `steps`: UTF-8 bytes of text from sources that are not original"),
    ] = None
    minutes: Annotated[
        float | None,
        Field(
            gt=0,
            le=_MOST_EPOCHS,
            description="instead of `steps`: wall minutes of all steps, by the speed that is measured before the first;"
            " decides `batch` and `length` too, where they are left out",
        ),
    ] = None
    sources: Annotated[list[SourceSpec], Field(min_length=1, max_length=100, description="texts to train on")]
    seed: Annotated[
        int, Field(ge=0, lt=2**32, description="seed of document order, dropout, LoRA, new heads and generated text")
    ] = 0
    what: Annotated[
        Literal["last", "added", "base", "all", "head"] | LayersSpec | list[int] | None,
        Field(
            description="what trains. last (default): new tensors of the last surgery; added: new tensors of all"
            " surgeries; [0, 2]: those of these operations of the last one; base: tensors that no surgery added; all:"
            " every tensor; {layers: …}: these layers, whole; head: the classification head alone (with labels, it"
            " always trains)"
        ),
    ] = None
    labels: Annotated[
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=2, max_length=MOST_LABELS)]
        | Annotated[int, Field(ge=2, le=MOST_LABELS)]
        | None,
        Field(
            description="label names in order, or how many labels there are, for an encoder without a classification"
            " head; default: the labels in the data"
        ),
    ] = None
    lora: Annotated[LoraSpec | None, Field(description="train a LoRA over the frozen model, instead of `what`")] = None
    recall_for_gate: Annotated[
        int,
        Field(
            ge=0,
            description="tokens that the model writes before a domain gate is fitted, which must keep the base's bits"
            " too, if no original source has `generate`; 0: none",
        ),
    ] = 2**15
    keep_for_gate: Annotated[
        list[str] | None,
        Field(
            description="languages that must keep the base's bits behind a domain gate, as codes (`de`); default: those"
            " of the original sources and of the base's own text"
        ),
    ] = None
    keep_base: Annotated[
        bool, Field(description="keep the old values of base tensors that train in RUN, for `surgeon revert`")
    ] = False
    batch: Annotated[
        int | None,
        Field(
            ge=1,
            le=_MOST_SEQUENCES,
            description="sequences a step, over all processes; default 8, of labels 32",
        ),
    ] = None
    micro_batch: Annotated[
        int | None,
        Field(
            ge=1,
            le=_MOST_SEQUENCES,
            description="sequences at a time in one process; default: up to 8, fewer where memory would not suffice",
        ),
    ] = None
    length: Annotated[
        int | None,
        Field(ge=2, description="tokens a sequence; default 256, of texts with labels at most 4096"),
    ] = None
    packing: Annotated[
        Packing,
        Field(description="isolated: no attention across documents in a sequence; joined: one text after the other"),
    ] = "isolated"
    chat_template: Annotated[
        TemplateName | None,
        Field(description="chat template for a base without one; written into RUN"),
    ] = None
    optimizer: Annotated[OptimizerSpec, Field(description="AdamW and its schedule")] = OptimizerSpec()
    preserve: Annotated[PreserveSpec | None, Field(description="keep the model near the base by terms of the loss")] = (
        None
    )
    dtype: Annotated[
        TrainingDtype,
        Field(
            description="dtype of the model in training; auto: the checkpoint's, but float32 for bfloat16 on a CPU"
            " without products of bfloat16"
        ),
    ] = "auto"
    attention: Annotated[
        AttentionName | None, Field(description="attention implementation; default: transformers' choice")
    ] = None
    checkpointing: Annotated[bool, Field(description="recompute activations in the backward pass, to save memory")] = (
        False
    )
    sharding: Annotated[
        Literal["none", "fsdp"],
        Field(description="of several processes; none: each has the whole model (DDP); fsdp: each has a share (FSDP2)"),
    ] = "none"
    cross_entropy: Annotated[
        CrossEntropy,
        Field(
            description="torch: all logits at once; chunked: some tokens at a time; auto: chunked where a micro-batch's"
            " logits would exceed 64 MiB, else torch"
        ),
    ] = "auto"
    save_every: Annotated[int, Field(ge=1, description="steps between checkpoints")] = 500
    evaluate_every: Annotated[int, Field(ge=1, description="steps between evaluations")] = 500
    validation_sequences: Annotated[
        int | None,
        Field(
            ge=1,
            description="most held-out sequences evaluated, per source; default: an eighth of the run's sequences, from"
            " 8 to 64",
        ),
    ] = None
    keep_best: Annotated[
        str | None,
        Field(description="publish the evaluated step with the lowest held-out loss on this source; default: the last"),
    ] = None
    answers: Annotated[
        str | None,
        Field(
            min_length=1,
            description="measure after training how much of its answers before it the model keeps: shipped (prompts of"
            " surgeon's), or a file of prompts; default: not measured",
        ),
    ] = None
    log_every: Annotated[int, Field(ge=1, description="steps between lines of the log")] = 10
    report_to: Annotated[
        list[TrackerName],
        Field(description="trackers that also get the log, by transformers' names: tensorboard, wandb, mlflow, …"),
    ] = []  # noqa: RUF012  # pydantic copies it

    @field_validator("what", mode="before")
    @classmethod
    def _former(cls, what: object) -> object:
        """Raise ValueError for values of `what` that earlier versions accepted."""
        if what in ("mtp", "draft_head"):
            raise ValueError(
                f"`what: {what}` is gone: train MTP layers with a trainer that runs them (Megatron-LM), and draft heads"
                " with vLLM's speculators"
            )
        return what

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        """Raise ValueError for keys that do not fit each other, or names that are given twice."""
        check_shares([source.share for source in self.sources])
        if doubled := first_doubled([source.name for source in self.sources]):
            raise ValueError(f"two sources are called {doubled!r}; names must differ")
        if sum(given is not None for given in (self.steps, self.epochs, self.bytes, self.minutes)) != 1:
            raise ValueError(
                "give `steps`, or `epochs`, `bytes` or `minutes` from which they are computed, and no two of them"
            )
        if self.keep_best is not None:
            self._check_keep_best(self.keep_best)
        for source in self.sources:
            if source.counted is False and not taught_alone(self, source, written=False):
                raise ValueError(
                    f"source {source.name!r} has `counted: false`, and no teacher of `preserve` teaches on it, so it"
                    " teaches nothing; leave `counted` out"
                )
        if self.lora is not None and self.what is not None:
            raise ValueError("`what` and `lora` exclude each other: under a LoRA the model is frozen; leave one out")
        if self.lora is not None and self.lora.dora and self.sharding != "none":
            raise ValueError("`lora.dora` measures whole rows, which `sharding` takes apart; leave one of them out")
        if self.classifies:
            self._check_classifies()
        elif self.labels is not None or self.what == "head":
            key = "`what: head`" if self.labels is None else "`labels`"
            raise ValueError(f"{key} is for texts with labels; give every source `kind: labels`, or leave it out")
        return self

    @property
    def counts_text(self) -> bool:
        """Return whether the number of steps is known only after counting the text or measuring the speed."""
        return self.steps is None

    @property
    def classifies(self) -> bool:
        """Return whether the run trains a classification head on texts with labels, and no language model."""
        return any(source.kind == "labels" for source in self.sources)

    def _check_classifies(self) -> None:
        """Raise ValueError for keys, and for other kinds of sources, that a run on texts with labels cannot have."""
        if other := next((source for source in self.sources if source.kind != "labels"), None):
            raise ValueError(
                f"source {other.name!r} is of the kind {other.kind or 'text'}, others have labels; one run trains"
                " one task: give every source `kind: labels`, or none"
            )
        if self.preserve is not None:
            raise ValueError("`preserve` holds next tokens to the base's, which texts with labels do not ask for")
        if self.answers is not None:
            raise ValueError("`answers` compares what a model writes, and with labels it writes nothing; leave it out")
        if self.bytes is not None:
            raise ValueError("`bytes` counts text that a language model predicts; with labels give `epochs` or `steps`")
        if isinstance(self.labels, list) and (doubled := first_doubled(self.labels)):
            raise ValueError(f"`labels` names {doubled!r} twice; names must differ")
        for key, given in (("sharding", self.sharding != "none"), ("cross_entropy", self.cross_entropy != "auto")):
            if given:
                raise ValueError(f"`{key}` is for language models; leave it out with `kind: labels`")

    def _check_keep_best(self, wanted: str) -> None:
        """Raise ValueError unless `wanted` names a source with held-out text."""
        held = {source.name: bool(source.validation) for source in self.sources}
        if not held.get(wanted):
            known = ", ".join(name for name, out in held.items() if out) or "none"
            raise ValueError(f"`keep_best` names {wanted!r}, no source that holds text out; those that do: {known}")

    def domain_of(self, source: SourceSpec) -> int:
        """Return a source's number in `domain_ids`: 0 original, 1 new; tasks count from 1, by their first source."""
        if source.role in (ORIGINAL, NEW):
            return int(source.role == NEW)
        tasks = list(dict.fromkeys(other.role for other in self.sources if other.role not in (ORIGINAL, NEW)))
        return 1 + tasks.index(source.role)


def taught_alone(config: TrainConfig, source: SourceSpec, *, written: bool) -> bool:
    """Return whether the base alone teaches on a source, and cross-entropy does not count its tokens.

    It does where the config says so, and on text that a model wrote (`written`), if `preserve` has a teacher for it.
    """
    preserve = config.preserve
    if preserve is None or not preserve.taught or (preserve.on == "original" and source.role != ORIGINAL):
        return False
    return written if source.counted is None else not source.counted


def originals_of(config: TrainConfig) -> list[SourceSpec]:
    """Return the sources with the role `original`, including those with a share of 0."""
    return [source for source in config.sources if source.role == ORIGINAL]
