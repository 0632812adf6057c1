"""A continual run: the base, then for each task a surgery, a training and a measurement. A kill costs one checkpoint.

The work folder contains the surgery's output for the current task (`02-NAME.grown`), the complete runs (`01-NAME`), and
`course.json` with the measurements. Folders there are absent or complete. A task is done once its row of measurements
is written, so the same command continues after the last row.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from surgeon import (
    Checkpoint,
    LoadedConfig,
    LoadedPlan,
    __version__,
    add_record,
    apply,
    check_destination,
    open_checkpoint,
    train,
)
from surgeon.common.json_results import plain
from surgeon.common.listener import Listener
from surgeon.common.signed import Signed, check_own, read_signed, write_signed
from surgeon.common.work_folders import WorkFolder, sync, working_in
from surgeon.errors import BadInput, printable
from surgeon.lab.courses.config.loading import LoadedTasks, at_line, training_of
from surgeon.lab.courses.measuring import Measure
from surgeon.lab.courses.metrics import Measured, Measurement, measured_rows
from surgeon.lab.courses.results import Continued

STATE_FILE = "course.json"

# Training keys that do not change the results.
_IRRELEVANT = ("micro_batch", "log_every", "checkpointing")


@dataclass(frozen=True)
class Request:
    """The settings of a continual run, after all checks that are possible in advance.

    `plans` are the tasks' surgeries (None: the task adds nothing), `base` is the opened base, whose `digests` are read
    once for all rows, `target` is RUN. With `keep` the runs of earlier tasks are kept; with `take_over` the run
    continues a work folder that this user did not write here.
    """

    loaded: LoadedTasks
    plans: Sequence[LoadedPlan | None]
    base: Checkpoint
    digests: Callable[[], Mapping[str, str]]
    target: Path
    keep: bool
    device: str
    trust_remote_code: bool
    listener: Listener
    take_over: bool = False

    @cached_property
    def measure(self) -> Measure:
        """The held-out texts on which performance is measured. Raises BadInput for texts that are not valid."""
        return Measure(self.loaded, self.base)

    @cached_property
    def fingerprint(self) -> str:
        """The digest of everything that the numbers depend on. Raises BadInput as `measure` does."""
        identity = self.measure.identity()
        config = self.loaded.config.model_dump(mode="json")
        for settings in (config["train"], *(task["train"] for task in config["tasks"])):
            for key in _IRRELEVANT:
                settings.pop(key)
        content = {
            "version": __version__,
            "config": config,
            "base": self.digests(),
            "base_config": self.base.config,
            "data": identity,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def continued(self, state: State) -> Continued:
        """Return the results for `state`, as for a call that had nothing left to do."""
        config = self.loaded.config
        return Continued(
            path=self.target,
            base=self.base.id,
            tasks=tuple(task.name for task in config.tasks),
            general=tuple(source.name for source in config.general),
            rows=tuple(state.rows),
            trainings=tuple(state.trainings),
            config=config.model_dump(mode="json", exclude_unset=True),
            fingerprint=state.fingerprint,
            resumed_after=len(state.rows) - 1,
        )


@dataclass
class State:
    """The content of `course.json`: the measurements so far, and the trainings and folders that were made."""

    fingerprint: str
    rows: list[dict[str, Measured]] = field(default_factory=list)
    trainings: list[dict[str, Any]] = field(default_factory=list)
    # Inode and device of the last run, stored just before it is renamed to RUN.
    published: list[int] | None = None
    # By the name of a complete folder: digests of its files, except the shards, whose digests are in surgery.json.
    made: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> tuple[State, Signed] | None:
        """Return (the state at `path`, its signature); None where there is no file.

        Raises BadInput where the file is damaged or edited.
        """
        try:
            found = read_signed(path)
            if found is None:
                return None
            data = dict(found.data)
            return cls(rows=measured_rows(data.pop("rows")), **data), found
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadInput(
                f"{printable(str(path))}: damaged or edited ({printable(str(error))}); remove"
                f" {printable(str(path.parent))}, and the run starts from the beginning"
            ) from None

    def write(self, path: Path) -> None:
        """Write the state to `path`, flushed to disk."""
        write_signed(path, {each.name: plain(getattr(self, each.name)) for each in fields(self)})


def work_folder(target: Path) -> Path:
    """Return the folder of a run in progress: `.NAME.continual` next to RUN."""
    return target.with_name(f".{target.name}.continual")


def kept_folder(target: Path) -> Path:
    """Return the folder for kept runs of all tasks but the last: `NAME-tasks` next to RUN."""
    return target.with_name(f"{target.name}-tasks")


def is_under_way(target: Path) -> bool:
    """Return whether an earlier call was interrupted; RUN may exist already, but the work folder is not removed yet."""
    return (work_folder(target) / STATE_FILE).exists()


def run_course(request: Request) -> Continued:
    """Make the rest of a continual run, and publish the last task's run with its measurements in continual.json.

    Raises BadInput where that is not possible, and the errors of `apply` and `train`; complete parts are kept for the
    next call. With `keep` the earlier runs are moved to `kept_folder`.
    """
    base, target, listener = request.base, request.target, request.listener
    _check_places(target, base.path, keep=request.keep)
    measure, fingerprint = request.measure, request.fingerprint
    work = work_folder(target)
    with working_in(work, target=target, marker=STATE_FILE) as folder:
        course = _Course(request, measure, _begun_or_new(request, fingerprint, work))
        if published := course.is_published():
            listener.say(f"{printable(str(target))} was already complete; nothing to do")
        else:
            for note in measure.notes:
                listener.say(note)
            course.go_back()
        resumed_after = max(0, len(course.state.rows) - 1)
        if not published:
            course.carry_out()
            folder.check_there()
            course.publish()
        return replace(request.continued(course.state), resumed_after=resumed_after, kept=course.clean_up(folder))


class _Course:
    """A continual run in progress."""

    def __init__(self, request: Request, measure: Measure, state: State) -> None:
        """Set up a run that continues after the rows of `state`."""
        self.request = request
        self.measure = measure
        self.state = state
        self.config = request.loaded.config
        self.work = work_folder(request.target)

    def run_of(self, number: int) -> Path:
        """Return the folder of the run of task `number` (from 0)."""
        return self.work / f"{number + 1:02}-{self.config.tasks[number].name}"

    def go_back(self) -> None:
        """Remove rows whose runs are missing or changed, and folders that are damaged, so that they are made again."""
        done = len(self.state.rows) - 1
        # Only the last complete run is needed, for the next task or for RUN; with `keep` every run is needed.
        needed = range(done) if self.request.keep else range(max(0, done - 1), done)
        while wrong := next(((n, why) for n in needed if (why := self._damage(self.run_of(n)))), None):
            number, why = wrong
            self.request.listener.say(f"{why}, so task {number + 1} is learnt again")
            del self.state.rows[number + 1 :]
            needed = range(number) if self.request.keep else range(max(0, number - 1), number)
        for number in range(max(0, len(self.state.rows) - 1), len(self.config.tasks)):
            for folder in (self.run_of(number), self._grown_of(number)):
                if folder.exists() and (why := self._damage(folder)):
                    self.request.listener.say(f"{why}, so it is made again")
                    shutil.rmtree(folder)

    def _damage(self, folder: Path) -> str | None:
        """Return why a folder differs from what was written there, in words; None where it does not differ."""
        shown = printable(folder.name)
        if not folder.exists():
            return f"{shown} is gone"
        try:
            opened = open_checkpoint(folder, trust_remote_code=self.request.trust_remote_code)
            found = opened.side_digests()
            if (listed := self.state.made.get(folder.name)) is None:
                # Without this entry only the folder's own manifest would confirm its content.
                return f"{shown} is not in {STATE_FILE}"
            for name in sorted(found.keys() | listed.keys()):
                if found.get(name) != listed.get(name):
                    return f"{shown}/{printable(name)} is not what was written"
            if changed := opened.changed_tensors():
                return f"{shown}: {printable(changed[0])} is not what was written"
        except BadInput as error:
            return f"{shown} cannot be used ({error})"
        return None

    def _note_made(self, folder: Path) -> None:
        """Record the digests of a complete folder's files in `course.json`."""
        opened = open_checkpoint(folder, trust_remote_code=self.request.trust_remote_code)
        self.state.made[folder.name] = opened.side_digests()
        self.state.write(self.work / STATE_FILE)

    def carry_out(self) -> None:
        """Make every task that has no row yet, after measuring the base."""
        tasks, say = self.config.tasks, self.request.listener.say
        general = [source.name for source in self.config.general]
        if not self.state.rows:
            self._measure(self.request.base.path, [*(task.name for task in tasks), *general], "the base")
        else:
            say(f"continuing after {len(self.state.rows) - 1} of {len(tasks)} tasks")
        for number in range(len(self.state.rows) - 1):
            self._drop(number)
        for number in range(len(self.state.rows) - 1, len(tasks)):
            task = tasks[number]
            say(f"task {number + 1} of {len(tasks)}: {task.name}")
            before = self.run_of(number - 1) if number else self.request.base.path
            run = self.run_of(number)
            if not run.exists():
                self._train(number, self._grown(number, before), run)
                self._note_made(run)
            self.state.trainings[number:] = [_training_of(run)]
            so_far = [each.name for each in tasks[: number + 1]]
            self._measure(run, [*so_far, *general], f"after {task.name}")
            self._drop(number)

    def _grown(self, number: int, before: Path) -> Path:
        """Return the checkpoint that task `number` trains: its surgery's output, or `before` without a surgery."""
        request, plan = self.request, self.request.plans[number]
        if plan is None:
            return before
        grown = self._grown_of(number)
        if not grown.exists():
            # Pass the base by its given name, because the manifest records that name.
            source, revision = (request.base.name, request.base.revision) if number == 0 else (str(before), None)
            with at_line(request.loaded, number):
                apply(
                    plan,
                    source,
                    grown,
                    revision=revision,
                    device=request.device,
                    trust_remote_code=request.trust_remote_code,
                    listener=request.listener,
                )
            self._note_made(grown)
        return grown

    def _grown_of(self, number: int) -> Path:
        """Return the folder of the surgery's output for task `number`."""
        return self.run_of(number).with_name(f"{self.run_of(number).name}.grown")

    def _train(self, number: int, grown: Path, run: Path) -> None:
        """Train task `number` on the checkpoint `grown`, and write the run to the folder `run`."""
        request = self.request
        train(
            grown,
            LoadedConfig(training_of(self.config, number), request.loaded.source),
            run,
            device=request.device,
            trust_remote_code=request.trust_remote_code,
            listener=request.listener,
            take_over=request.take_over,
        )

    def _measure(self, folder: Path, names: list[str], what: str) -> None:
        """Measure a checkpoint on the texts `names`, and append the row to `course.json`; `what` is for messages."""
        listener = self.request.listener
        listener.begin(f"measuring {what}", self.measure.sequences(names), "sequences")
        row: Measurement = self.measure.of(
            folder,
            names,
            device=self.request.device,
            attention=self.config.train.attention,
            trust_remote_code=self.request.trust_remote_code,
            advance=listener.advance,
        )
        self.state.rows.append(dict(row))
        self.state.write(self.work / STATE_FILE)
        listener.say(f"{what}: " + ", ".join(f"{name} {found.accuracy:.1%}" for name, found in row.items()))

    def _drop(self, number: int) -> None:
        """Remove the folders that task `number`, which is done, was made from."""
        run = self.run_of(number)
        made_of = [self._grown_of(number)]
        if number and not self.request.keep:
            made_of.append(self.run_of(number - 1))
        for folder in (*made_of, *self.work.glob(f".{run.name}*")):
            if folder.is_dir():
                shutil.rmtree(folder)

    def is_published(self) -> bool:
        """Return whether RUN is this run's own result, published by an earlier call that did not finish cleaning up."""
        if self.state.published is None or not self.request.target.is_dir():
            return False
        found = self.request.target.stat()
        return [found.st_ino, found.st_dev] == self.state.published

    def publish(self) -> None:
        """Rename the last task's run to RUN, with its record. Raises BadInput where RUN was created in the meantime."""
        last = self.run_of(len(self.config.tasks) - 1)
        add_record(last, self.request.continued(self.state).text())
        found = last.stat()
        self.state.published = [found.st_ino, found.st_dev]
        self.state.write(self.work / STATE_FILE)
        if os.path.lexists(self.request.target):
            raise BadInput(
                f"{printable(str(self.request.target))}: exists now; it was not there when the run began. Nothing lost:"
                " move it away and run the same command again"
            )
        last.rename(self.request.target)
        sync(self.request.target.parent)

    def clean_up(self, folder: WorkFolder) -> Path | None:
        """Remove the work folder. With `keep`, first move the earlier runs to the kept folder.

        Return the kept folder; None where nothing is kept. Raises BadInput where it is a symbolic link.
        """
        runs = [self.run_of(number) for number in range(len(self.config.tasks) - 1)]
        kept = kept_folder(self.request.target)
        if self.request.keep and any(run.exists() for run in runs):
            kept.mkdir(exist_ok=True)
            if kept.is_symlink():
                raise BadInput(f"{printable(str(kept))}: a link; --keep puts the tasks' runs there, remove it")
            for run in runs:
                if run.exists():
                    run.rename(kept / run.name)
        # Remove the state last: while it exists, the same command knows that RUN is its own.
        folder.remove(last=STATE_FILE)
        return kept if self.request.keep and kept.is_dir() else None


def _check_places(target: Path, base: Path, *, keep: bool) -> None:
    """Raise BadInput where RUN cannot be created; a published RUN whose work folder still exists is allowed."""
    found = State.read(work_folder(target) / STATE_FILE)
    if found is not None and found[0].published is not None and target.is_dir():
        return
    check_destination(target, base)
    if target.is_dir():
        raise BadInput(f"{printable(str(target))}: exists; give a new folder in it, such as run")
    kept = kept_folder(target)
    if keep and os.path.lexists(kept):
        raise BadInput(f"{printable(str(kept))}: exists; --keep puts the tasks' runs there, move it away")


def _training_of(run: Path) -> dict[str, Any]:
    """Return the last training's entry in `surgery.json`, without its config and its list of tensors."""
    manifest = open_checkpoint(run, trust_remote_code=True).manifest
    assert manifest is not None
    entry = manifest.training[-1]
    return {
        "operations": [operation.op for operation in manifest.operations],
        "settings": entry.settings,
        "steps": entry.steps,
        "tokens": entry.tokens,
        "losses": entry.losses,
        "tensors": len(entry.tensors),
    }


def _begun_or_new(request: Request, fingerprint: str, work: Path) -> State:
    """Return the state to continue from, or a new one.

    Raises BadInput where the state belongs to another run, or this user did not write it here.
    """
    found = State.read(work / STATE_FILE)
    state, origin = (State(fingerprint), None) if found is None else found
    if state.fingerprint != fingerprint:
        raise BadInput(
            f"{printable(str(work))}: holds another run (the tasks file, its texts, the base or surgeon changed); undo"
            " the change, remove this folder, or choose another RUN"
        )
    holds = f"this run after {max(0, len(state.rows) - 1)} of its tasks"
    check_own(origin, work, holds, take_over=request.take_over, say=request.listener.say)
    if origin is not None and not origin.here:
        state.write(work / STATE_FILE)
    return state
