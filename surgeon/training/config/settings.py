"""The numbers of a training run: values of its config, and the papers' values for keys that the config leaves out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from surgeon.common.json_results import plain_fields
from surgeon.common.schema import NEW, ORIGINAL
from surgeon.errors import bad_input, printable
from surgeon.operations import OPERATIONS
from surgeon.operations.operation import Schedule, TrainingDefaults
from surgeon.training.config.loading import LoadedConfig
from surgeon.training.config.schema import TrainConfig, originals_of

# Defaults for tensors that no operation made: all weights, or some layers.
FINETUNING = TrainingDefaults(
    "Neutral Residues, section 4.1 and Table 8, its finetuning and LoRA: 5e-5, betas 0.9 and 0.95, 64 sequences of"
    " 4096, p = 0.1; the rate is ours, for small runs",
    lr=1e-4,
    betas=(0.9, 0.95),
    original_share=0.1,
)
LORA = replace(FINETUNING, lr=1e-3)

# The sequences of a step and the tokens of a sequence where the config does not give them: small, so that a first run
# takes minutes and not days: a paper's 64 × 2048 tokens a step are for clusters.
_BATCH, _LENGTH = 8, 256
# The same for texts with labels: a batch counts texts, and a length cuts the texts that are longer.
_TEXTS, _LONGEST_TEXT = 32, 4096
# The most sequences at a time in one process where the config does not give `micro_batch`.
_MICRO_BATCH = 8


@dataclass(frozen=True)
class Settings:
    """The numbers of a training run. `batch` = `micro_batch` · `accumulation` · the number of processes."""

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
        """Return plain data."""
        return plain_fields(self)


def settle(
    loaded: LoadedConfig, operations: Sequence[str], *, context: object, processes: int, steps: int | None = None
) -> tuple[Settings, list[str]]:
    """Return (settings, notes about them) for a model whose config names `context` positions (None: no limit).

    `operations` are the operations whose tensors train; empty where the base's own tensors train, or a LoRA. `steps` is
    the count from the config's `epochs` or `bytes`; None: the config's `steps`, or where it has none a placeholder that
    is larger than any run.

    Raises BadInput where the config's numbers do not fit each other, the model or the processes.
    """
    config = loaded.config
    paper = LORA if config.lora is not None else _defaults_for(operations)
    given = config.optimizer
    steps = steps or config.steps or sys.maxsize
    wrong: list[str] = []
    length = _length(loaded, context, wrong)
    batch, micro_batch, accumulation = _batches(loaded, processes, wrong)
    lr, min_lr = _rates(loaded, paper, wrong)
    last = printable(operations[-1]) if operations else "finetuning"
    warmup_steps = _warmup_steps(loaded, paper, steps, wrong)
    if wrong:
        raise bad_input(wrong)
    decay = paper.weight_decay + paper.decay_of_rate * lr
    settings = Settings(
        steps=steps,
        seed=config.seed,
        batch=batch,
        micro_batch=micro_batch,
        accumulation=accumulation,
        length=length,
        lr=lr,
        min_lr=min_lr,
        schedule=given.schedule or paper.schedule,
        warmup_steps=warmup_steps,
        betas=(given.betas[0], given.betas[1]) if given.betas else paper.betas,
        weight_decay=decay if given.weight_decay is None else given.weight_decay,
        clip=paper.clip if given.clip is None else given.clip,
    )
    values = vars(settings) | {"warmup": warmup_steps}
    left = [key for key, value in (*given, ("batch", config.batch), ("length", config.length)) if value is None]
    notes = [f"defaults of {last}: {', '.join(f'{key} {values[key]}' for key in left)}"] if left else []
    if given.lr is None:
        notes[0] += f" ({paper.source})"
    return settings, notes + _about_original(config, paper, last)


def _length(loaded: LoadedConfig, context: object, wrong: list[str]) -> int:
    """Return the tokens of a sequence; add a line to `wrong` where the model's context is shorter."""
    most = context if isinstance(context, int) else sys.maxsize
    length = loaded.config.length or min(_LONGEST_TEXT if loaded.config.classifies else _LENGTH, most)
    if length > most:
        wrong.append(f"{loaded.where('length')}`length` is {length}, the model's context {most}; use {most} at most")
    return length


def _batches(loaded: LoadedConfig, processes: int, wrong: list[str]) -> tuple[int, int, int]:
    """Return (sequences a step, sequences at a time in a process, micro-batches a step); add misfits to `wrong`."""
    config = loaded.config
    batch = config.batch or (_TEXTS if config.classifies else _BATCH)
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
    return batch, micro_batch, share // micro_batch


def fitting_micro_batch(settings: Settings, most: int) -> Settings:
    """Return the settings with the largest divisor of `micro_batch` that is at most `most`, which is at least 1."""
    whole = settings.micro_batch
    micro_batch = max(number for number in range(1, min(most, whole) + 1) if whole % number == 0)
    return replace(settings, micro_batch=micro_batch, accumulation=settings.accumulation * (whole // micro_batch))


def _rates(loaded: LoadedConfig, paper: TrainingDefaults, wrong: list[str]) -> tuple[float, float]:
    """Return (peak learning rate, rate at the last step); add a line to `wrong` where the last rate is higher."""
    given = loaded.config.optimizer
    lr = paper.lr if given.lr is None else given.lr
    min_lr = min(paper.min_lr, lr) if given.min_lr is None else given.min_lr
    if min_lr > lr:
        wrong.append(
            f"{loaded.where('optimizer', 'min_lr')}`optimizer.min_lr` {min_lr:g} is above the peak {lr:g}; use {lr:g}"
            " at most"
        )
    return lr, min_lr


def _warmup_steps(loaded: LoadedConfig, paper: TrainingDefaults, steps: int, wrong: list[str]) -> int:
    """Return the steps of the warm-up; add a line to `wrong` where the config gives more than the run has."""
    given = loaded.config.optimizer.warmup
    warmup = paper.warmup if given is None else given
    warmup_steps = round(warmup * steps) if warmup < 1 else int(warmup)
    if given is not None and warmup_steps > steps:
        wrong.append(
            f"{loaded.where('optimizer', 'warmup')}`optimizer.warmup` is {warmup_steps} steps, the run only"
            f" {steps}; use fewer"
        )
    return warmup_steps


def _defaults_for(operations: Sequence[str]) -> TrainingDefaults:
    """Return the defaults of the last operation whose tensors train, or of finetuning without operations.

    For an operation that is unknown to this version, transformers' defaults are returned.
    """
    if not operations:
        return FINETUNING
    last = OPERATIONS.get(operations[-1])
    if last is None:
        return TrainingDefaults("no paper's but transformers', as the operation is unknown here", lr=5e-5)
    return last.training


def _about_original(config: TrainConfig, paper: TrainingDefaults, operation: str) -> list[str]:
    """Return a note where the paper of `operation` mixes in original text and this run draws none, else nothing."""
    originals = originals_of(config)
    share = sum(source.share for source in originals)
    # With several tasks, the earlier tasks take the place of original text.
    tasks = {source.role for source in config.sources if source.share and source.role not in (ORIGINAL, NEW)}
    if paper.original_share and not share and len(tasks) < 2:
        lack = "the share of original text is 0" if originals else "no source has the role `original`"
        return [f"{lack}; the paper of {operation} mixes in {paper.original_share:.0%} of what the base knows"]
    return []
