"""One training run, from the output's folder to the published one; the same call continues what a kill cut off."""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from surgeon._version import __version__
from surgeon.apply.unmoved import bytes_to_move
from surgeon.apply.write import execute
from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.checkpoint.room import check_room, writing
from surgeon.checkpoint.staging import check_destination, check_space
from surgeon.checkpoint.working import WorkFolder, working_in
from surgeon.common import devices
from surgeon.common.distributed import Ranks
from surgeon.common.formatting import size
from surgeon.common.listener import Listener, Quiet, Stopwatch
from surgeon.data.documents import Corpus
from surgeon.data.encoding import Encoder
from surgeon.data.examples import ExampleEncoder, batch_of_examples
from surgeon.data.packing import Batches, batch_of
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.manifest.compose import BaseId, without_surgery
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, StoredTensor, held_by, written_manifest
from surgeon.manifest.trainable import Fixed, TrainableSet
from surgeon.manifest.within import Within
from surgeon.models.encoders import check_window, load_encoder
from surgeon.models.load import CLASSIFIER, load_model, stored_dtype
from surgeon.models.templates import TEMPLATE_FILE, TEMPLATES
from surgeon.train.cached_teacher import CachedTeacher
from surgeon.train.checkpoints import (
    KEPT,
    RUN_FILE,
    STATE_FILE,
    RunRecord,
    best_step,
    damage,
    drop_what_does_not_count,
    newest_checkpoint,
    step_of,
)
from surgeon.train.config import LoadedConfig, Settings
from surgeon.train.cross_entropy import FusedHead, choose
from surgeon.train.fitting import FIGURES_FILE, fit_gate
from surgeon.train.itself import memory_folder, write_sources
from surgeon.train.launching import Sharding
from surgeon.train.preparing import Prepared, prepare
from surgeon.train.preserving import NUMBERS, Preserving
from surgeon.train.publishing import Trained, publishing_job, write_final
from surgeon.train.sharding import let_go, shard, sharded_here
from surgeon.train.stored import StoredNames
from surgeon.train.trainer import (
    DATA_FILE,
    TRAINED_FILE,
    Cadence,
    SurgeonTrainer,
    check_set,
    figures_by_source,
    hold_fixed,
    open_trackers,
    training_arguments,
    unfreeze,
)
from surgeon.train.training_data import TrainingData

# In the work folder: the published run, where what is asked for is only made of it.
WHOLE_FOLDER = "whole"


def work_folder(target: Path) -> Path:
    """Where checkpoints lie until the run is published: beside it, `.NAME.training`."""
    return target.with_name(f".{target.name}.training")


def run_training(
    out: CheckpointFolder,
    manifest: Manifest | None,
    loaded: LoadedConfig,
    target: Path,
    *,
    device: str,
    listener: Listener,
    prepared: Prepared | None = None,
    deliver: Callable[[Path], object] | None = None,
    link: bool = False,
) -> Trained | None:
    """Train `out` by the config and publish it as `target`; None on processes that do not lead.

    `manifest` is None where `out` had no surgery.

    `prepared` is what `prepare` settled, where it was asked already. Raises BadInput, WrongSet, Diverged,
    PromiseBroken. With `deliver` the run is published in the work folder
    instead, and `deliver` makes `target` of that. With `link` shards in which nothing trained are linked to `out`'s.
    """
    write_sources(out, loaded, target, device=device, listener=listener)
    run = opened_run(out, manifest, loaded, target, device=device, listener=listener, prepared=prepared)
    settings, data, ranks, say = run.settings, run.data, run.ranks, run.say
    held = _check_as_left(out, manifest, listener)
    if manifest is None:
        run = replace(run, manifest=_as_it_is(run, held))
    kept = f"checkpoints are kept in {printable(str(run.work))}: the same command continues"
    with (
        writing(run.work, kept=kept),
        _held(run.work, target, _fingerprint(loaded, settings, held, data), leads=ranks.leads) as work,
    ):
        # Another run may have made it before this one held the folder.
        check_destination(target, out.path)
        for note in (*out.notes, *run.notes, *data.notes):
            say(note)
        for why in drop_what_does_not_count(run.work, loaded.config.keep_best) if ranks.leads else ():
            say(f"{why}, so it is passed over and dropped")
        with sharded_here():
            trained = _train(run)
        if work is None:
            return None
        work.check_there()
        whole = run.work / WHOLE_FOLDER if deliver else target
        if deliver and whole.exists():
            # Of a run that was cut off between the two.
            shutil.rmtree(whole)
        trained = _publish(trained, run, whole, held, link=link)
        if deliver:
            deliver(whole)
        work.remove(last=RUN_FILE)
        shutil.rmtree(memory_folder(target), ignore_errors=True)
    return trained


@dataclass(frozen=True)
class Run:
    """What a run is of: settled, checked, and with its data opened; `notes` are about its numbers.

    `within` is the base that teaches; None where none does. `manifest` is None where there was no surgery, until the
    tensors are read.
    """

    out: CheckpointFolder
    manifest: Manifest | None
    loaded: LoadedConfig
    settings: Settings
    wanted: TrainableSet
    data: TrainingData
    target: Path
    device: str
    ranks: Ranks
    sharding: Sharding | None
    within: Within | None
    anatomy: Anatomy
    trackers: Sequence[TrainerCallback]
    listener: Listener
    say: Callable[[str], None]
    encoder: Encoder
    notes: Sequence[str]
    # Of a classification head.
    examples: ExampleEncoder | None = None

    @property
    def auto(self) -> str | None:
        """transformers' class of the model; None: a decoder's."""
        return None if self.examples is None else CLASSIFIER

    @property
    def pad(self) -> int | None:
        """What fills a batch of examples up."""
        return None if self.examples is None else self.examples.pad

    @property
    def work(self) -> Path:
        """Where checkpoints lie until the run is published."""
        return work_folder(self.target)


def opened_run(
    out: CheckpointFolder,
    manifest: Manifest | None,
    loaded: LoadedConfig,
    target: Path,
    *,
    device: str,
    listener: Listener,
    prepared: Prepared | None,
    imagined: Mapping[str, Corpus] | None = None,
) -> Run:
    """A run whose texts are opened and read through; `imagined` are those that are not there. Raises BadInput."""
    ranks = Ranks.of_environment()
    say = listener.say if ranks.leads else lambda _: None
    if prepared is None:
        prepared = prepare(out, manifest, loaded, target, device=device, processes=ranks.size)
    settings, wanted, sharding = prepared.settings, prepared.wanted, prepared.sharding
    if sharding is not None and ranks.size == 1:
        say("one process: nothing is sharded")
        sharding = None
    device = devices.resolve(device)
    trackers = open_trackers(loaded.config.report_to, target=target, config=str(loaded.source))
    named = loaded.config.chat_template
    template = None if named is None else TEMPLATES[named]
    vocabulary = prepared.anatomy.sizes.vocabulary
    encoder = Encoder(out.path, vocabulary=vocabulary, template=template)
    if loaded.config.classifies:
        examples = ExampleEncoder(encoder.tokenizer, out.config, length=settings.length, vocabulary=vocabulary)
        data = TrainingData.open_examples(loaded, examples, say)
    else:
        examples = None
        data = TrainingData.open(loaded, settings, encoder, say, memory=memory_folder(target), imagined=imagined)
    notes = prepared.notes
    if prepared.settled_for is not None:
        settings, more = prepared.settled_for(data.steps_of(loaded, settings, say))
        notes = [*notes, *more]
    return Run(
        out,
        manifest,
        loaded,
        settings,
        wanted,
        data,
        target,
        device,
        ranks,
        sharding,
        prepared.within,
        prepared.anatomy,
        trackers,
        listener,
        say,
        encoder,
        notes,
        examples,
    )


def _train(run: Run) -> Trained:
    """Train from the newest checkpoint, or from the beginning, to the last step.

    Its manifest and changes are known once it is published.
    """
    settings, ranks = run.settings, run.ranks
    assert run.manifest is not None
    checkpoint = newest_checkpoint(run.work)
    done = step_of(checkpoint) if checkpoint else 0
    trainer = _trainer(run, done)
    cached = cached_teacher(run)
    if ranks.leads:
        _check_room(run, trainer, cached)
    if cached is not None:
        assert trainer.preserving is not None
        run.say(f"{cached.shown}, in {printable(str(run.work))} while the run lasts")
        cached.record(
            trainer.preserving,
            micro_batch=settings.micro_batch,
            device=trainer.args.device,
            ranks=ranks,
            listener=run.listener if ranks.leads else Quiet(),
        )
    first = _first_losses(trainer, run)
    begun = time.perf_counter()
    if checkpoint is not None:
        run.say(f"continuing from the checkpoint of step {done}")
        trainer.batches.mixture.restore(json.loads((checkpoint / DATA_FILE).read_text(encoding="utf-8")))
    if ranks.leads:
        run.listener.begin("training", settings.steps, "steps")
        run.listener.advance(done)
    if done < settings.steps:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        history = trainer.state.log_history
    else:
        history = json.loads((run.work / f"checkpoint-{done}" / STATE_FILE).read_text())["log_history"]
    published = _published_step(run, history, first)
    last = {name: value for entry in history if entry["step"] <= published for name, value in entry.items()}
    seconds = time.perf_counter() - begun - trainer.aside
    made = (settings.steps - done) * settings.batch * settings.length
    tokens = settings.steps * settings.batch * settings.length
    if run.examples is not None:
        # Without padding: what was drawn, which a checkpoint remembers.
        tokens = sum(stream.used for stream in trainer.batches.mixture.streams)
        made = 0
    return Trained(
        out=run.out.path,
        path=run.target,
        manifest=run.manifest,
        operations=run.wanted.operations,
        settings=settings.to_json(),
        parameters=trained_numbers(trainer.model, trainer.held),
        changes={},
        losses={name: [loss, float(last[f"eval_{name}_loss"])] for name, loss in first.items()},
        tokens=tokens,
        published_step=published,
        log=history,
        resumed_at=done,
        seconds=seconds,
        tokens_per_second=made / seconds if made else None,
        peak_memory=peak_memory(run.device),
        scores={} if run.examples is None else {name: _scores(last, name) for name in first},
    )


def _scores(entry: Mapping[str, Any], source: str) -> dict[str, float]:
    """What an evaluation says of a source beside its loss."""
    keys = ("accuracy", "f1", "matthews")
    return {key: float(entry[found]) for key in keys if (found := f"eval_{source}_{key}") in entry}


def _published_step(run: Run, log: Sequence[Mapping[str, Any]], first: Mapping[str, float]) -> int:
    """The last step, or the best one on the source that the config names."""
    source = run.loaded.config.keep_best
    best = None if source is None else best_step(log, source)
    if source is None or best is None:
        return run.settings.steps
    loss = next(
        float(entry[key]) for entry in log if entry["step"] == best for key in entry if key == f"eval_{source}_loss"
    )
    worse = "" if loss < first[source] else f"; no step had less than before training ({first[source]:.4f})"
    run.say(f"step {best} is published: the lowest held-out loss on {source}, {loss:.4f}{worse}")
    return best


def _trainer(run: Run, done: int) -> SurgeonTrainer:
    """The model with exactly what is wanted set to train, and the trainer that goes on after step `done`."""
    config, settings, ranks = run.loaded.config, run.settings, run.ranks
    args = training_arguments(
        run.target.name, run.work, settings, log_every=config.log_every, save_every=config.save_every, device=run.device
    )
    model, names, held = loaded_model(run)
    fitted = _fit(run, model)
    fused = fused_head(run, model)
    preserving = preserving_by(run, model, fused)
    if run.sharding is not None:
        shard(model, run.sharding, device=args.device)
        if preserving is not None and preserving.base.model is not model:
            shard(preserving.base.model, run.sharding, device=args.device)
        run.say(f"sharded over {ranks.size} processes (FSDP2)")
    if run.examples is None:
        run.say(f"documents packed {_packed(config.packing, model)}, {settings.length} tokens a sequence")
    make = batch_of if run.pad is None else partial(batch_of_examples, pad=run.pad)
    batches = Batches(
        run.data.mixture,
        micro_batch=settings.micro_batch,
        process=ranks.rank,
        processes=ranks.size,
        make=make,
        numbered=NUMBERS if cached_teacher(run) is not None else None,
    )
    shown = run.listener if ranks.leads else None
    cadence = Cadence(settings, config.evaluate_every, run.say, shown, done, examples=run.examples is not None)
    trainer = SurgeonTrainer(
        model,
        args,
        settings=settings,
        names=names,
        batches=batches,
        validation=run.data.validation,
        callbacks=[cadence, *run.trackers],
        fused=fused,
        preserving=preserving,
        held=held,
        keep_best=config.keep_best,
        fitted=fitted,
        pad=run.pad,
    )
    if fused is not None:
        drawn = torch.Generator().manual_seed(0)
        fused.check(torch.randint(model.config.get_text_config().vocab_size, (1, settings.length), generator=drawn))
        let_go(model)
    return trainer


def _fit(run: Run, model: Any) -> list[str]:
    """Fit what gets its values before the first step; its names in the model."""
    if not run.wanted.fitted:
        return []
    stored = StoredNames(model, dict.fromkeys((*run.out.tensors, *run.wanted.fitted)))
    dtypes: dict[str, torch.dtype] = {}
    for name in run.wanted.fitted:
        (target,) = stored.in_memory([name])
        dtypes[target] = stored_dtype(run.out.tensors[name].dtype)
    fit_gate(
        model,
        run.data.mixture,
        run.data.held,
        list(dtypes),
        work=run.work,
        dtypes=dtypes,
        seed=run.loaded.config.seed,
        device=run.device,
        leads=run.ranks.leads,
        say=run.say,
    )
    return list(dtypes)


def loaded_model(run: Run) -> tuple[Any, list[str], dict[str, Fixed]]:
    """The model, of which the wanted parameters train, their names, and of those that train in part what is fixed."""
    config = run.loaded.config
    options: dict[str, Any] = {"dtype": config.dtype, "attention": config.attention, "say": run.say}
    if run.auto is None:
        model = load_model(run.out, **options)
    else:
        model = load_encoder(run.out, auto=run.auto, **options)
        check_window(model, run.settings.length)
    held: dict[str, Fixed] = {}
    if config.lora is not None:
        # PEFT is an extra.
        from surgeon.train.lora import attach

        names = attach(
            model,
            config.lora,
            run.wanted.names,
            beside=run.wanted.beside,
            base_names=run.out.tensors,
            seed=config.seed,
        )
        check_set(model, names)
    else:
        names = unfreeze(model, run.wanted, base_names=run.out.tensors)
        for name in names:
            # Loaded weights may be mapped from the file.
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.clone()
        held = hold_fixed(model, run.wanted, base_names=run.out.tensors)
    run.say(f"trains {len(names)} tensors, {trained_numbers(model, held):,} numbers: {run.wanted.shown}")
    model.config.use_cache = False
    if config.checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model, names, held


def trained_numbers(model: Any, held: Mapping[str, Fixed]) -> int:
    """How many numbers train, without those that are fixed."""
    training = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    fixed: int = sum(p.numel() // p.shape[held[n].axis] * held[n].size for n, p in training if n in held)
    total: int = sum(p.numel() for _, p in training)
    return total - fixed


def _as_it_is(run: Run, digests: Mapping[str, str]) -> Manifest:
    """The manifest of a model that had no surgery."""
    out = run.out
    names = out.side_files if out.own is None else {*out.side_files, *out.own.files}
    files = {name: hashlib.sha256(out.read_side_file(name)).hexdigest() for name in names}
    return without_surgery(out, BaseId(out.path.resolve().name), run.anatomy, digests=digests, files=files)


def _publish(trained: Trained, run: Run, target: Path, held: dict[str, str], *, link: bool) -> Trained:
    """Write the run to `target`; the same with its manifest and with what changed."""
    assert run.manifest is not None
    last = run.work / f"checkpoint-{trained.published_step}"
    record = RunRecord.read(run.work)
    assert record is not None
    if (wrong := damage(last, record)) is not None:
        raise BadInput(
            f"{printable(str(run.work))}: {wrong}; nothing is published of it. Run the same command again: it goes on"
            " from the checkpoint before"
        )
    lora = run.loaded.config.lora
    # What the adapter goes onto: the model as it is before this run.
    called = run.manifest.base.id if not run.manifest.operations else run.out.path.resolve().name
    final = write_final(
        run.out, last / TRAINED_FILE, run.work, wanted=run.wanted, lora=lora, base=called, auto=run.auto
    )
    config = run.loaded.config.model_dump(mode="json")
    for source in config["sources"]:
        source["revision"] = run.data.commits.get(source["name"])
    entry = {
        "config": config,
        "settings": trained.settings,
        "steps": run.settings.steps,
        "tokens": trained.tokens,
        "losses": trained.losses,
    }
    if trained.scores:
        entry["scores"] = trained.scores
    if run.loaded.config.keep_best is not None:
        entry["published_step"] = trained.published_step
    if run.wanted.fitted:
        entry["gate"] = json.loads((run.work / FIGURES_FILE).read_text(encoding="utf-8"))
    named = run.loaded.config.chat_template
    added = {TEMPLATE_FILE: TEMPLATES[named].encode()} if named and TEMPLATE_FILE not in run.out.side_files else {}
    made = publishing_job(
        run.out,
        run.manifest,
        run.work,
        held=held,
        final=final,
        entry=entry,
        added=added,
        of_base=run.wanted.of_base,
        keep=run.loaded.config.keep_base,
    )
    job = replace(made, link=link)
    check_space(target, bytes_to_move(job, target), fingerprint=job.fingerprint)
    moved = execute(job, target, run.listener, Stopwatch())
    if moved.text:
        run.say(moved.text)
    return replace(trained, manifest=written_manifest(target), changes=final.changes)


def _first_losses(trainer: SurgeonTrainer, run: Run) -> dict[str, float]:
    """Held-out losses before the first step; of a run that is continued, as they were then."""
    record = RunRecord.read(run.work)
    if record is not None and record.first is not None:
        return record.first
    figures = figures_by_source(
        trainer.model,
        trainer.validation,
        micro_batch=trainer.settings.micro_batch,
        process=run.ranks.rank,
        processes=run.ranks.size,
        pad=run.pad,
    )
    losses = {name: found["loss"] for name, found in figures.items()}
    if losses:
        run.say("step 0: held-out loss " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    if run.ranks.leads:
        assert record is not None
        record.first = losses
        record.write(run.work)
    return losses


def optimizer_bytes(trained: Sequence[torch.Tensor]) -> int:
    """Bytes of AdamW's state: two moments in float32, and a master where the parameter is narrower."""
    return sum(p.numel() * (8 if p.dtype.itemsize >= 4 else 12) for p in trained)


def _check_room(run: Run, trainer: SurgeonTrainer, cached: CachedTeacher | None) -> None:
    """BadInput where the disk has no room for the checkpoints, of which one more is written than kept, and the run.

    And for what the base says, where that is kept.
    """
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    optimizer = optimizer_bytes(trained)
    checkpoint = sum(p.numel() * p.dtype.itemsize for p in trained) + optimizer
    published = sum(info.nbytes for info in run.out.tensors.values())
    final = sum(run.out.tensors[name].nbytes for name in run.wanted.names if name in run.out.tensors)
    kept = KEPT + 1 + (run.loaded.config.keep_best is not None)
    said = 0 if cached is None else cached.needed_bytes()
    teacher = f", {size(said)} for what the base says" if said else ""
    there = sum(path.lstat().st_blocks * 512 for path in run.work.rglob("*"))
    check_room(
        run.work,
        kept * checkpoint + final + published + said - there,
        what=f" ({kept} checkpoints of {size(checkpoint)}{teacher}, and {size(published)} for the run)",
    )


def _check_as_left(out: CheckpointFolder, manifest: Manifest | None, listener: Listener) -> dict[str, str]:
    """Digests of all tensors of the output; BadInput where one is not what surgery or training left.

    Where there was no surgery nothing says what they should be.
    """
    listener.begin("reading", sum(info.nbytes for info in out.tensors.values()))
    found = digests_of(out, out.tensors, listener.advance)
    if manifest is None:
        return found
    held = held_by(manifest, file=str(out.path / MANIFEST_FILE))
    changed = [name for name, digest in found.items() if held.get(name) != StoredTensor.of(out.tensors[name], digest)]
    if changed:
        more = f" (and {len(changed) - 1} more tensors)" if len(changed) > 1 else ""
        raise BadInput(
            f"{printable(changed[0])}{more}: not what {MANIFEST_FILE} of {printable(str(out.path))} says, so it was"
            " changed since; train what apply or train wrote"
        )
    return found


def _fingerprint(loaded: LoadedConfig, settings: Settings, held: dict[str, str], data: TrainingData) -> str:
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
def _held(work: Path, target: Path, fingerprint: str, *, leads: bool) -> Iterator[WorkFolder | None]:
    """The work folder, ours alone while inside (None on processes that do not lead).

    It is removed where this call made it and fails before a step was finished. BadInput where it is another run's, or
    not ours, or another process is at it.
    """
    if not leads:
        yield None
        return
    there = work.exists()
    with working_in(work, target=target, marker=RUN_FILE) as folder:
        try:
            record = RunRecord.read(work)
            if record is None:
                RunRecord(fingerprint).write(work)
            elif record.fingerprint != fingerprint:
                raise BadInput(
                    f"{printable(str(work))}: holds checkpoints of another run (config, data or output differ); remove"
                    " it, or train to another folder"
                )
            yield folder
        except Exception:
            # While we hold it: a moment before or after, it may be another process'.
            with contextlib.suppress(OSError, BadInput):
                folder.check_there()
                if not there and newest_checkpoint(work) is None:
                    folder.remove(last=RUN_FILE)
            raise


def fused_head(run: Run, model: Any) -> FusedHead | None:
    """The head that computes cross-entropy without all logits at once; None where torch's own does."""
    if run.examples is not None:
        return None
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = run.settings.micro_batch * run.settings.length
    kind = choose(run.loaded.config.cross_entropy, tokens=tokens, vocabulary=vocabulary, device=run.device)
    if kind == "torch":
        # What teaches needs what the head reads.
        return None if run.within is None else FusedHead(model, kind)
    run.say(f"cross-entropy: {kind}, without all {tokens:,} × {vocabulary:,} logits at once")
    return FusedHead(model, kind)


def preserving_by(run: Run, model: Any, fused: FusedHead | None) -> Preserving | None:
    """The base within the model that teaches it through the head `fused`; None where none does."""
    if run.within is None or run.loaded.config.preserve is None:
        return None
    assert fused is not None
    spec, config = run.loaded.config.preserve, run.loaded.config
    copy: FusedHead | None = None
    if run.within.apart and spec.cached is None:
        frozen = load_model(run.out, dtype=config.dtype, attention=config.attention).requires_grad_(False)
        frozen.config.use_cache = False
        copy = FusedHead(frozen if run.sharding is not None else frozen.to(run.device), "torch")
    how = "the base within" if copy is None else "a frozen copy of the base"
    if spec.cached is not None:
        how = "what the base said before the first step"
    run.say(f"{how} teaches: {spec.loss} on {spec.on} text, weight {spec.weight:g}")
    return Preserving(model, spec, run.within, fused, copy=copy)


def cached_teacher(run: Run) -> CachedTeacher | None:
    """What the base says on disk; None where it speaks during training, or not at all."""
    spec, settings = run.loaded.config.preserve, run.settings
    if run.within is None or spec is None or spec.cached is None:
        return None
    sequences = settings.steps * settings.batch
    return CachedTeacher(run.work, spec.cached, spec.on, run.data.mixture, sequences, settings.length)


def _packed(packing: str, model: Any) -> str:
    how = getattr(model.config, "_attn_implementation", None) or "eager"
    if packing == "joined":
        return f"one after the other, attention ({how}) across them"
    return f"without attention across them ({how})"


def peak_memory(device: str) -> int:
    """Bytes: of the GPU where there is one, else of this process."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
