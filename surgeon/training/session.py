"""One training run, from the output's folder to the published one, or the continuation of an interrupted run."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.staging import check_destination, check_space
from surgeon.common.devices import fast_dtype
from surgeon.common.disk_space import writing
from surgeon.common.formatting import windows
from surgeon.common.listener import Listener, Stopwatch
from surgeon.data.kept_answers import KeptAnswers, kept_answers
from surgeon.errors import BadInput, printable
from surgeon.manifest.checkpoint import Checkpoint
from surgeon.manifest.reading import written_manifest
from surgeon.models.templates import TEMPLATE_FILE
from surgeon.training.config.budget import Budget
from surgeon.training.config.settings import fitting_micro_batch
from surgeon.training.footprint import check_room_of, fitting, peak_memory
from surgeon.training.loading import loaded_model, trained_numbers
from surgeon.training.losses.cross_entropy import FusedHead
from surgeon.training.opening import as_it_is, check_as_left, opened_run
from surgeon.training.places import memory_folder
from surgeon.training.processes.sharding import let_go, shard, views_allowed
from surgeon.training.publishing import Trained, publishing_job, write_final
from surgeon.training.run import Prepared, Run
from surgeon.training.saved.checkpoints import (
    RUN_FILE,
    STATE_FILE,
    RunRecord,
    best_step,
    damage,
    drop_what_does_not_count,
    newest_checkpoint,
    step_of,
)
from surgeon.training.saved.work_folder import fingerprint_of, own_work_folder
from surgeon.training.self_generated import write_texts
from surgeon.training.steps.cadence import Cadence
from surgeon.training.steps.trainer import DATA_FILE, TRAINED_FILE, SurgeonTrainer, training_arguments
from surgeon.writing.linked_shards import bytes_to_move
from surgeon.writing.write import execute


def run_training(
    prepared: Prepared,
    listener: Listener,
    *,
    link: bool = False,
    take_over: bool = False,
) -> Trained | None:
    """Train the run that `prepare` returned, and publish it; return None on processes that do not lead.

    Args:
        prepared: the run.
        listener: receives progress.
        link: hard-link shards in which nothing trained to the output's shards.
        take_over: continue a work folder that came from elsewhere.

    Raises:
        BadInput: the run cannot be made.
        WrongSet: other parameters than the wanted ones would train.
        Diverged: the loss is not finite any more.
        PromiseBroken: a tensor that did not train changed.
    """
    out, loaded, to = prepared.out, prepared.loaded, prepared.to
    write_texts(prepared, listener, take_over=take_over)
    run = opened_run(prepared, listener)
    ranks, say = run.ranks, run.say
    digests = check_as_left(out, run.manifest, listener)
    if run.manifest is None:
        run = replace(run, manifest=as_it_is(run, digests))
    kept = f"checkpoints are kept in {printable(str(run.work))}: the same command continues"
    fingerprint = fingerprint_of(loaded, run.settings, digests, run.data)
    decided = {} if loaded.config.minutes is None else {key: getattr(loaded.config, key) for key in Budget._fields}
    with (
        writing(run.work, kept=kept),
        own_work_folder(
            run.work, to, fingerprint, leads=ranks.leads, take_over=take_over, say=say, decided=decided
        ) as work,
    ):
        # Another run may have published `to` before this one locked the work folder.
        check_destination(to, out.path)
        for note in (*out.notes, *run.notes, *run.data.notes):
            say(note)
        for why in drop_what_does_not_count(run.work, loaded.config.keep_best) if ranks.leads else ():
            say(f"{why}, so it is passed over and dropped")
        with views_allowed():
            trained = _train(run)
        if work is None:
            return None
        work.check_there()
        trained = _publish(trained, run, digests, link=link)
        work.remove(last=RUN_FILE)
        shutil.rmtree(memory_folder(to), ignore_errors=True)
    return trained


def _train(run: Run) -> Trained:
    """Train from the newest checkpoint, or from the beginning, to the last step; return the run's result.

    Its changes are still empty, and its manifest is the output's; publishing fills in both.
    """
    assert run.manifest is not None
    checkpoint = newest_checkpoint(run.work)
    done = step_of(checkpoint) if checkpoint else 0
    trainer = _trainer(run, done)
    run = trainer.run
    assert run.manifest is not None
    settings, ranks = run.settings, run.ranks
    if ranks.leads:
        check_room_of(run, trainer.model)
    for remedy in run.remedies:
        remedy.measure(run, trainer.model, trainer.fused)
    first = _first_losses(trainer, run)
    begun = time.perf_counter()
    history = _steps(trainer, run, checkpoint, done)
    published = _published_step(run, history, first)
    last = {name: value for entry in history if entry["step"] <= published for name, value in entry.items()}
    seconds = time.perf_counter() - begun - sum(trainer.aside.seconds.values())
    a_step = run.objective.step_units(settings)
    tokens, made = settings.steps * a_step, (settings.steps - done) * a_step
    if not run.objective.packs:
        # Tokens without padding: those of all drawn examples, which a checkpoint counts.
        tokens, made = sum(stream.used for stream in run.data.mixture.streams), 0
    return Trained(
        out=run.out.path,
        path=run.to,
        manifest=run.manifest,
        operations=run.wanted.operations,
        settings=settings.to_json(),
        parameters=trained_numbers(trainer.model, trainer.parameters.fixed),
        changes={},
        losses={name: [loss, float(last[f"eval_{name}_loss"])] for name, loss in first.items()},
        tokens=tokens,
        published_step=published,
        log=history,
        resumed_at=done,
        seconds=seconds,
        tokens_per_second=made / seconds if made else None,
        peak_memory=peak_memory(run.device),
        scores={name: scores for name in first if (scores := _scores(last, name))},
    )


def _steps(trainer: SurgeonTrainer, run: Run, checkpoint: Path | None, done: int) -> list[dict[str, Any]]:
    """Make the steps after step `done`, the step of `checkpoint`; return the log of all steps."""
    settings = run.settings
    if checkpoint is not None:
        run.say(f"continuing from the checkpoint of step {done}")
        run.data.mixture.restore(json.loads((checkpoint / DATA_FILE).read_text(encoding="utf-8")))
    if run.ranks.leads:
        run.listener.begin("training", settings.steps, "steps")
        run.listener.advance(done)
    if done < settings.steps:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        history: list[dict[str, Any]] = trainer.state.log_history
    else:
        history = json.loads((run.work / f"checkpoint-{done}" / STATE_FILE).read_text())["log_history"]
    return history


def _scores(entry: Mapping[str, Any], source: str) -> dict[str, float]:
    """Return the figures of a source in an evaluation, without the loss."""
    keys = ("accuracy", "f1", "matthews")
    return {key: float(entry[found]) for key in keys if (found := f"eval_{source}_{key}") in entry}


def _published_step(run: Run, log: Sequence[Mapping[str, Any]], first: Mapping[str, float]) -> int:
    """Return the step to publish: the last one, or the best one on the source that `keep_best` names."""
    source = run.loaded.config.keep_best
    if source is None or (best := best_step(log, source)) is None:
        return run.settings.steps
    key = f"eval_{source}_loss"
    loss = next(float(entry[key]) for entry in log if entry["step"] == best and key in entry)
    worse = "" if loss < first[source] else f"; no step had less than before training ({first[source]:.4f})"
    run.say(f"step {best} is published: the lowest held-out loss on {source}, {loss:.4f}{worse}")
    return best


def _trainer(run: Run, done: int) -> SurgeonTrainer:
    """Load the model, set exactly the run's parameters to train, and return the trainer that continues after `done`."""
    settings, ranks = run.settings, run.ranks
    args = training_arguments(run)
    model, parameters = loaded_model(run)
    fitted = [name for remedy in run.remedies for name in remedy.fit(run, model)]
    if not run.sharding:
        # Checks before the first step run on training's device, because some attention runs only on a GPU.
        model.to(args.device)
    fused = run.objective.fused_head(run, model)
    beside = [remedy.join(run, model, fused) for remedy in run.remedies]
    if run.sharding:
        for each in (model, *beside):
            if each is not None:
                shard(each, device=args.device)
        run.say(f"sharded over {ranks.size} processes (FSDP2)")
    run.objective.check_isolation(run, model)
    run = _fitting(run, model, fused)
    args.per_device_train_batch_size = run.settings.micro_batch
    args.gradient_accumulation_steps = run.settings.accumulation
    trainer = SurgeonTrainer(
        model,
        args,
        run=run,
        parameters=replace(parameters, fitted=tuple(fitted)),
        callbacks=[Cadence(run, done), *run.trackers],
        fused=fused,
    )
    if fused is not None:
        drawn = torch.Generator().manual_seed(0)
        fused.check(torch.randint(model.config.get_text_config().vocab_size, (1, settings.length), generator=drawn))
        let_go(model)
    return trainer


def _fitting(run: Run, model: Any, fused: FusedHead | None) -> Run:
    """Return the run with a micro-batch that fits into memory (`fitting`); a continued run reads it from its record.

    The same micro-batches make the same bytes, whatever memory is free when the run goes on.
    """
    if run.loaded.config.micro_batch is not None or run.ranks.size > 1:
        return fitting(run, model, fused)
    record = RunRecord.read(run.work)
    assert record is not None
    if "micro_batch" not in record.decided:
        run = fitting(run, model, fused)
        record.decided["micro_batch"] = run.settings.micro_batch
        record.write(run.work)
    return replace(run, settings=fitting_micro_batch(run.settings, record.decided["micro_batch"]))


def _publish(trained: Trained, run: Run, digests: dict[str, str], *, link: bool) -> Trained:
    """Publish the run; return `trained` with the run's manifest and the changes of its tensors.

    `digests` has the digests of all tensors of the output. Raises BadInput where the checkpoint is damaged.
    """
    assert run.manifest is not None
    target = run.to
    last = run.work / f"checkpoint-{trained.published_step}"
    record = RunRecord.read(run.work)
    assert record is not None
    if (wrong := damage(last, record)) is not None:
        raise BadInput(
            f"{printable(str(run.work))}: {wrong}; nothing is published of it. Run the same command again: it goes on"
            " from the checkpoint before"
        )
    # The model that an adapter is loaded onto: the model before this run.
    called = run.manifest.base.id if not run.manifest.operations else run.out.path.resolve().name
    values = run.target.publish(last / TRAINED_FILE, run.wanted, called)
    changes = write_final(run.out, values, run.work, run.wanted.fixed)
    template = run.loaded.template
    added = {TEMPLATE_FILE: template.encode()} if template and TEMPLATE_FILE not in run.out.side_files else {}
    kept: list[KeptAnswers] = []

    def measured(staged: Path) -> dict[str, Any]:
        """Return how much of its answers before the run the staged model keeps, where this was asked for."""
        if run.prompts is not None:
            folder = CheckpointFolder.open(staged, trust_remote_code=run.out.classes == "own")
            before, after = Checkpoint(str(run.out.path), run.out), Checkpoint(str(run.to), folder)
            dtype = fast_dtype(run.device)
            kept[:] = kept_answers(before, [after], run.prompts, dtype=dtype, device=run.device, listener=run.listener)
        return {"answers": kept[0].to_json()} if kept else {}

    made = publishing_job(
        run.out,
        run.manifest,
        run.work,
        digests=digests,
        changes=changes,
        entry=_entry(trained, run),
        added=added,
        adapter=values.adapter_config,
        # A router's bias, which is a buffer, stays.
        of_base=run.wanted.of_base & changes.keys(),
        keep=run.loaded.config.keep_base,
        measured=measured,
    )
    job = replace(made, link=link)
    check_space(target, bytes_to_move(job, target), fingerprint=job.fingerprint)
    moved = execute(job, target, run.listener, Stopwatch())
    if moved.text:
        run.say(moved.text)
    answers = kept[0] if kept else None
    return replace(trained, manifest=written_manifest(target), changes=changes, answers=answers)


def _entry(trained: Trained, run: Run) -> dict[str, Any]:
    """Return the manifest's entry of the run, without its tensors."""
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
    if run.data.notes:
        entry["notes"] = run.data.notes
    if trained.losses:
        entry["curves"] = {name: _curve(trained, name) for name in trained.losses}
    if trained.scores:
        entry["scores"] = trained.scores
    if run.loaded.config.keep_best is not None:
        entry["published_step"] = trained.published_step
    for remedy in run.remedies:
        entry |= remedy.after(run)
    return entry


def _curve(trained: Trained, source: str) -> dict[str, float]:
    """Return the held-out losses on a source by step; step 0 is before training."""
    measured = f"eval_{source}_loss"
    later = {str(entry["step"]): float(entry[measured]) for entry in trained.log if measured in entry}
    return {"0": trained.losses[source][0]} | later


def _first_losses(trainer: SurgeonTrainer, run: Run) -> dict[str, float]:
    """Return the held-out losses before the first step; a run that is continued reads them from its record."""
    record = RunRecord.read(run.work)
    if record is not None and record.first is not None:
        return record.first
    losses = {name: found["loss"] for name, found in trainer.figures().items()}
    if losses:
        shown = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        run.say(f"step 0: held-out loss in {windows(run.settings.length)}: {shown}")
    if run.ranks.leads:
        assert record is not None
        record.first = losses
        record.write(run.work)
    return losses
