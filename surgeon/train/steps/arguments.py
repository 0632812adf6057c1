"""The arguments of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainingArguments
from transformers.utils import logging as transformers_logging

from surgeon.train.config.settings import Settings


def training_arguments(
    name: str, work: Path, settings: Settings, *, log_every: int, save_every: int, device: str
) -> TrainingArguments:
    """Return the arguments of transformers' Trainer for the run's settings.

    Args:
        name: the run's, for trackers.
        work: the folder of checkpoints.
        settings: the run's numbers.
        log_every: steps between lines of the log.
        save_every: steps between checkpoints.
        device: where the model trains.
    """
    transformers_logging.set_verbosity_error()
    args = TrainingArguments(
        run_name=name,
        output_dir=str(work),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.lr,
        max_grad_norm=settings.clip,
        logging_strategy="steps",
        logging_steps=log_every,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=save_every,
        # `complete` lets go of old ones: only once the new one counts.
        save_total_limit=None,
        ignore_data_skip=True,
        # Trackers are callbacks that are given (`open_trackers`).
        report_to=[],
        disable_tqdm=True,
        seed=settings.seed,
        use_cpu=device == "cpu",
    )
    if args.device.type == "cuda":
        # One process trains on one device; several devices are for torchrun.
        args._n_gpu = 1
    return args
