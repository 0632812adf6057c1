"""A thin subclass of transformers' Trainer: own batches, optimizer, loss by source, and checkpoints of what trains.

Every term of the loss is a mean over some tokens of the accumulated batch, over all processes, and each micro-batch
adds its part. The runtime scales a micro-batch's mean by the micro-batch's share of the labels. This is right for means
over all tokens, but wrong for a mean over the tokens of some domains: a sequence would count more where its micro-batch
has fewer tokens of its domain. So the trainer has such terms scaled by the share of those tokens instead (`weighed`).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import logging as transformers_logging

from surgeon.common.distributed import is_sharded
from surgeon.common.listener import Stopwatch
from surgeon.data.packing import ALONE, NUMBERS
from surgeon.errors import Diverged
from surgeon.training.loading import batches_of
from surgeon.training.losses.cross_entropy import FusedHead
from surgeon.training.processes.sharding import dealt_out, gathered, let_go
from surgeon.training.run import Run
from surgeon.training.saved.checkpoints import best_step, complete, newest_checkpoint, step_of
from surgeon.training.steps.by_document import by_document
from surgeon.training.steps.optimizer import make_optimizer, make_schedule
from surgeon.training.trainable.trainable_set import TrainedParameters, check_set

TRAINED_FILE = "trained.safetensors"
DATA_FILE = "data.json"
# Key of a batch: its factors for the losses of the runtime (`Objective.shares`).
_SHARE = "share"


@contextlib.contextmanager
def whole_loss(run: Run, model: nn.Module, batch: dict[str, Any], fused: FusedHead | None) -> Iterator[None]:
    """Make a forward on the step's next micro-batch return the whole loss, with the remedies' terms, in the context.

    Keys of `batch` that the model does not accept are removed. `fused` computes the loss without logits; None: the
    model itself computes it.
    """
    with contextlib.ExitStack() as stack:
        for remedy in run.remedies:
            stack.enter_context(remedy.loss(batch))
        for name in (NUMBERS, ALONE):
            batch.pop(name, None)
        if not hasattr(model, "surgery"):
            # A native model does not accept domains.
            batch.pop("domain_ids", None)
        if fused is not None:
            stack.enter_context(fused.armed())
        yield


class SurgeonTrainer(transformers.Trainer):  # type: ignore[misc]  # transformers is not typed
    """A trainer of the parameters of a model whose requires_grad is set."""

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        run: Run,
        parameters: TrainedParameters,
        callbacks: Sequence[TrainerCallback],
        fused: FusedHead | None,
    ) -> None:
        """Set up the trainer of a run.

        Args:
            model: the model, with requires_grad set.
            args: the arguments of transformers' Trainer.
            run: the run: its numbers, its texts and its remedies.
            parameters: the parameters that train, and others that are published.
            callbacks: callbacks for transformers' Trainer.
            fused: the head that computes the loss without logits; None: the model itself computes it.
        """
        super().__init__(model=model, args=args, callbacks=list(callbacks))
        for callback in (transformers.PrinterCallback, transformers.trainer_callback.ProgressCallback):
            self.remove_callback(callback)
        self.optimizer: Any
        self.lr_scheduler: Any
        self.control: Any
        self.run = run
        self.parameters = parameters
        self.fused = fused
        # Counts the time of evaluations and checkpoints, which is not time of steps.
        self.aside = Stopwatch()
        # The sum of the losses of a step's micro-batches.
        self._total = torch.zeros((), device=args.device)
        if not run.objective.packs:
            # A head's loss is the mean over a micro-batch. All micro-batches have equally many examples, so Trainer may
            # average their losses.
            self.model_accepts_loss_kwargs = False

    def get_train_dataloader(self) -> Any:
        """Return the batches; none is fetched before the step that trains on it."""
        return batches_of(self.run)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Make AdamW, unless it exists, and check that it has exactly the parameters that train: the last such check.

        Raises WrongSet where it has others.
        """
        if self.optimizer is None:
            whole = self.model if model is None else model
            # A parameter that trains only in part has no weight decay.
            decayed = set(self.get_decay_parameter_names(whole)) - self.parameters.fixed.keys()
            self.optimizer = make_optimizer(whole, self.run.settings, decayed=decayed)
            check_set(self.model, self.parameters.names, optimizer=self.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule of the run's settings."""
        if self.lr_scheduler is None:
            self.lr_scheduler = make_schedule(optimizer or self.optimizer, self.run.settings)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run a micro-batch as Trainer does, with the remedies' pull after the last one of a step."""
        with by_document():
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        # After the last micro-batch the gradients are those of the whole step.
        for remedy in self.run.remedies if self.accelerator.sync_gradients else ():
            if (pulled := remedy.pull()) is not None:
                loss = loss + pulled
        self._total += loss.detach().float()
        return loss

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch a step's micro-batches as Trainer does, and give each its factors (`Objective.shares`)."""
        samples, items = super().get_batch_samples(*args, **kwargs)
        for batch, share in zip(samples, self.run.objective.shares(samples, self.args.device), strict=True):
            batch[_SHARE] = share
        for remedy in self.run.remedies:
            remedy.step(samples)
        return samples, items

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as Trainer does, with the fused head and the remedies' terms, where there are any."""
        with weighed(self.model, inputs.pop(_SHARE)), whole_loss(self.run, self.model, inputs, self.fused):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does, and add the mean of each remedy's term."""
        for remedy in self.run.remedies if "loss" in logs else ():
            if remedy.logged is not None and (mean := remedy.take()) is not None:
                logs[remedy.logged[0]] = mean
        super().log(logs, *args, **kwargs)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the gradient's norm, gathered from all shards; it comes last before an update.

        Raises Diverged where it, or the step's loss, is not finite. Both are read at once: a device has to finish the
        step for it.
        """
        norm, total = gathered(super()._get_grad_norm(model, grad_norm=grad_norm)), self._total
        self._total = torch.zeros_like(total)
        # Summed over all processes, so that all stop together: if one stopped, the others would wait for it.
        if self.args.world_size > 1:
            torch.distributed.all_reduce(total)
        figures = {"loss": total} | ({} if norm is None else {"gradient's norm": torch.as_tensor(norm).to(total)})
        for what, value in zip(figures, torch.stack([*figures.values()]).tolist(), strict=True):
            if not math.isfinite(value):
                raise self._diverged(what, value)
        return norm

    def _diverged(self, what: str, value: float) -> Diverged:
        """Return the error for a value that is not finite."""
        kept = newest_checkpoint(Path(self.args.output_dir))
        where = f"the checkpoint of step {step_of(kept)} is kept" if kept else "there was no checkpoint yet"
        return Diverged(
            f"step {self.state.global_step + 1}: the {what} is {value}; nothing was updated by it, {where};"
            " lower `optimizer.lr` or look at the data"
        )

    def figures(self) -> dict[str, dict[str, float]]:
        """Return by source the figures of its held-out sequences (`Objective.judged`); all processes call this."""
        run = self.run
        found = {name: run.objective.judged(run, self.model, held) for name, held in run.data.validation.items()}
        let_go(self.model)
        return found

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measure and log the figures of every source's held-out sequences, as `eval_NAME_loss` and the like."""
        with self.aside.stage("evaluations"):
            found = self.figures()
        metrics = {f"eval_{name}_{key}": value for name, figures in found.items() for key, value in figures.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        # A step that is the best so far is saved at once, so that its checkpoint exists when the run is resumed.
        better = self._best_step() == self.state.global_step
        self.control.should_save = self.control.should_save or better
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the values of all published parameters to the checkpoint; all processes call this.

        transformers' own calls `_save` in every process, or in the first alone, by its version.
        """
        folder, held = Path(output_dir or self.args.output_dir), _tensors_of(self.model)
        if is_sharded(self.model) or self.args.should_save:
            # A sharded tensor is gathered by all processes.
            wanted = {name: held[name].detach() for name in self.parameters.published}
            tensors = {name: tensor.cpu().contiguous() for name, tensor in gathered(wanted).items()}
            if self.args.should_save:
                folder.mkdir(parents=True, exist_ok=True)
                safetensors.torch.save_file(tensors, folder / TRAINED_FILE, metadata={"format": "pt"})

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the states of optimizer and schedule; with sharded weights, all processes call this.

        Nothing is written after the last step: no step follows that would read them, and they are most of a checkpoint.
        """
        if self.state.global_step >= self.state.max_steps:
            return
        # The same files, sharded or not: a run may go on with another number of processes.
        if is_sharded(self.model) or self.args.should_save:
            state = gathered(self.optimizer.state_dict())
            if self.args.should_save:
                torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the values of all published parameters from a checkpoint; the rest keeps its values."""
        tensors = safetensors.torch.load_file(Path(resume_from_checkpoint) / TRAINED_FILE)
        held = _tensors_of(model or self.model)
        with torch.no_grad():
            for name in self.parameters.published:
                held[name].copy_(dealt_out(tensors[name], held[name]))

    def _best_step(self) -> int | None:
        """Return the step after which the loss on the source `keep_best` was lowest; None: the config names none."""
        source = self.run.loaded.config.keep_best
        return None if source is None else best_step(self.state.log_history, source)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint of this step; the first process adds the data's state and its digests."""
        step = self.state.global_step
        with self.aside.stage("checkpoints"):
            super()._save_checkpoint(model, trial)
            if self.args.world_size > 1:
                torch.distributed.barrier()
            if self.args.should_save:
                folder = Path(self.args.output_dir) / f"checkpoint-{step}"
                (folder / DATA_FILE).write_text(json.dumps(self.run.data.mixture.state()), encoding="utf-8")
                complete(folder, step, self._best_step())


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; fitted tensors are buffers."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


@contextlib.contextmanager
def weighed(model: Any, factors: Mapping[str, float]) -> Iterator[None]:
    """Multiply the loss weights of the model's layers within the context by `factors`, which has them by loss name."""
    with contextlib.ExitStack() as back:
        for layer in model.modules():
            weights = vars(layer).get("loss_weights")
            if isinstance(weights, dict) and (scaled := weights.keys() & factors.keys()):
                back.callback(setattr, layer, "loss_weights", weights)
                layer.loss_weights = weights | {name: weights[name] * factors[name] for name in scaled}
        yield


def training_arguments(run: Run) -> TrainingArguments:
    """Return the arguments of transformers' Trainer for a run; trackers show the run under its folder's name."""
    settings, config = run.settings, run.loaded.config
    transformers_logging.set_verbosity_error()
    args = TrainingArguments(
        run_name=run.to.name,
        output_dir=str(run.work),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.lr,
        max_grad_norm=settings.clip,
        logging_strategy="steps",
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=config.save_every,
        # `complete` removes old checkpoints, once the new one counts.
        save_total_limit=None,
        ignore_data_skip=True,
        # Trackers are passed as callbacks (`open_trackers`).
        report_to=[],
        disable_tqdm=True,
        seed=settings.seed,
        use_cpu=run.device == "cpu",
    )
    if args.device.type == "cuda":
        # One process trains on one device; use torchrun for several devices.
        args._n_gpu = 1
    return args
