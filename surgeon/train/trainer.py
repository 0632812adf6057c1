"""transformers' Trainer, thinly: our batches, our optimizer, loss by source, trackers, checkpoints of what trains.

The parameters that train are set on the model here, and checked before the first step.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import logging as transformers_logging

from surgeon.common.distributed import is_sharded
from surgeon.common.listener import Listener
from surgeon.data.judging import judge
from surgeon.data.packing import Batches, PackedSequence
from surgeon.data.scoring import score
from surgeon.errors import BadInput, SurgeonError, printable
from surgeon.manifest.trainable import Fixed, TrainableSet
from surgeon.train.by_document import by_document
from surgeon.train.checkpoints import best_step, complete, newest_checkpoint, step_of
from surgeon.train.config import Settings
from surgeon.train.cross_entropy import FusedHead
from surgeon.train.optimizer import make_optimizer, make_schedule
from surgeon.train.preserving import NUMBERS, Preserving
from surgeon.train.saving import Saving
from surgeon.train.sharding import dealt_out, gathered, let_go
from surgeon.train.shares import Share, shares_of, weighed
from surgeon.train.stored import StoredNames, WrongSet

TRAINED_FILE = "trained.safetensors"
DATA_FILE = "data.json"
# In a batch: its share of the accumulated one. In the log: what `preserve` adds to the loss, unweighted.
_SHARE = "share"
PRESERVE = "loss.preserve"


class Diverged(SurgeonError):
    """The loss or the gradient is no number any more."""

    exit_code = 2


class SurgeonTrainer(transformers.Trainer):  # type: ignore[misc]  # transformers is not typed
    """Trains `names` of a model whose requires_grad is set already."""

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        settings: Settings,
        names: Sequence[str],
        batches: Batches[Any],
        validation: Mapping[str, Sequence[Any]],
        callbacks: Sequence[TrainerCallback],
        fused: FusedHead | None = None,
        preserving: Preserving | None = None,
        held: Mapping[str, Fixed] | None = None,
        keep_best: str | None = None,
        fitted: Sequence[str] = (),
        pad: int | None = None,
        saving: Saving | None = None,
    ) -> None:
        super().__init__(model=model, args=args, callbacks=list(callbacks))
        for callback in (transformers.PrinterCallback, transformers.trainer_callback.ProgressCallback):
            self.remove_callback(callback)
        self.optimizer: Any
        self.lr_scheduler: Any
        self.control: Any
        self.settings = settings
        self.names = tuple(names)
        # Parameters that got their values before the first step, and are published with those that train.
        self.fitted = tuple(fitted)
        self.batches = batches
        self.validation = validation
        self.fused = fused
        self.preserving = preserving
        # Steps in which `preserve` had something to teach on, since the last line of the log.
        self.taught = 0
        # Seconds in which no step was made: evaluations and checkpoints.
        self.aside = 0.0
        # Parameters of which a part does not train: nothing decays of them either.
        self.held = dict(held or {})
        # The source whose lowest held-out loss says which checkpoint is published.
        self.keep_best = keep_best
        # Of a classification head: what fills a batch up.
        self.pad = pad
        self.saving = saving or Saving(beside=False)
        if pad is not None:
            # Heads take the mean over a micro-batch, and these have all as many examples: Trainer takes their mean.
            self.model_accepts_loss_kwargs = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; at its end, whatever ended it, no checkpoint is being written any more."""
        with self.saving:
            return super().train(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Our batches; nothing is fetched ahead of the step that trains on it."""
        return self.batches

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """AdamW over exactly the parameters that train: the last check before the first step."""
        if self.optimizer is None:
            whole = self.model if model is None else model
            decayed = set(self.get_decay_parameter_names(whole)) - self.held.keys()
            self.optimizer = make_optimizer(whole, self.settings, decayed=decayed)
            check_set(self.model, self.names, optimizer=self.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The settings' schedule."""
        if self.lr_scheduler is None:
            self.lr_scheduler = make_schedule(optimizer or self.optimizer, self.settings)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """As Trainer's; Diverged where the loss is no finite number, before anything is updated by it."""
        self.saving.check()
        with by_document():
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        # Of all processes: one that stopped alone would leave the others waiting for it.
        total = loss.detach().to(torch.float32, copy=True)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(total)
        if not bool(torch.isfinite(total)):
            raise self._diverged("loss", float(total))
        return loss

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; every micro-batch gets its share of what counts in all of them, over all processes."""
        samples, items = super().get_batch_samples(*args, **kwargs)
        if self.pad is not None:
            return samples, items
        shares = shares_of(samples, self.preserving, device=self.args.device, processes=self.args.world_size)
        for batch, share in zip(samples, shares, strict=True):
            batch[_SHARE] = share
        self.taught += bool(shares and shares[0].taught)
        return samples, items

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, with the fused head and the base that teaches, where there are any."""
        if self.pad is not None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        share: Share = inputs.pop(_SHARE)
        with contextlib.ExitStack() as stack:
            stack.enter_context(weighed(self.model, share))
            if self.preserving is not None:
                stack.enter_context(self.preserving.teaching(inputs, share.taught, anywhere=share.anywhere))
            inputs.pop(NUMBERS, None)
            if self.fused is not None:
                stack.enter_context(self.fused.armed())
            if not hasattr(self.model, "surgery"):
                # A native model knows no domains.
                inputs.pop("domain_ids")
            return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As Trainer's, with the mean of what `preserve` adds."""
        if "loss" in logs and self.preserving is not None:
            found = self.preserving.take().to(self.args.device)
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
        """Mean loss of every source's held-out sequences, in nats a token, logged as `eval_NAME_loss`.

        Of a classification head also its other figures, as `eval_NAME_accuracy`.
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
        held = dict(self.model.named_parameters()) if state_dict is None else state_dict
        if is_sharded(self.model) or self.args.should_save:
            # A sharded tensor is gathered by all processes.
            wanted = {name: held[name].detach() for name in (*self.names, *self.fitted)}
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
        parameters = dict((model or self.model).named_parameters())
        with torch.no_grad():
            for name in (*self.names, *self.fitted):
                parameters[name].copy_(dealt_out(tensors[name], parameters[name]))

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


class Cadence(TrainerCallback):  # type: ignore[misc]
    """Evaluates, and logs where it saves, so that a resumed run's log is an uninterrupted one's; shows both.

    Speed is in tokens a second, with `examples` in examples.

    `done` steps were made before; `listener` shows progress (None: another process does). The speed and the time that
    is left are taken from the steps since this call began, without those in which something was measured or saved.
    """

    def __init__(
        self,
        settings: Settings,
        evaluate_every: int,
        say: Callable[[str], None],
        listener: Listener | None,
        done: int,
        *,
        examples: bool = False,
    ) -> None:
        self.settings = settings
        self.evaluate_every = evaluate_every
        self.say = say
        self.listener = listener
        self.done = done
        self.examples = examples
        self._begun = 0.0
        self._steps = 0
        self._seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The step's clock begins."""
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """What is due after this step."""
        self._steps += 1
        self._seconds += time.perf_counter() - self._begun
        last = state.global_step >= state.max_steps
        control.should_evaluate = last or state.global_step % self.evaluate_every == 0
        control.should_log = control.should_log or control.should_save or control.should_evaluate or last
        if self.listener is not None:
            self.listener.advance(state.global_step - self.done)
        self.done = state.global_step
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Say what was logged."""
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            taught = f" ({logs[PRESERVE]:.4f} from the base)" if PRESERVE in logs else ""
            said = f"step {state.global_step}: loss {logs['loss']:.4f}{taught}, rate {logs['learning_rate']:.3g}"
            self.say(said + self._pace(state, logs))
        held = {key[5:-5]: value for key, value in logs.items() if key.startswith("eval_") and key.endswith("_loss")}
        if held:
            right = {name: logs.get(f"eval_{name}_accuracy") for name in held}
            shown = ", ".join(
                f"{name} {loss:.4f}" + ("" if right[name] is None else f" ({right[name]:.1%} right)")
                for name, loss in held.items()
            )
            self.say(f"step {state.global_step}: held-out loss {shown}")
            if self.listener is not None:
                self.listener.rename(f"training ({shown})")

    def _pace(self, state: Any, logs: dict[str, Any]) -> str:
        """The gradient's norm, tokens a second and the time that is left, where they are known."""
        found = f", gradient norm {float(logs['grad_norm']):.3g}" if logs.get("grad_norm") is not None else ""
        if not self._steps:
            return found
        step = self._seconds / self._steps
        made = self.settings.batch * (1 if self.examples else self.settings.length)
        unit = "examples" if self.examples else "tokens"
        left = datetime.timedelta(seconds=round(step * (state.max_steps - state.global_step)))
        return f"{found}, {made / step:,.0f} {unit}/s, {left} left"


def training_arguments(
    name: str, work: Path, settings: Settings, *, log_every: int, save_every: int, device: str
) -> TrainingArguments:
    """What transformers' Trainer is asked to do: the settings, with checkpoints in `work`."""
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


def losses_by_source(
    model: nn.Module,
    validation: Mapping[str, Sequence[PackedSequence]],
    *,
    micro_batch: int,
    process: int = 0,
    processes: int = 1,
) -> dict[str, float]:
    """Mean cross-entropy in nats of the labels that count, for each source (`evaluation.scores`)."""
    found = {
        name: score(model, sequences, micro_batch=micro_batch, process=process, processes=processes).loss
        for name, sequences in validation.items()
    }
    let_go(model)
    return found


def figures_by_source(
    model: nn.Module,
    validation: Mapping[str, Sequence[Any]],
    *,
    micro_batch: int,
    process: int = 0,
    processes: int = 1,
    pad: int | None,
) -> dict[str, dict[str, float]]:
    """Of each source `loss`, in nats, and of a classification head its other figures (`Judged`).

    `pad` fills a batch of examples up; None: the sequences are text.
    """
    if pad is None:
        losses = losses_by_source(model, validation, micro_batch=micro_batch, process=process, processes=processes)
        return {name: {"loss": loss} for name, loss in losses.items()}
    judged = {
        name: judge(model, held, pad=pad, micro_batch=micro_batch, process=process, processes=processes)
        for name, held in validation.items()
    }
    return {name: found.figures() for name, found in judged.items()}


def unfreeze(model: nn.Module, wanted: TrainableSet, *, base_names: Collection[str]) -> list[str]:
    """Let exactly the wanted parameters train; returns their names in the model, in its order.

    `wanted` are tensors on disk, `base_names` all that the checkpoint has. Raises WrongSet where the model has no such
    parameter, the checkpoint no such tensor, or a parameter is made of tensors that are not to train too.
    """
    absent = [name for name in wanted.names if name not in base_names and not _is_tied(model, name)]
    if absent:
        raise WrongSet(f"{printable(absent[0])}: to train, yet the checkpoint has no tensor of this name")
    stored = StoredNames(model, dict.fromkeys((*base_names, *wanted.names)))
    in_memory = stored.in_memory(wanted.names)
    names = {name for name, _ in model.named_parameters()}
    missing = [name for name in in_memory if name not in names and not _is_tied(model, name)]
    if missing:
        raise WrongSet(f"{printable(missing[0])}: to train, yet the loaded model has no parameter of this name")
    chosen = set(in_memory)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    check_set(model, in_memory)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def hold_fixed(model: nn.Module, wanted: TrainableSet, *, base_names: Collection[str]) -> dict[str, Fixed]:
    """Keep the gradient from what is fixed of parameters that train in part; what that is, by names in the model.

    Their gradient is zero from the beginning, so AdamW's moments are, and without weight decay an update of exactly
    zero leaves them as they are. Raises WrongSet where such a parameter is made of several tensors.
    """
    stored = StoredNames(model, dict.fromkeys((*base_names, *wanted.names))) if wanted.fixed else None
    held: dict[str, Fixed] = {}
    parameters = dict(model.named_parameters())
    for name in wanted.names:
        if stored is None or (fixed := wanted.fixed.get(name)) is None:
            continue
        targets = stored.in_memory([name])
        if len(targets) != 1:
            raise WrongSet(f"{printable(name)}: a part of it trains, yet it makes several parameters; nothing trained")
        # Of tied embeddings one name is the parameter's, the other only leads to it.
        if targets[0] in parameters and targets[0] not in held:
            held[targets[0]] = fixed
            parameters[targets[0]].register_hook(_without(fixed))  # type: ignore[no-untyped-call]
    return held


def _without(fixed: Fixed) -> Callable[[Tensor], Tensor]:
    """A hook that takes the gradient of what is fixed away, before it is added up, clipped or sent anywhere."""

    def hook(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        for begin, end in fixed.spans:
            gradient.narrow(fixed.axis, begin, end - begin).zero_()
        return gradient

    return hook


def check_set(model: nn.Module, wanted: Iterable[str], *, optimizer: Any = None) -> None:
    """Raise WrongSet unless the parameters that train, and those an optimizer holds, are exactly the wanted ones."""
    names = {name for name, _ in model.named_parameters()}
    expected = {name for name in wanted if name in names}
    training = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for odd, how in ((training - expected, "trains, and must not"), (expected - training, "is frozen, and must train")):
        if odd:
            more = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
            raise WrongSet(f"{printable(min(odd))}{more}: {how}; nothing was trained")
    if not training:
        raise WrongSet("nothing trains: the model has none of the parameters that were asked for")
    if optimizer is not None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        meant = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        if held != meant:
            raise WrongSet(
                f"the optimizer holds {len(held)} parameters, {len(meant)} are to train; nothing was trained"
            )


def _is_tied(model: nn.Module, name: str) -> bool:
    """Whether the tensor is another name of a parameter (a tied output embedding)."""
    return name in dict(model.named_parameters(remove_duplicate=False))


def open_trackers(names: Sequence[str], *, target: Path, config: str) -> list[TrainerCallback]:
    """The trackers' callbacks, by the names that transformers gives them; `config` is the file that asks for them.

    Raises BadInput for a name that transformers does not know, and for a library that is not installed; so does a
    tracker that cannot begin (no login, say).
    """
    opened = []
    for name in names:
        where = f"{printable(config)}: report_to: {printable(name)}"
        if name not in INTEGRATION_TO_CALLBACK:
            close = difflib.get_close_matches(name, INTEGRATION_TO_CALLBACK, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"it knows {', '.join(sorted(INTEGRATION_TO_CALLBACK))}"
            raise BadInput(f"{where}: no tracker that transformers knows; {hint}")
        try:
            callback = INTEGRATION_TO_CALLBACK[name]()
        except (RuntimeError, ImportError) as error:
            raise BadInput(f"{where}: {_line(error)}") from None
        if name == "tensorboard" and callback.logging_dir is None:
            # transformers' own place is in the work folder, which goes when the run is published.
            callback.logging_dir = str(target.with_name(f"{target.name}-tensorboard"))
        opened.append(_begun(callback, where))
    return opened


def _begun(callback: Any, where: str) -> TrainerCallback:
    """The callback, whose trouble at the start is the user's to mend and not a bug."""
    begin = callback.on_train_begin

    def on_train_begin(*arguments: Any, **named: Any) -> Any:
        try:
            return begin(*arguments, **named)
        except Exception as error:
            raise BadInput(f"{where}: cannot begin ({type(error).__name__}: {_line(error)})") from error

    callback.on_train_begin = on_train_begin
    return callback


def _line(error: Exception) -> str:
    return printable(" ".join(str(error).split()), 500)
