"""`surgeon train`: trains what a surgery added, or what the config selects instead, and nothing else."""

from __future__ import annotations

import datetime
import gc
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.anatomy.limits import context_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.distributed import Ranks
from surgeon.common.formatting import count, listed, size, windows
from surgeon.common.listener import Listener, Quiet
from surgeon.common.tables import FittedTable
from surgeon.data.kept_answers import kept_table
from surgeon.errors import BadInput, printable
from surgeon.manifest.reading import manifest_of
from surgeon.training.config.loading import LoadedConfig, load_config

_MOST_LABELS = 6

if TYPE_CHECKING:
    from surgeon.training.config.schema import TrainConfig
    from surgeon.training.dry_run import Rehearsal
    from surgeon.training.publishing import Trained
    from surgeon.training.run import Prepared


def train(
    out: str | Path,
    config: str | Path | LoadedConfig,
    to: str | Path,
    *,
    overrides: Sequence[str] = (),
    link: bool = False,
    take_over: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Trained | None:
    """Train what surgery added to `out` by `config`, and publish the run as the new folder `to`.

    The config's `what` or `lora` can select other tensors, also those of a plain base; such a run has a `surgery.json`
    as well. At any moment `to` is either absent or complete. Every tensor that did not train is byte for byte the
    tensor of `out`, which is checked. The same call continues an interrupted run from its last checkpoint. Under
    torchrun every process makes this call.

    Args:
        out: an output of `apply`, or a plain model.
        config: a training config's file, or what `load_config` returned.
        to: the new folder.
        overrides: values that replace the file's: `optimizer.lr=1e-4`, `sources.NAME.share=0.5`.
        link: hard-link shards of `out` in which nothing trained; they become read-only (`apply`).
        take_over: continue a run that this user did not begin in this place (a copy, an archive).
        device: `auto`, or a device.
        trust_remote_code: run the code that the model brings.
        listener: receives progress.

    Returns:
        The run; None on all processes but the first.

    Raises:
        BadInput: the run cannot be made.
        WrongSet: other parameters than the selected ones would train.
        Diverged: the loss is not finite any more.
    """
    listener = listener or Quiet()
    prepared = _prepared(out, config, to, overrides, device, trust_remote_code)
    prepared = _in_minutes(prepared, trust_remote_code, listener)

    from surgeon.training.session import run_training

    with prepared.objective.ready(prepared, None, trust_remote_code=trust_remote_code, listener=listener) as ready:
        return run_training(ready, listener, link=link, take_over=take_over)


def rehearse(
    out: str | Path,
    config: str | Path | LoadedConfig,
    to: str | Path,
    *,
    overrides: Sequence[str] = (),
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Rehearsal:
    """Estimate the data and the cost of `train` with the same arguments; nothing is written.

    The texts are read and their tokens counted; one sequence and then a few micro-batches are run and timed. Of a text
    that the model has yet to write, one batch of documents is generated, in memory.

    Args:
        out: as in `train`.
        config: as in `train`.
        to: as in `train`.
        overrides: as in `train`.
        device: as in `train`.
        trust_remote_code: as in `train`.
        listener: as in `train`.

    Raises:
        BadInput: as `train`, and where a micro-batch does not fit into memory.
    """
    listener = listener or Quiet()
    listener.say("dry run: reads the texts, loads the model and times one sequence first; nothing is written")
    prepared = _prepared(out, config, to, overrides, device, trust_remote_code)
    if Ranks.of_environment().size > 1:
        raise BadInput("torchrun: `--dry-run` times one process; run it without torchrun")
    return _rehearsed(_in_minutes(prepared, trust_remote_code, listener), trust_remote_code, listener)


def _rehearsed(prepared: Prepared, trust_remote_code: bool, listener: Listener) -> Rehearsal:
    """Estimate the data and the cost of a run. Raises BadInput as `rehearse`."""
    from surgeon.training.dry_run import measured
    from surgeon.training.opening import opened_run
    from surgeon.training.self_generated import imagined_texts

    imagined = imagined_texts(prepared, listener.say)
    with tempfile.TemporaryDirectory(prefix="surgeon-head-") as room:
        made = Path(room) / "head"
        with prepared.objective.ready(prepared, made, trust_remote_code=trust_remote_code, listener=listener) as ready:
            return measured(opened_run(ready, listener, imagined=imagined.texts), imagined)


def _in_minutes(prepared: Prepared, trust_remote_code: bool, listener: Listener) -> Prepared:
    """Return the run with the steps, batch and length that take the config's `minutes`; without these the run itself.

    A run that is continued has the numbers of its record. Raises BadInput as `rehearse`.
    """
    from surgeon.training.config.budget import budget_of, recorded_budget, trial_of
    from surgeon.training.preparing import prepare
    from surgeon.training.saved.checkpoints import RunRecord

    loaded = prepared.loaded
    if loaded.config.minutes is None:
        return prepared

    def of(config: TrainConfig) -> Prepared:
        """Return the run by another config."""
        changed = replace(loaded, config=config)
        return prepare(prepared.out, prepared.manifest, changed, prepared.to, device=prepared.device, processes=1)

    record = RunRecord.read(prepared.work)
    budget = None if record is None else recorded_budget(record.decided, loaded.config.minutes)
    measured = budget is not None
    while not measured:
        listener.say("measuring the speed, by which `minutes` decides the steps")
        trial = _rehearsed(of(trial_of(loaded.config, budget)), trust_remote_code, listener)
        batch, length = trial.settings["batch"], trial.settings["length"]
        budget = budget_of(
            loaded.config,
            seconds=trial.seconds_a_step,
            batch=batch,
            length=length,
            context=context_of(prepared.out.config),
            packs=prepared.objective.packs,
        )
        measured = budget.is_near(batch, length)
        # The measured model is in cycles of references, and the next one would be loaded beside it.
        gc.collect()
    assert budget is not None
    listener.say(budget.shown)
    return of(budget.settled(loaded.config))


def _prepared(
    out: str | Path,
    config: str | Path | LoadedConfig,
    to: str | Path,
    overrides: Sequence[str],
    device: str,
    trust_remote_code: bool,
) -> Prepared:
    """Read the config, open the output, and settle the run. Raises BadInput with all that is wrong, a line each."""
    if isinstance(config, LoadedConfig):
        if overrides:
            raise BadInput("`overrides` are for a config file; change the loaded config instead")
        loaded = config
    else:
        loaded = load_config(Path(config), overrides)

    from surgeon.training.preparing import prepare

    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    manifest = None if folder.manifest is None else manifest_of(folder)
    return prepare(folder, manifest, loaded, Path(to), device=device, processes=Ranks.of_environment().size)


def trained_view(trained: Trained) -> RenderableType:
    """Show a finished run: losses before and after, time and memory, and how many tensors trained."""
    losses = FittedTable("source")
    for column in ("before", "after", "change"):
        losses.add_column(column)
    for name, (before, after) in trained.losses.items():
        style = "green" if after < before else "yellow"
        losses.add_row(name, f"{before:.4f}", f"{after:.4f}", Text(f"{after - before:+.4f}", style=style))
    facts = FittedTable(headings=False)
    speed = f", {trained.tokens_per_second:,.0f} a second" if trained.tokens_per_second else ""
    facts.add_row("tokens", f"{trained.tokens:,}{speed}")
    for name, scores in trained.scores.items():
        facts.add_row(f"{name}, held out", ", ".join(f"{key} {value:.3f}" for key, value in scores.items()))
    if trained.published_step != trained.settings["steps"]:
        facts.add_row("published", f"step {trained.published_step:,} of {trained.settings['steps']:,}, the best")
    facts.add_row("peak memory", size(trained.peak_memory))
    caption = Text(f"held-out loss in {windows(trained.settings['length'])}", style="dim")
    parts: list[RenderableType] = [losses, caption, Text()] if trained.losses else []
    if trained.answers is not None:
        parts += [kept_table([("after training", trained.answers)]), Text()]
    parts.append(facts)
    if trained.unchanged:
        parts.append(
            Text(
                f"did not change, or by less than their dtype can say: {listed(trained.unchanged)}", style="bold yellow"
            )
        )
    done = f"{printable(str(trained.path))} is complete: {_moved(trained)}"
    return Group(*parts, Text(), Text(done, style="bold green"))


def _moved(trained: Trained) -> str:
    """Return in words how many tensors trained, and whether others are left."""
    from surgeon.manifest.moves import recorded_tensors

    moved = trained.manifest.training[-1].tensors.values()
    of_base = sum(tensor.before is not None for tensor in moved)
    new = "" if of_base else "new "
    words = f"{len(moved)} {new}tensors ({count(trained.parameters)} numbers) trained"
    if len(moved) == len(recorded_tensors(trained.manifest, file=str(trained.path))):
        return f"all {words}"
    own = f", {of_base} of them the base's" if of_base else ""
    return f"{words}{own}; every other tensor is byte for byte the same"


def rehearsal_view(rehearsal: Rehearsal) -> RenderableType:
    """Show the sources and how much the run reads of each, a sample with what the loss counts, memory and time."""
    sources = FittedTable("source")
    labelled = any(source.labels for source in rehearsal.sources)
    learned = "labels" if labelled else "the loss counts"
    for column in ("share", "documents", "tokens each", learned, "tokens in the run", "passes"):
        sources.add_column(column)
    for source in rehearsal.sources:
        sources.add_row(
            source.name,
            f"{source.share:.3g}",
            f"{source.documents:,}",
            f"{source.tokens_a_document:,.0f}",
            _labels(source.labels) if labelled else f"{source.counted:.0%}",
            f"{source.run_tokens:,}",
            f"{source.passes:.2g}",
        )
    parts: list[RenderableType] = [Text(printable(note, 2000), style="yellow") for note in rehearsal.notes]
    parts += [sources, Text()]
    for sample in rehearsal.samples:
        shown = FittedTable(headings=False)
        for text, counted in sample.parts:
            style = "green" if counted else "dim"
            # Line ends are shown as a sign, which keeps a sample exact and short.
            shown.add_row(
                Text("loss" if counted else "", style=style),
                Text(printable(text.replace("\n", "⏎"), 2000), style=style),
            )
        marked = (
            "the loss counts what is marked" if sample.label is None else f"its label: {printable(sample.label, 80)}"
        )
        parts += [Text(f"a document of {sample.source}; {marked}"), shown, Text()]
    facts = FittedTable(headings=False)
    settings = rehearsal.settings
    facts.add_row("trains", f"{count(rehearsal.trained)} of {count(rehearsal.parameters)}, {rehearsal.tensors} tensors")
    facts.add_row(
        "a step",
        f"{settings['batch']} × {settings['length']:,} tokens, {settings['micro_batch']} sequences at a time:"
        f" {rehearsal.seconds_a_step:.3g} s on {rehearsal.device}",
    )
    whole = datetime.timedelta(seconds=round(rehearsal.seconds))
    facts.add_row("time", f"about {whole} for {settings['steps']:,} steps, {rehearsal.tokens:,} tokens")
    for seconds, words in rehearsal.before:
        facts.add_row("before", f"about {datetime.timedelta(seconds=round(seconds))} for {words}")
    facts.add_row("memory", f"about {size(rehearsal.peak_memory)} at the most, with AdamW's state")
    return Group(*parts, facts, Text(), Text("dry run: nothing was written", style="bold green"))


def _labels(found: Mapping[str, int]) -> str:
    """Return how many texts have each label, as `low 40, high 38`; of many labels only the most frequent ones."""
    most = sorted(found.items(), key=lambda entry: -entry[1])[:_MOST_LABELS]
    more = f", {len(found) - len(most)} more" if len(found) > len(most) else ""
    return ", ".join(f"{printable(name, 24)} {number:,}" for name, number in most) + more


def discard_run(to: str | Path) -> None:
    """Remove what an interrupted call of `train` left next to `to`: its checkpoints, and texts that the model wrote."""
    from surgeon.training.places import memory_folder, work_folder

    for folder in (work_folder(Path(to)), memory_folder(Path(to))):
        shutil.rmtree(folder, ignore_errors=True)
