"""A training run's settings: what the config says, and the papers' values for what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surgeon.common.plain import plain_fields
from surgeon.data.specs import NEW, ORIGINAL
from surgeon.errors import BadInput, printable
from surgeon.operations import OPERATIONS
from surgeon.operations.operation import Schedule, TrainingDefaults
from surgeon.train.config import LoadedConfig, TrainConfig

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
    loaded: LoadedConfig, operations: Sequence[str], *, context: int, processes: int
) -> tuple[Settings, list[str]]:
    """Settings for a model of `context` positions, and what is to be said about them.

    Raises BadInput where the config's numbers do not fit each other, the model or the processes.
    """
    config, paper = loaded.config, _defaults_for(operations)
    where = f"{loaded.source}: "
    length = config.length or min(paper.length, context)
    if length > context:
        raise BadInput(f"{where}`length` is {length}, the model's context {context}; use {context} at most")
    batch = config.batch or paper.batch
    if batch % processes:
        raise BadInput(f"{where}a batch of {batch} sequences is no multiple of the {processes} processes")
    share = batch // processes
    micro_batch = config.micro_batch or max(n for n in range(1, min(_MICRO_BATCH, share) + 1) if share % n == 0)
    if share % micro_batch:
        raise BadInput(
            f"{where}`micro_batch` {micro_batch} does not divide the {share} sequences a step of each process"
        )
    asked = config.optimizer
    lr = paper.lr if asked.lr is None else asked.lr
    min_lr = min(paper.min_lr, lr) if asked.min_lr is None else asked.min_lr
    if min_lr > lr:
        raise BadInput(f"{where}`optimizer.min_lr` {min_lr:g} is above the peak {lr:g}")
    warmup = paper.warmup if asked.warmup is None else asked.warmup
    warmup_steps = round(warmup * config.steps) if warmup < 1 else int(warmup)
    notes = [f"settings that the config leaves out are the paper's ({paper.source})"]
    if asked.warmup is None and warmup_steps >= config.steps:
        warmup_steps = config.steps // 10
        notes.append(f"the paper's warm-up is as long as this run; {warmup_steps} steps instead")
    elif warmup_steps > config.steps:
        raise BadInput(f"{where}`optimizer.warmup` is {warmup_steps} steps, the run only {config.steps}")
    notes += _about_original(config, paper)
    decay = paper.weight_decay + paper.decay_of_rate * lr
    return Settings(
        steps=config.steps,
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
    """Those of the last operation whose tensors train; of one that is unknown here, transformers'."""
    last = OPERATIONS.get(operations[-1])
    if last is None:
        return TrainingDefaults(f"transformers': the operation {printable(operations[-1])} is unknown here", lr=5e-5)
    return last.training


def _about_original(config: TrainConfig, paper: TrainingDefaults) -> list[str]:
    share = sum(source.share for source in config.sources if source.role == ORIGINAL)
    # Of several tasks the earlier ones are what is replayed.
    tasks = {source.role for source in config.sources if source.share and source.role not in (ORIGINAL, NEW)}
    if paper.original_share and not share and len(tasks) < 2:
        return [
            f"no source has the role `original`; the paper mixes in {paper.original_share:.0%} of what the base knows"
        ]
    return []
