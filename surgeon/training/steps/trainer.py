"""transformers' Trainer, thinly: our batches, our optimizer, loss by source, trackers, checkpoints of what trains.

A micro-batch has a share of the accumulated batch, over all processes: by labels, by original tokens, by others. Every
term of the loss is a mean over some tokens of the accumulated batch; a micro-batch adds its part of it. The runtime
scales the mean that a micro-batch finds by its share of the labels. That is right for means over all tokens; of a mean
over the tokens of some domains it would let a sequence count the more, the fewer of its domain come with it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from surgeon.data.packing import IGNORED_LABEL, Batches
from surgeon.errors import Diverged
from surgeon.training.config.settings import Settings
from surgeon.training.losses.cross_entropy import FusedHead
from surgeon.training.losses.fisher import Anchored
from surgeon.training.losses.held_out import figures_by_source
from surgeon.training.losses.preserving import NUMBERS, Preserving
from surgeon.training.processes.sharding import dealt_out, gathered
from surgeon.training.saved.checkpoints import Saving, best_step, complete, newest_checkpoint, step_of
from surgeon.training.steps.by_document import by_document
from surgeon.training.steps.cadence import FISHER, PRESERVE
from surgeon.training.steps.optimizer import make_optimizer, make_schedule
from surgeon.training.trainable.trainable_set import TrainedParameters, check_set

TRAINED_FILE = "trained.safetensors"
DATA_FILE = "data.json"
# In a batch: its share of the accumulated one.
_SHARE = "share"


@dataclass(frozen=True)
class Sequences:
    """Sequences that a model trains on, and held-out ones by source; `pad` fills up a batch of examples with labels."""

    batches: Batches[Any]
    validation: Mapping[str, Sequence[Any]]
    pad: int | None = None


@dataclass(frozen=True)
class Terms:
    """What computes the loss, and what is added to it.

    `fused`: the loss without logits. `preserving`: the base that teaches. `anchored`: what trains, with its values at
    birth. None: there is none.
    """

    fused: FusedHead | None = None
    preserving: Preserving | None = None
    anchored: Anchored | None = None


class SurgeonTrainer(transformers.Trainer):  # type: ignore[misc]  # transformers is not typed
    """Trains the parameters of a model whose requires_grad is set already."""

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        settings: Settings,
        parameters: TrainedParameters,
        sequences: Sequences,
        callbacks: Sequence[TrainerCallback],
        terms: Terms,
        keep_best: str | None = None,
        saving: Saving | None = None,
    ) -> None:
        """Take over what a run consists of.

        Args:
            model: the model, with requires_grad set.
            args: what transformers' Trainer is to do.
            settings: the run's numbers.
            parameters: what trains, and what else is published.
            sequences: what it trains on and is evaluated on.
            callbacks: called by transformers' Trainer.
            terms: what computes the loss, and what is added to it.
            keep_best: the source whose lowest held-out loss chooses the checkpoint that is published.
            saving: writes checkpoints; None: within the steps.
        """
        super().__init__(model=model, args=args, callbacks=list(callbacks))
        for callback in (transformers.PrinterCallback, transformers.trainer_callback.ProgressCallback):
            self.remove_callback(callback)
        self.optimizer: Any
        self.lr_scheduler: Any
        self.control: Any
        self.settings = settings
        self.parameters = parameters
        self.batches = sequences.batches
        self.validation = sequences.validation
        self.pad = sequences.pad
        self.terms = terms
        # Steps in which `preserve` had something to teach on, since the last line of the log.
        self.taught = 0
        # Seconds in which no step was made: evaluations and checkpoints.
        self.aside = 0.0
        self.keep_best = keep_best
        self.saving = saving or Saving(beside=False)
        if self.pad is not None:
            # Heads take the mean over a micro-batch, and these have all as many examples: Trainer takes their mean.
            self.model_accepts_loss_kwargs = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does; at the end, whatever ended it, no checkpoint is being written any more."""
        with self.saving:
            return super().train(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Our batches; nothing is fetched ahead of the step that trains on it."""
        return self.batches

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """AdamW over exactly the parameters that train: the last check before the first step."""
        if self.optimizer is None:
            whole = self.model if model is None else model
            # Of a parameter of which a part does not train nothing decays.
            decayed = set(self.get_decay_parameter_names(whole)) - self.parameters.fixed.keys()
            self.optimizer = make_optimizer(whole, self.settings, decayed=decayed)
            check_set(self.model, self.parameters.names, optimizer=self.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The settings' schedule."""
        if self.lr_scheduler is None:
            self.lr_scheduler = make_schedule(optimizer or self.optimizer, self.settings)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Make a step as Trainer does. Raises Diverged, before any update, where the loss is no finite number."""
        self.saving.check()
        with by_document():
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self.terms.anchored is not None and self.accelerator.sync_gradients:
            # The step's gradients are whole, and no micro-batch's.
            loss = loss + self.terms.anchored.pull()
        # Of all processes: one that stopped alone would leave the others waiting for it.
        total = loss.detach().to(torch.float32, copy=True)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(total)
        if not bool(torch.isfinite(total)):
            raise self._diverged("loss", float(total))
        return loss

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch micro-batches as Trainer does; each gets its share of what counts in all of them and all processes."""
        samples, items = super().get_batch_samples(*args, **kwargs)
        if self.pad is not None:
            return samples, items
        shares = shares_of(samples, self.terms.preserving, device=self.args.device, processes=self.args.world_size)
        for batch, share in zip(samples, shares, strict=True):
            batch[_SHARE] = share
        self.taught += bool(shares and shares[0].taught)
        return samples, items

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as Trainer does, with the fused head and the base that teaches, where there are any."""
        if self.pad is not None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        share: Share = inputs.pop(_SHARE)
        with contextlib.ExitStack() as stack:
            stack.enter_context(weighed(self.model, share))
            if self.terms.preserving is not None:
                stack.enter_context(self.terms.preserving.teaching(inputs, share.taught, anywhere=share.anywhere))
            inputs.pop(NUMBERS, None)
            if self.terms.fused is not None:
                stack.enter_context(self.terms.fused.armed())
            if not hasattr(self.model, "surgery"):
                # A native model knows no domains.
                inputs.pop("domain_ids")
            return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does, with the mean of what `preserve` adds."""
        if "loss" in logs and self.terms.anchored is not None:
            logs[FISHER] = self.terms.anchored.take()
        if "loss" in logs and self.terms.preserving is not None:
            found = self.terms.preserving.take().to(self.args.device)
            if self.args.world_size > 1:
                torch.distributed.all_reduce(found)
            if self.taught:
                logs[PRESERVE] = float(found) / self.taught
            self.taught = 0
        super().log(logs, *args, **kwargs)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = gathered(super()._get_grad_norm(model, grad_norm=grad_norm))
        if norm is not None and not bool(torch.isfinite(torch.as_tensor(norm))):
            raise self._diverged("gradient's norm", float(norm))
        return norm

    def _diverged(self, what: str, value: float) -> Diverged:
        self.saving.wait()
        kept = newest_checkpoint(Path(self.args.output_dir))
        where = f"the checkpoint of step {step_of(kept)} is kept" if kept else "there was no checkpoint yet"
        return Diverged(
            f"step {self.state.global_step + 1}: the {what} is {value}; nothing was updated by it, {where};"
            " lower `optimizer.lr` or look at the data"
        )

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return the mean loss of every source's held-out sequences, in nats a token, logged as `eval_NAME_loss`.

        A classification head's other figures come with it, as `eval_NAME_accuracy`.
        """
        with self._aside():
            found = figures_by_source(
                self.model,
                self.validation,
                micro_batch=self.settings.micro_batch,
                process=self.args.process_index,
                processes=self.args.world_size,
                pad=self.pad,
            )
        metrics = {f"eval_{name}_{key}": value for name, figures in found.items() for key, value in figures.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if self.keep_best is not None:
            # So that the best is always there, and not after the checkpoint that a run goes on from.
            better = best_step(self.state.log_history, self.keep_best) == self.state.global_step
            self.control.should_save = self.control.should_save or better
        return metrics

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        held = _tensors_of(self.model) if state_dict is None else state_dict
        if is_sharded(self.model) or self.args.should_save:
            # A sharded tensor is gathered by all processes.
            wanted = {name: held[name].detach() for name in self.parameters.published}
            tensors = {name: tensor.cpu().contiguous() for name, tensor in self._taken(wanted).items()}
            if self.args.should_save:
                folder.mkdir(parents=True, exist_ok=True)
                write, to = safetensors.torch.save_file, folder / TRAINED_FILE
                self.saving.add(lambda: write(tensors, to, metadata={"format": "pt"}))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # The same files, sharded or not: a run may go on with another number of processes.
        if is_sharded(self.model) or self.args.should_save:
            state = self._taken(self.optimizer.state_dict())
            if self.args.should_save:
                write, to = torch.save, Path(output_dir) / OPTIMIZER_NAME
                self.saving.add(lambda: write(state, to))
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _taken(self, state: Any) -> Any:
        """A nest of tensors as it is now, also when it is written beside the steps that follow."""
        return gathered(state, copy=self.saving.beside)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        tensors = safetensors.torch.load_file(Path(resume_from_checkpoint) / TRAINED_FILE)
        held = _tensors_of(model or self.model)
        with torch.no_grad():
            for name in self.parameters.published:
                held[name].copy_(dealt_out(tensors[name], held[name]))

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """The time inside is no step's."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.aside += time.perf_counter() - begun

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with self._aside():
            self._write_checkpoint(model, trial)

    def _write_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step = self.state.global_step
        self.saving.begin(last=step >= self.state.max_steps)
        super()._save_checkpoint(model, trial)
        if self.args.world_size > 1:
            torch.distributed.barrier()
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{step}"
            (folder / DATA_FILE).write_text(json.dumps(self.batches.mixture.state()), encoding="utf-8")
            best = None if self.keep_best is None else best_step(self.state.log_history, self.keep_best)
            self.saving.finish(lambda: complete(folder, step, best))


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and the buffers that fitted tensors are, by name."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


# Losses of the runtime that are means over the tokens of some domains: original text, or that of tasks.
_ORIGINAL, _TASKS = "local_l1_loss", "router_loss"


@dataclass(frozen=True)
class Share:
    """`factors`: by what the runtime's scale of a loss is to be multiplied, by the loss's name.

    `taught` is the number of tokens on which the base teaches in the whole accumulated batch; `anywhere`: some process
    has one in its micro-batch.
    """

    factors: Mapping[str, float]
    taught: int
    anywhere: bool


def shares_of(
    batches: Sequence[Mapping[str, Tensor]], preserving: Preserving | None, *, device: torch.device, processes: int
) -> list[Share]:
    """Return the shares of one process's micro-batches of one step; all processes call.

    Args:
        batches: the micro-batches.
        preserving: the base that teaches, if one does.
        device: where numbers of all processes are summed.
        processes: how many there are.
    """
    counts = torch.tensor([_counts(batch, preserving) for batch in batches], dtype=torch.int64, device=device)
    together = counts.clone()
    if processes > 1:
        torch.distributed.all_reduce(together)
    labels, original, tasks, taught = together.sum(dim=0).tolist()
    shares = []
    for (own_labels, own_original, own_tasks, _), (*_, anywhere) in zip(
        counts.tolist(), together.tolist(), strict=True
    ):
        by_labels = own_labels / labels
        factors = {
            name: own / whole / by_labels
            for name, own, whole in ((_ORIGINAL, own_original, original), (_TASKS, own_tasks, tasks))
            if whole
        }
        shares.append(Share(factors, taught, bool(anywhere)))
    return shares


def _counts(batch: Mapping[str, Tensor], preserving: Preserving | None) -> tuple[int, int, int, int]:
    """Count a micro-batch's labels, tokens of original text, tokens of tasks or new text, and tokens to teach on."""
    labels = int((batch["labels"][..., 1:] != IGNORED_LABEL).sum())
    original = int((batch["domain_ids"] == 0).sum()) * batch["input_ids"].shape[1]
    taught = 0 if preserving is None else int(preserving.counted(batch).sum())
    return labels, original, batch["input_ids"].numel() - original, taught


@contextlib.contextmanager
def weighed(model: Any, share: Share) -> Iterator[None]:
    """Inside, the model's layers weigh their losses by this micro-batch's share of the tokens that they are about."""
    with contextlib.ExitStack() as back:
        for layer in model.modules():
            weights = vars(layer).get("loss_weights")
            if isinstance(weights, dict) and (scaled := weights.keys() & share.factors.keys()):
                back.callback(setattr, layer, "loss_weights", weights)
                layer.loss_weights = weights | {name: weights[name] * share.factors[name] for name in scaled}
        yield


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
