"""Train what is new, task by task too, and measure what was learnt and forgotten."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from surgeon import devices
from surgeon.api.common import Quiet, manifest_of
from surgeon.api.growing import apply, preview
from surgeon.api.parts import make_delta_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.hub import locate
from surgeon.errors import BadInput, printable
from surgeon.execute import Listener
from surgeon.metadata import metadata_of
from surgeon.results import Continued, Evaluation, Trained


def train(
    out: str | Path,
    config: str | Path,
    to: str | Path,
    *,
    delta_only: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Trained | None:
    """Train what surgery added to `out` by the config file `config`, and publish the run as the new folder `to`.

    `to` is absent or complete at any moment: every tensor that did not train is byte for byte that of `out`, which is
    checked. With `delta_only` it is the run's delta (`make_delta`), which `apply_delta` puts back onto the base. The
    same call continues a run that was cut off, from its last checkpoint. Under torchrun every process
    makes this call; None on all but the first. Raises BadInput for what cannot be trained, WrongSet where anything else
    would train, Diverged where the loss is no number any more.
    """
    from surgeon.training.config import load_config
    from surgeon.training.session import run_training

    loaded = load_config(Path(config))
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    hears = listener or Quiet()

    def as_delta(whole: Path) -> None:
        run = CheckpointFolder.open(whole, trust_remote_code=trust_remote_code)
        make_delta_of(run, Path(to), None, metadata_of(run), hears)

    finished = run_training(
        folder,
        manifest_of(folder),
        loaded,
        Path(to),
        device=device,
        trust_remote_code=trust_remote_code,
        listener=hears,
        deliver=as_delta if delta_only else None,
    )
    if finished.manifest is None:
        return None
    return Trained(
        out=Path(out),
        path=Path(to),
        manifest=finished.manifest,
        operations=finished.wanted.operations,
        settings=finished.settings.to_json(),
        parameters=finished.parameters,
        changes={name: (change.max_change, change.relative_change) for name, change in finished.changes.items()},
        losses=finished.losses,
        tokens=finished.tokens,
        log=finished.log,
        resumed_at=finished.resumed_at,
        seconds=finished.seconds,
        tokens_per_second=finished.tokens_per_second,
        peak_memory=finished.peak_memory,
    )


def continual(
    tasks: str | Path,
    base: str | Path,
    run: str | Path,
    *,
    revision: str | None = None,
    keep: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Continued:
    """Learn the tasks of the file `tasks` one by one, and publish the model after the last as the folder `run`.

    For each task: a surgery (PMoE: a slot), a training of what is new on the task's text and a little of the earlier
    ones', and a measurement of all tasks so far. `run` is a complete checkpoint with the measurements in
    `continual.json`, absent or complete at any moment; the same call continues what was cut off, between tasks and
    within one. With `keep` the earlier tasks' runs are kept in `run`-tasks. Raises what `apply` and `train` raise;
    BadInput too where the tasks file, its texts or the base changed since.
    """
    from surgeon.tasks.config import load_tasks
    from surgeon.tasks.course import Course, Means, run_course
    from surgeon.tasks.surgeries import at_line, check_tasks, plans_of
    from surgeon.training.config import LoadedConfig
    from surgeon.training.session import Processes, run_training

    listener = listener or Quiet()
    if Processes.of_environment().size > 1:
        raise BadInput("torchrun: `surgeon continual` runs in one process; `surgeon train` takes several")
    loaded = load_tasks(Path(tasks))
    device = devices.resolve(device)
    config = loaded.config
    plans = plans_of(loaded)
    assert plans[0] is not None
    with at_line(loaded, 0):
        preview(plans[0], base, revision=revision, trust_remote_code=trust_remote_code)
    located = locate(str(base), revision=revision)
    folder = CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)
    check_tasks(loaded, plans, folder)

    def grow(number: int, before: Path, out: Path) -> None:
        plan = plans[number]
        assert plan is not None
        # The base by the name it was given: what the manifest calls it.
        source, at = (str(base), revision) if number == 0 else (str(before), None)
        with at_line(loaded, number):
            apply(plan, source, out, revision=at, device=device, trust_remote_code=trust_remote_code, listener=listener)

    def train_on(before: Path, config: LoadedConfig, to: Path) -> None:
        out = CheckpointFolder.open(before, trust_remote_code=trust_remote_code)
        run_training(
            out,
            manifest_of(out),
            config,
            to,
            device=device,
            trust_remote_code=trust_remote_code,
            listener=listener,
        )

    def result(course: Course) -> Continued:
        return Continued(
            path=Path(run),
            base=located.repo_id or located.path.resolve().name,
            tasks=tuple(task.name for task in config.tasks),
            general=tuple(source.name for source in config.general),
            rows=tuple(course.rows),
            trainings=tuple(course.trainings),
            config=config.model_dump(mode="json", exclude_unset=True),
            fingerprint=course.fingerprint,
            resumed_after=course.resumed_after,
            kept=course.kept,
        )

    try:
        course = run_course(
            loaded,
            folder,
            Path(run),
            Means(lambda number: plans[number] is not None, grow, train_on),
            device=device,
            keep=keep,
            trust_remote_code=trust_remote_code,
            listener=listener,
            told=lambda course: json.dumps(result(course).record(), indent=1, ensure_ascii=False) + "\n",
        )
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        told = f"{printable(str(error.filename or run))}: {error.strerror or error}"
        raise BadInput(f"{told}; what is complete is kept: the same command continues") from error
    return result(course)


def evaluate(
    models: str | Path | Sequence[str | Path],
    data: str | Path | Sequence[str | Path] | Mapping[str, str | Path],
    *,
    base: str | Path | None = None,
    sources: Sequence[str] | None = None,
    length: int | None = None,
    batch: int = 8,
    most: int = 500,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Evaluation:
    """Loss, perplexity, bits per byte and accuracy of `models` on the same held-out text, with confidence intervals.

    A model is a folder, or `user/name[@revision]` on the Hub. `data` is one or more text files or folders (`NAME=FILE`
    gives a name), a data file, a training config (what it holds out), or files by name. The first row, `base` where it
    is given, is what the others are compared with, document by document. At most `most` documents a source are taken
    (0: all), in windows of `length` tokens (None: the smallest context, at most 2048), `batch` at a time. Raises
    BadInput.
    """
    from surgeon.evaluation.models import Candidate, evaluate_models
    from surgeon.evaluation.sources import open_sources

    listener = listener or Quiet()
    for option, given, least in (("length", length, 2), ("batch", batch, 1), ("most", most, 0)):
        if given is not None and given < least:
            raise BadInput(f"{option} is {given}; it is at least {least}")
    given_models = [models] if isinstance(models, str | Path) else list(models)
    if not given_models:
        raise BadInput("no model to evaluate: give a folder or a Hub id")
    device = devices.resolve(device)
    candidates = [
        Candidate.open(model, trust_remote_code=trust_remote_code)
        for model in [*([base] if base is not None else []), *given_models]
    ]
    held = open_sources(data, only=sources or (), most=most, say=listener.say)
    return evaluate_models(
        candidates,
        held,
        length=length,
        batch=batch,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        listener=listener,
    )
