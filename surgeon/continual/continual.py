"""`surgeon continual`: tasks one after the other, each with a surgery, a training and a measurement of all so far."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon import Checkpoint, LoadedPlan, open_checkpoint, preview
from surgeon.common import devices
from surgeon.common.disk_space import writing
from surgeon.common.distributed import Ranks
from surgeon.common.json_results import plain
from surgeon.common.listener import Listener, Quiet
from surgeon.common.tables import FittedTable
from surgeon.continual.config.loading import LoadedTasks, at_line, load_tasks
from surgeon.continual.config.settings import check_tasks, check_texts, plans_of
from surgeon.continual.metrics import Measurement, backward_transfer, general_ability_delta, overall_performance
from surgeon.errors import BadInput, printable

if TYPE_CHECKING:
    from surgeon.continual.course import Course, Request


@dataclass(frozen=True)
class Continued:
    """What a continual run made of a base, task by task.

    `rows[0]` is what was measured of the base, on every task and general source, `rows[t]` after the t-th task, on the
    tasks so far and the general sources. Performance is token accuracy on held-out labels, where the paper has
    benchmark scores. `trainings` are the tasks' (settings, steps, tokens, losses), `kept` is the folder of the earlier
    tasks' runs where they were kept, `config` the tasks file.
    """

    path: Path
    base: str
    tasks: tuple[str, ...]
    general: tuple[str, ...]
    rows: tuple[Measurement, ...]
    trainings: tuple[dict[str, Any], ...]
    config: dict[str, Any]
    fingerprint: str
    resumed_after: int = 0
    kept: Path | None = None

    def __repr__(self) -> str:
        delta = "" if self.delta[-1] is None else f", ΔR {self.delta[-1]:+.4f}"
        shown = f"OP {self.overall[-1]:.4f}, BWT {self.backward[-1]:+.4f}{delta}"
        return f"Continued({str(self.path)!r}, {len(self.tasks)} tasks, {shown})"

    @property
    def matrix(self) -> list[list[float]]:
        """R[t][i]: performance on task i after training on task t, i ≤ t, from 0."""
        return [[row[name].accuracy for name in self.tasks[: number + 1]] for number, row in enumerate(self.rows[1:])]

    @property
    def overall(self) -> list[float]:
        """OP after each task."""
        return [overall_performance(self.matrix, t) for t in range(len(self.tasks))]

    @property
    def backward(self) -> list[float]:
        """BWT after each task."""
        return [backward_transfer(self.matrix, t) for t in range(len(self.tasks))]

    @property
    def delta(self) -> list[float | None]:
        """ΔR after each task; None where there are no general sources."""
        before, *after = ([row[name].accuracy for name in self.general] for row in self.rows)
        return [general_ability_delta(before, row) for row in after]

    def record(self) -> dict[str, Any]:
        """As plain data: what `continual.json` of the run holds."""
        return {
            "surgeon_continual": 1,
            "base": self.base,
            "tasks": list(self.tasks),
            "general": list(self.general),
            "performance": "token accuracy on held-out labels",
            "base_accuracy": {name: found.accuracy for name, found in self.rows[0].items()},
            "matrix": self.matrix,
            "overall_performance": self.overall,
            "backward_transfer": self.backward,
            "general_ability_delta": self.delta,
            "measured": [
                {name: plain(found) | {"accuracy": found.accuracy, "loss": found.loss} for name, found in row.items()}
                for row in self.rows
            ],
            "trainings": list(self.trainings),
            "config": self.config,
            "fingerprint": self.fingerprint,
        }

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `path`, `kept`, `resumed_after`: of this call, and not in `continual.json`: the run; with `--keep` the
                earlier tasks' models; the tasks that were done before
            `surgeon_continual`, `base`, `tasks`, `general`: version of the format; the base; names of the tasks in
                order, and of general sources
            `performance`, `base_accuracy`: the measure, in words; the base's, by task and general source
            `matrix`: after each task, its accuracy on that task and on all before it
            `overall_performance`, `backward_transfer`, `general_ability_delta`: OP, BWT and ΔR after each task; ΔR is
                null without general sources
            `measured`: for the base and after each task, by task and general source: `right`, `tokens`, `nats`,
                `accuracy`, `loss`
            `trainings`: each task's `operations`, `settings`, `steps`, `tokens`, `losses` (by source, before and
                after), `tensors` (how many trained)
            `config`, `fingerprint`: the tasks file as it was read; the digest of everything that the numbers depend on
        """
        return {
            "path": str(self.path),
            "kept": plain(self.kept),
            "resumed_after": self.resumed_after,
            **self.record(),
        }


def continual(
    tasks: str | Path,
    base: str | Path,
    run: str | Path,
    *,
    revision: str | None = None,
    keep: bool = False,
    take_over: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Continued:
    """Learn tasks one by one, and publish the model after the last as the folder `run`.

    For each task: a surgery (PMoE: a slot), a training of what is new on the task's text and a little of the earlier
    ones', and a measurement of all tasks so far. `run` is a complete checkpoint with the measurements in
    `continual.json`, absent or complete at any moment; the same call continues what was cut off, between tasks and
    within one.

    Args:
        tasks: The tasks file.
        base: The base checkpoint: a folder or a Hub id.
        run: The folder of the model after the last task.
        revision: Branch, tag or commit of a Hub id.
        keep: Whether the earlier tasks' runs are kept, in `run`-tasks.
        take_over: Whether to continue what this user did not begin in this place.
        device: auto, cpu or cuda.
        trust_remote_code: Whether the base's own code may run.
        listener: Receives progress and notes.

    Returns:
        Performance on every task after every task, and what the paper makes of it.

    Raises:
        BadInput: The tasks file, its texts or the base are not as they must be, or changed since the run began; also
            what `apply` and `train` raise.
    """
    devices.check(device)
    if Ranks.of_environment().size > 1:
        raise BadInput("torchrun: `surgeon continual` runs in one process; `surgeon train` takes several")
    loaded = load_tasks(Path(tasks))
    plans, opened = _checked(loaded, base, revision, trust_remote_code=trust_remote_code)

    from surgeon.continual.course import Request, run_course

    # A course of many hours is of the commit that was read here, whatever becomes of a branch.
    request = Request(
        loaded,
        plans,
        opened,
        Path(run),
        keep,
        devices.resolve(device),
        trust_remote_code,
        listener or Quiet(),
        take_over,
    )
    with writing(Path(run), kept="what is complete is kept: the same command continues"):
        course = run_course(request, lambda course: _record_of(_continued(request, course)))
    return _continued(request, course)


def _checked(
    loaded: LoadedTasks, base: str | Path, revision: str | None, *, trust_remote_code: bool
) -> tuple[list[LoadedPlan | None], Checkpoint]:
    """Return the tasks' surgeries (None: a task has none) and the opened base.

    Raises BadInput where the tasks' texts, plans and trainings do not fit each other or the base.
    """
    check_texts(loaded)
    plans = plans_of(loaded)
    assert plans[0] is not None
    with at_line(loaded, 0):
        preview(plans[0], base, revision=revision, trust_remote_code=trust_remote_code)
    opened = open_checkpoint(base, revision=revision, trust_remote_code=trust_remote_code)
    check_tasks(loaded, plans, opened)
    return plans, opened


def _continued(request: Request, course: Course) -> Continued:
    """Return what a finished course made of the base of its request."""
    config = request.loaded.config
    return Continued(
        path=request.target,
        base=request.base.id,
        tasks=tuple(task.name for task in config.tasks),
        general=tuple(source.name for source in config.general),
        rows=tuple(course.rows),
        trainings=tuple(course.trainings),
        config=config.model_dump(mode="json", exclude_unset=True),
        fingerprint=course.fingerprint,
        resumed_after=course.resumed_after,
        kept=course.kept,
    )


def _record_of(continued: Continued) -> str:
    """Return the text of `continual.json`."""
    return json.dumps(continued.record(), indent=1, ensure_ascii=False) + "\n"


def continued_view(continued: Continued) -> RenderableType:
    """Performance on every task after every task, and what the paper makes of it."""
    names = (*continued.tasks, *continued.general)
    table = FittedTable("accuracy (loss) after")
    for name in names:
        table.add_column(name)
    for column in ("OP", "BWT", "ΔR"):
        table.add_column(column, style="bold")
    for number, row in enumerate(continued.rows):
        cells = [f"{row[name].accuracy:.1%} ({row[name].loss:.3f})" if name in row else "" for name in names]
        judged = ("", "", "")
        if number:
            delta = continued.delta[number - 1]
            judged = (
                f"{continued.overall[number - 1]:.1%}",
                f"{100 * continued.backward[number - 1]:+.1f}",
                "" if delta is None else f"{100 * delta:+.1f}",
            )
        table.add_row(continued.tasks[number - 1] if number else Text("(the base)", style="dim"), *cells, *judged)
    notes = [Text("token accuracy on held-out labels; BWT and ΔR in points", style="dim")]
    if not continued.general:
        notes.append(Text("no `general:` sources, so ΔR was not measured", style="dim"))
    done = Text(f"{printable(str(continued.path))} is complete", style="bold green")
    kept = [] if continued.kept is None else [Text(f"earlier tasks' models: {printable(str(continued.kept))}")]
    return Group(table, *notes, Text(), done, *kept)
