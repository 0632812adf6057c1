"""One training run, from the output's folder to the published one; the same call continues what a kill cut off."""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from surgeon._version import __version__
from surgeon.apply.write import execute
from surgeon.checkpoint.durable import working_in, write_durably
from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.checkpoint.staging import check_destination, check_space
from surgeon.common import devices
from surgeon.common.distributed import Processes
from surgeon.common.listener import Listener
from surgeon.common.timing import Stopwatch
from surgeon.data.documents import Corpus
from surgeon.data.encoding import Encoder
from surgeon.data.packing import Batches, Mixture, PackedSequence, Packer, SourceStream, held_out, split
from surgeon.data.sources import open_source
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import dissect
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, held_by
from surgeon.manifest.trainable import TrainableSet, trainable_set
from surgeon.models.load import load_model
from surgeon.train.config import LoadedConfig
from surgeon.train.cross_entropy import FusedHead, choose
from surgeon.train.publishing import Change, publishing_job, write_final
from surgeon.train.settings import Settings, settle
from surgeon.train.sharding import Sharding, let_go, shard, sharded_here, sharding_asked
from surgeon.train.trackers import open_trackers
from surgeon.train.trainable import unfreeze
from surgeon.train.trainer import (
    DATA_FILE,
    TRAINED_FILE,
    Cadence,
    SurgeonTrainer,
    drop_torn_checkpoints,
    losses_by_source,
    newest_checkpoint,
    step_of,
)

RUN_FILE = "run.json"


@dataclass
class Finished:
    """What a run did. `losses` maps sources to their held-out losses at the start and at the end, in nats a token.

    `log` are Trainer's entries; `tokens_per_second` and `seconds` are of the steps that this call made (None: none).
    """

    manifest: Manifest | None
    wanted: TrainableSet
    settings: Settings
    changes: dict[str, Change]
    losses: dict[str, list[float]]
    parameters: int
    tokens: int
    log: list[dict[str, Any]] = field(default_factory=list)
    resumed_at: int = 0
    seconds: float = 0.0
    tokens_per_second: float | None = None
    peak_memory: int = 0


# In the work folder: the published run, where what is asked for is only made of it.
WHOLE_FOLDER = "whole"


def work_folder(target: Path) -> Path:
    """Where checkpoints lie until the run is published: beside it, `.NAME.training`."""
    return target.with_name(f".{target.name}.training")


def run_training(
    out: CheckpointFolder,
    manifest: Manifest,
    loaded: LoadedConfig,
    target: Path,
    *,
    device: str,
    trust_remote_code: bool,
    listener: Listener,
    deliver: Callable[[Path], object] | None = None,
) -> Finished:
    """Train `out` by the config and publish it as `target`. Raises BadInput, WrongSet, Diverged, PromiseBroken.

    With `deliver` the run is published in the work folder instead, and `deliver` makes `target` of that.
    """
    processes = Processes.of_environment()
    config = loaded.config
    sharding = sharding_asked(config)
    if device.startswith("cuda:"):
        raise BadInput(f"--device {printable(device)}: training takes auto, cpu or cuda; CUDA_VISIBLE_DEVICES chooses")
    device = devices.resolve(device)
    wanted = trainable_set(out, manifest, config.what)
    anatomy = dissect(out.config, out.tensors)
    if anatomy.family.encoder:
        raise BadInput(
            f"{printable(str(out.path))}: an encoder ({anatomy.family.model_type}); `surgeon train` trains causal"
            " language models; train it on your task with transformers' Trainer after `model.freeze_base()`"
        )
    context = out.config.get("max_position_embeddings")
    settings, notes = settle(
        loaded,
        wanted.operations,
        context=context if isinstance(context, int) else sys.maxsize,
        processes=processes.size,
    )
    _check_narrow(out, wanted, config.dtype)
    check_destination(target, out.path)
    trackers = open_trackers(config.report_to, target=target, config=str(loaded.source))
    work = work_folder(target)
    say = listener.say if processes.leads else _silent
    encoder = Encoder(out.path, vocabulary=anatomy.sizes.vocabulary)
    data = _Data.open(loaded, settings, encoder, say)
    held = _check_as_left(out, manifest, listener)
    fingerprint = _fingerprint(loaded, settings, held, data)
    with _held(work, target, fingerprint, leads=processes.leads):
        for note in (*out.notes, *notes, *data.notes):
            say(note)
        for step in drop_torn_checkpoints(work) if processes.leads else ():
            say(f"the checkpoint of step {step} was cut off while it was written, and is dropped")
        if sharding is not None and processes.size == 1:
            say("one process: nothing is sharded")
            sharding = None
        run = _Run(
            out=out,
            loaded=loaded,
            settings=settings,
            wanted=wanted,
            data=data,
            target=target,
            device=device,
            processes=processes,
            sharding=sharding,
            trackers=trackers,
            trust_remote_code=trust_remote_code,
            listener=listener,
            say=say,
        )
        with sharded_here():
            finished = _train(run)
        if processes.leads:
            whole = work / WHOLE_FOLDER if deliver else target
            if deliver and whole.exists():
                # Of a run that was cut off between the two.
                shutil.rmtree(whole)
            _publish(finished, run, manifest, whole, held)
            if deliver:
                deliver(whole)
    if processes.leads:
        shutil.rmtree(work)
    return finished


@dataclass(frozen=True)
class _Run:
    """What a run is of: settled, checked, and with its data opened."""

    out: CheckpointFolder
    loaded: LoadedConfig
    settings: Settings
    wanted: TrainableSet
    data: _Data
    target: Path
    device: str
    processes: Processes
    sharding: Sharding | None
    trackers: Sequence[TrainerCallback]
    trust_remote_code: bool
    listener: Listener
    say: Callable[[str], None]

    @property
    def work(self) -> Path:
        """Where checkpoints lie until the run is published."""
        return work_folder(self.target)


def _train(run: _Run) -> Finished:
    config, settings, processes, say, work = run.loaded.config, run.settings, run.processes, run.say, run.work
    args = _arguments(run)
    model = load_model(
        run.out.path,
        dtype=config.dtype,
        attention=config.attention,
        # Only code that is byte for byte what this version ships runs unasked; anything else was refused at opening.
        trust_remote_code=run.trust_remote_code or run.out.code == "shipped",
    )
    names = unfreeze(model, run.wanted, base_names=run.out.tensors)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(f"trains {len(names)} tensors, {parameters:,} numbers: {', '.join(dict.fromkeys(run.wanted.operations))}")
    for name in names:
        # Loaded weights may be mapped from the file.
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.clone()
    model.config.use_cache = False
    if config.checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if run.sharding is not None:
        shard(model, run.sharding, device=args.device)
        say(f"sharded over {processes.size} processes (FSDP2)")
    say(f"documents packed {_packed(config.packing, model)}, {settings.length} tokens a sequence")
    batches = Batches(
        run.data.mixture,
        micro_batch=settings.micro_batch,
        process=processes.rank,
        processes=processes.size,
        domains=hasattr(model, "surgery"),
    )
    checkpoint = newest_checkpoint(work)
    done = step_of(checkpoint) if checkpoint else 0
    if processes.leads:
        run.listener.begin("training", settings.steps, "steps")
        run.listener.advance(done)
    log = _Log(say, run.listener if processes.leads else None, done)
    cadence = Cadence(evaluate_every=config.evaluate_every, on_step=log.step, on_log=log.entry)
    fused = _fused(config.cross_entropy, model, settings, run.device, say)
    trainer = SurgeonTrainer(
        model,
        args,
        settings=settings,
        names=names,
        batches=batches,
        validation=run.data.validation,
        callbacks=[cadence, *run.trackers],
        fused=fused,
    )
    if fused is not None:
        drawn = torch.Generator().manual_seed(0)
        fused.check(torch.randint(model.config.vocab_size, (1, settings.length), generator=drawn))
        let_go(model)
    first = _first_losses(trainer, work, processes, say)
    begun = time.perf_counter()
    if checkpoint is not None:
        say(f"continuing from the checkpoint of step {done}")
        batches.mixture.restore(json.loads((checkpoint / DATA_FILE).read_text(encoding="utf-8")))
    if done < settings.steps:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        history = trainer.state.log_history
    else:
        history = json.loads((work / f"checkpoint-{done}" / "trainer_state.json").read_text())["log_history"]
    seconds = time.perf_counter() - begun
    made = (settings.steps - done) * settings.batch * settings.length
    return Finished(
        manifest=None,
        wanted=run.wanted,
        settings=settings,
        changes={},
        losses={name: [loss, _last(history, name)] for name, loss in first.items()},
        parameters=parameters,
        tokens=settings.steps * settings.batch * settings.length,
        log=history,
        resumed_at=done,
        seconds=seconds,
        tokens_per_second=made / seconds if made else None,
        peak_memory=_peak_memory(run.device),
    )


def _publish(finished: Finished, run: _Run, manifest: Manifest, target: Path, held: dict[str, str]) -> None:
    last = newest_checkpoint(run.work)
    assert last is not None
    finished.changes = write_final(run.out, last / TRAINED_FILE, run.work)
    config = run.loaded.config.model_dump(mode="json")
    for source in config["sources"]:
        source["revision"] = run.data.commits.get(source["name"])
    entry = {
        "config": config,
        "settings": finished.settings.to_json(),
        "steps": finished.settings.steps,
        "tokens": finished.tokens,
        "losses": finished.losses,
    }
    job = publishing_job(
        run.out, manifest, run.work, source=str(run.loaded.source), held=held, changes=finished.changes, entry=entry
    )
    check_space(target, job.bytes_to_write, fingerprint=job.fingerprint)
    finished.manifest = execute(job, target, run.listener, Stopwatch())


@dataclass
class _Data:
    """The sources, opened: what to train on and what is held out."""

    mixture: Mixture
    validation: dict[str, list[PackedSequence]]
    documents: list[Corpus]
    notes: list[str]
    # Of sources on the Hub, by name.
    commits: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, loaded: LoadedConfig, settings: Settings, encoder: Encoder, say: Any) -> _Data:
        config = loaded.config
        if any(source.kind == "chat" for source in config.sources):
            encoder.check_chat()
        streams: list[SourceStream] = []
        found = cls(Mixture([], [], seed=0), {}, [], [])
        for source in config.sources:
            if source.repo_id is not None:
                say(f"source {source.name}: fetching {printable(source.path)}, or finding it in the cache")
            opened = open_source(source, loaded)
            documents = opened.text
            found.documents += [documents] if opened.held_out is None else [documents, opened.held_out]
            if opened.commit is not None:
                found.commits[source.name] = opened.commit
                found.notes.append(f"source {source.name}: {printable(source.path)} at commit {opened.commit}")
            share = source.validation if isinstance(source.validation, float) else 0.0
            kept, held = split(documents, share, name=source.name)
            packer = Packer(settings.length, config.packing, config.domain_of(source))
            streams.append(SourceStream(source.name, documents, kept, encoder, packer, seed=config.seed))
            if documents.blank:
                found.notes.append(f"source {source.name}: {documents.blank} blank documents are left out")
            aside = Packer(settings.length, config.packing, config.domain_of(source))
            if opened.held_out is not None:
                others = opened.held_out
                sequences = held_out(others, range(len(others)), encoder, aside, most=config.validation_sequences)
            else:
                sequences = held_out(documents, list(held), encoder, aside, most=config.validation_sequences)
            if sequences:
                found.validation[source.name] = sequences
            elif source.validation:
                raise BadInput(
                    f"{printable(str(loaded.source))}: what source {source.name} holds out gives not two tokens"
                )
        found.mixture = Mixture(streams, [source.share for source in config.sources], seed=config.seed)
        return found


class _Log:
    """Tells progress and what was logged."""

    def __init__(self, say: Any, listener: Listener | None, done: int) -> None:
        self.say = say
        self.listener = listener
        self.done = done

    def step(self, number: int) -> None:
        """Step `number` is done."""
        if self.listener is not None:
            self.listener.advance(number - self.done)
        self.done = number

    def entry(self, entry: dict[str, Any]) -> None:
        """One entry of the log."""
        if "loss" in entry:
            self.say(f"step {entry['step']}: loss {entry['loss']:.4f}, rate {entry['learning_rate']:.3g}")
        held = {key[5:-5]: value for key, value in entry.items() if key.startswith("eval_") and key.endswith("_loss")}
        if held:
            told = ", ".join(f"{name} {loss:.4f}" for name, loss in held.items())
            self.say(f"step {entry['step']}: held-out loss {told}")
            if self.listener is not None:
                self.listener.rename(f"training ({told})")


def _arguments(run: _Run) -> TrainingArguments:
    config, settings = run.loaded.config, run.settings
    transformers_logging.set_verbosity_error()
    args = TrainingArguments(
        run_name=run.target.name,
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
        save_total_limit=2,
        ignore_data_skip=True,
        # Trackers are callbacks that are given (`open_trackers`).
        report_to=[],
        disable_tqdm=True,
        seed=settings.seed,
        use_cpu=run.device == "cpu",
    )
    if args.device.type == "cuda":
        # One process trains on one device; several devices are for torchrun.
        args._n_gpu = 1
    return args


def _first_losses(trainer: SurgeonTrainer, work: Path, processes: Processes, say: Any) -> dict[str, float]:
    """Held-out losses before the first step; of a run that is continued, as they were then."""
    kept = json.loads((work / RUN_FILE).read_text(encoding="utf-8")) if (work / RUN_FILE).is_file() else {}
    if "first" in kept:
        found: dict[str, float] = kept["first"]
        return found
    losses = losses_by_source(
        trainer.model,
        trainer.validation,
        micro_batch=trainer.settings.micro_batch,
        process=processes.rank,
        processes=processes.size,
    )
    if losses:
        say("step 0: held-out loss " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    if processes.leads:
        write_durably(work / RUN_FILE, json.dumps(kept | {"first": losses}))
    return losses


def _last(history: list[dict[str, Any]], name: str) -> float:
    return float(next(entry[f"eval_{name}_loss"] for entry in reversed(history) if f"eval_{name}_loss" in entry))


def _check_narrow(out: CheckpointFolder, wanted: TrainableSet, dtype: str) -> None:
    narrow = [name for name in wanted.names if out.tensors[name].dtype == "F16"]
    if narrow and dtype == "auto":
        raise BadInput(
            f"{printable(narrow[0])}: is float16, whose gradients under- and overflow; say `dtype: bfloat16` or"
            " `dtype: float32` (the run is saved as float16 again)"
        )


def _check_as_left(out: CheckpointFolder, manifest: Manifest, listener: Listener) -> dict[str, str]:
    """Digests of all tensors of the output; BadInput where one is not what surgery or training left."""
    listener.begin("reading", sum(info.nbytes for info in out.tensors.values()))
    found = digests_of(out, out.tensors, listener.advance)
    held = held_by(manifest, file=str(out.path / MANIFEST_FILE))
    changed = [name for name, digest in found.items() if held.get(name) != digest]
    if changed:
        more = f" (and {len(changed) - 1} more tensors)" if len(changed) > 1 else ""
        raise BadInput(
            f"{printable(changed[0])}{more}: not what {MANIFEST_FILE} of {printable(str(out.path))} says, so it was"
            " changed since; train what apply or train wrote"
        )
    return found


def _fingerprint(loaded: LoadedConfig, settings: Settings, held: dict[str, str], data: _Data) -> str:
    """Digest of all that the run's numbers depend on, but for the number of processes."""
    numbers = settings.to_json()
    for key in ("micro_batch", "accumulation"):
        numbers.pop(key)
    about_memory = {"micro_batch", "checkpointing", "cross_entropy", "sharding"}
    config = loaded.config.model_dump(mode="json", exclude={"log_every", "report_to", *about_memory})
    for source in config["sources"]:
        # The commit that it stood for is in the data's identity, so a run goes on once its branch has moved.
        source.pop("revision")
    content = {
        "version": __version__,
        "config": config,
        "settings": numbers,
        "tensors": held,
        "data": [documents.identity() for documents in data.documents],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _held(work: Path, target: Path, fingerprint: str, *, leads: bool) -> Iterator[None]:
    """The work folder, ours alone while inside; BadInput where it is another run's or another process is at it."""
    if not leads:
        yield
        return
    with working_in(work, target=target):
        run = work / RUN_FILE
        if run.is_file():
            kept = json.loads(run.read_text(encoding="utf-8"))
            if kept.get("fingerprint") != fingerprint:
                raise BadInput(
                    f"{printable(str(work))}: holds checkpoints of another run (config, data or output differ); remove"
                    " it, or train to another folder"
                )
        else:
            write_durably(run, json.dumps({"fingerprint": fingerprint}))
        yield


def _fused(asked: str, model: Any, settings: Settings, device: str, say: Any) -> FusedHead | None:
    vocabulary = int(model.config.vocab_size)
    kind = choose(asked, tokens=settings.micro_batch * settings.length, vocabulary=vocabulary, device=device)
    if kind == "torch":
        return None
    say(
        f"cross-entropy: {kind}, without all {settings.micro_batch * settings.length:,} × {vocabulary:,} logits at once"
    )
    return FusedHead(model, kind)


def _packed(packing: str, model: Any) -> str:
    how = getattr(model.config, "_attn_implementation", None) or "eager"
    if packing == "joined":
        return f"one after the other, attention ({how}) across them"
    return f"without attention across them ({how})"


def _peak_memory(device: str) -> int:
    """Bytes: of the GPU where there is one, else of this process."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _silent(_line: str) -> None:
    """What only the leading process says."""
