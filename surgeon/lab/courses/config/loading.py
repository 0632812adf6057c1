"""Load tasks.yaml: its values with their lines, and checks that all texts exist.

It also derives the settings of each task of a continual run: its plan, its training config, and checks against the
base.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon import (
    Checkpoint,
    LoadedConfig,
    LoadedPlan,
    OptimizerSpec,
    SourceSpec,
    TextSpec,
    TrainConfig,
    check_source,
    find_plan,
    load_plan,
    overrides_of,
    parse_plan,
    settle,
    shipped_tasks,
)
from surgeon.common.checked_yaml import Loaded, check_yaml, editor_schema
from surgeon.common.formatting import did_you_mean
from surgeon.common.places import find_file, from_here
from surgeon.common.schema import ORIGINAL
from surgeon.common.yaml import Document, Place, read_yaml, written_yaml
from surgeon.errors import BadInput, bad_input, printable
from surgeon.lab.courses.config.schema import NOTHING, GeneralSource, TasksConfig, TaskSource, TaskSpec

_WHAT = "tasks file"

# The operation whose settings a tasks file may give instead of a plan.
SLOTS = "pmoe_experts"


@dataclass(frozen=True)
class LoadedTasks(Loaded[TasksConfig]):
    """A tasks file as loaded; where the file has `rows`, with the settings of one row applied."""

    def where_surgery(self, number: int) -> str:
        """Return the place in the file that sets the surgery of task `number` (from 0), as the beginning of an error.

        Where the default applies, it is the line of the task.
        """
        general: Place = ("next_plan",) if number and self._has(("next_plan",)) else ("plan",)
        places: list[Place] = [("tasks", number, "plan"), general, ("tasks", number)]
        return self.where(*next(place for place in places if self._has(place)))

    def _has(self, place: Place) -> bool:
        """Return whether the file sets a value at this place, or an option sets one at or below it."""
        return place in self.lines or any(at[: len(place)] == place for at in self.given)


def load_tasks(
    tasks: str | Path,
    overrides: Sequence[str] = (),
    *,
    texts: Mapping[str, str | Path] | None = None,
    row: str | None = None,
) -> dict[str, LoadedTasks]:
    """Read and check a tasks file, given by path or by a shipped name, once for each of its rows.

    Args:
        tasks: the file or its name.
        overrides: values that replace the file's and the rows': `train.steps=10`.
        texts: files by the names of sources; each replaces the `path` of its source.
        row: the only row to load.

    Returns:
        the loaded tasks by the row's name; for a file without rows, by an empty name.

    Raises:
        BadInput: with file and line, for all mistakes of the first row that has any.
    """
    path = find_file(tasks, shipped_tasks(), what=_WHAT)
    rows = _rows(_read(path).data)
    if row is not None and row not in rows:
        has = f"; its rows: {', '.join(rows)}" if "" not in rows else ", which has no `rows`"
        raise BadInput(f"--row {printable(row)}: no row of {printable(str(path))}{has}")
    chosen = rows if row is None else {row: rows[row]}
    return {name: _load(path, name, settings, overrides, texts or {}) for name, settings in chosen.items()}


def _read(path: Path) -> Document:
    """Read a tasks file, unchecked."""
    return read_yaml(path, what=_WHAT, needs="`surgeon_continual: 1` and `tasks:`")


def _rows(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of each row by its name; invalid rows are left to the schema check."""
    rows = data.get("rows")
    well = isinstance(rows, dict) and rows and all(isinstance(settings, dict) for settings in rows.values())
    return {str(name): settings for name, settings in rows.items()} if well and isinstance(rows, dict) else {"": {}}


def _load(
    path: Path, row: str, settings: Mapping[str, Any], overrides: Sequence[str], texts: Mapping[str, str | Path]
) -> LoadedTasks:
    """Load the tasks file for one row: apply the row's `settings`, the overrides and the texts, and check the result.

    Raises BadInput for values that are not valid, names in `texts` that no source has, and sources without a path.
    """
    # Read the file again for each row, because a row's settings change the document.
    document = _read(path)
    data = document.data
    # `rows` is removed while the row's settings and the overrides are applied, and put back before the check.
    rows = {key: data.pop(key) for key in ("rows",) if row}
    document.override(overrides_of(settings), example="train.steps=10", called=f"row {row}:")
    document.override(overrides, example="train.steps=10")
    unknown = dict(texts)
    for place, name, source in _named(data):
        if name in texts:
            unknown.pop(name, None)
            source["path"] = from_here(str(texts[name]))
            document.given[(*place, "path")] = f"--text {name}={texts[name]}"
    data |= rows
    config = check_yaml(TasksConfig, document).model_copy(update={"rows": None})
    loaded = LoadedTasks(config, path, document.lines, document.given)
    if unknown:
        name, file = next(iter(unknown.items()))
        guess = did_you_mean(name, [known for _, known, _ in _named(data)])
        raise BadInput(f"--text {printable(name)}={printable(str(file))}: the file has no such source{guess}")
    if lacking := [(place, name) for place, name, source in _named(data) if not source.get("path")]:
        raise bad_input(
            [
                f"{loaded.where(*place)}source {name} has no `path`; add one, or --text {name}=FILE"
                for place, name in lacking
            ]
        )
    return loaded


def _named(data: Mapping[str, Any]) -> Iterator[tuple[Place, str, dict[str, Any]]]:
    """Yield (place in the file, name, mapping) for every source in a tasks file's data.

    The data are not checked yet, so an entry that is no mapping counts as an empty one.
    """
    for number, task in enumerate(_mappings(data.get("tasks"))):
        for nth, source in enumerate(_mappings(task.get("sources"))):
            default = str(task.get("name")) if nth == 0 else f"{task.get('name')}-{nth + 1}"
            yield ("tasks", number, "sources", nth), str(source.get("name") or default), source
    for key in ("memory", "general"):
        for number, source in enumerate(_mappings(data.get(key))):
            yield (key, number), str(source.get("name")), source


def _mappings(found: Any) -> list[dict[str, Any]]:
    """Return the entries of a list, with an empty mapping in place of entries that are no mapping."""
    return [entry if isinstance(entry, dict) else {} for entry in found] if isinstance(found, list) else []


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of tasks files, for completion in editors."""
    return editor_schema(TasksConfig, "surgeon tasks file")


def surgery_name(loaded: LoadedTasks, number: int) -> str:
    """Return the name, in errors, of the plan that is made from the surgery settings of task `number`."""
    return f"{loaded.source} (surgery of {loaded.config.tasks[number].name})"


@contextlib.contextmanager
def at_line(loaded: LoadedTasks, number: int) -> Iterator[None]:
    """Make errors about the surgery of task `number` (from 0) name the line of the tasks file instead of the plan's."""
    try:
        yield
    except BadInput as error:
        made = re.escape(printable(surgery_name(loaded, number)))
        message = re.sub(rf"^{made}:\d+: (operations\[0\] \({SLOTS}\): )?", "", str(error))
        if message == str(error) and isinstance(loaded.config.surgery(number), dict):
            # The error is about the base or the disk, not about the settings.
            raise
        raise BadInput(f"{loaded.where_surgery(number)}{message}") from None


def training_of(config: TasksConfig, number: int) -> TrainConfig:
    """Return the training config of task `number` (from 0).

    Its sources are the task's own sources and, with the weight `replay`, sources of earlier tasks and the memory.
    Sources of earlier tasks come first, so that the `domain_ids` of task k are k and its slot is k - 1, whatever is
    replayed.
    """
    task = config.tasks[number]
    replay = config.replay if task.replay is None else task.replay
    memory = [SourceSpec(**text.model_dump(), share=1.0, role=ORIGINAL, validation=0.0) for text in config.memory]
    unit = 1 / (1 + replay * (number + len(memory)))
    sources = [
        _source(name, source, share * unit * (replay if nth < number else 1.0), config.tasks[nth].name)
        for nth in range(number + 1)
        for name, source, share in _taught(config.tasks[nth], whole=nth == number)
    ]
    sources += [text.model_copy(update={"share": replay * unit}) for text in memory if replay]
    return TrainConfig(
        surgeon_train=1,
        sources=sources,
        seed=(config.seed + number) % 2**32,
        validation_sequences=config.validation_sequences,
        optimizer=OptimizerSpec(**{**config.train.given_optimizer(), **task.train.given_optimizer()}),
        **config.training(number),
    )


def _taught(task: TaskSpec, *, whole: bool) -> list[tuple[str, TaskSource, float]]:
    """Return (name, source, share) of a task's sources; shares sum to 1. Without `whole`, only of role `task`."""
    named = [entry for entry in task.named_sources() if whole or entry[1].role == "task"]
    total = math.fsum(share for _, _, share in named)
    return [(name, source, share / total) for name, source, share in named]


def _source(name: str, source: TaskSource, share: float, task: str) -> SourceSpec:
    """Return a task's source as a source of a training config."""
    return SourceSpec(
        name=name,
        path=source.path,
        share=min(share, 1.0),
        role=ORIGINAL if source.role == "original" else f"task:{task}",
        validation=source.validation,
        **source.reading,
    )


def own_sources(config: TasksConfig, number: int) -> list[SourceSpec]:
    """Return the sources of task `number` (from 0) for a training config, without sources of earlier tasks."""
    task = config.tasks[number]
    return [_source(name, source, share, task.name) for name, source, share in task.named_sources()]


def texts_of(sources: Sequence[GeneralSource]) -> list[TextSpec]:
    """Return general or memory sources as texts of a training config."""
    return [TextSpec(**text.model_dump()) for text in sources]


def every_text(config: TasksConfig) -> list[tuple[Place, TextSpec]]:
    """Return (place in the file, text) for every text: first the tasks' sources, then `general` and `memory`."""
    found: list[tuple[Place, TextSpec]] = [
        (("tasks", number, "sources", nth), source)
        for number in range(len(config.tasks))
        for nth, source in enumerate(own_sources(config, number))
    ]
    for key, listed in (("general", config.general), ("memory", config.memory)):
        found += [((key, nth), text) for nth, text in enumerate(texts_of(listed))]
    return found


def check_texts(loaded: LoadedTasks) -> None:
    """Raise BadInput that lists every text of the tasks file that does not exist, with its line."""
    texts = every_text(loaded.config)
    wrong = [f"{loaded.where(*place, key)}{why}" for place, text in texts for key, why in check_source(text, loaded)]
    if wrong:
        raise bad_input(wrong)


def plans_of(loaded: LoadedTasks) -> list[LoadedPlan | None]:
    """Return the plan of each task; None for a task that adds nothing. Raises BadInput for a plan that is not valid."""
    return [_plan_of(loaded, number) for number in range(len(loaded.config.tasks))]


def _plan_of(loaded: LoadedTasks, number: int) -> LoadedPlan | None:
    """Return the plan of task `number` (from 0); None: it adds nothing. Raises BadInput for an invalid plan."""
    asked = loaded.config.surgery(number)
    if asked == NOTHING:
        return None
    if isinstance(asked, str):
        with at_line(loaded, number):
            found = find_plan(asked, beside=loaded.source.parent)
        return load_plan(found)
    # One seed is enough: tensors' names contain the slot's number, so slots get different random weights.
    plan = {"surgeon": 1, "seed": loaded.config.seed, "operations": [{"op": SLOTS, **asked}]}
    with at_line(loaded, number):
        return parse_plan(written_yaml(plan), source=surgery_name(loaded, number))


def check_tasks(loaded: LoadedTasks, plans: Sequence[LoadedPlan | None], base: Checkpoint) -> None:
    """Raise BadInput for settings that some task's training would refuse, also because of slots in the base."""
    context = base.context
    operations: list[str] = []
    for number, plan in enumerate(plans):
        if plan is not None:
            operations = [operation.op for operation in plan.plan.operations]
        settle(
            LoadedConfig(training_of(loaded.config, number), loaded.source), operations, context=context, processes=1
        )
    surgery = base.config.get("surgery")
    held = surgery if isinstance(surgery, dict) else {}
    asks = any(operation.needs_task_ids for plan in plans if plan is not None for operation in plan.plan.operations)
    none = next((number for number, plan in enumerate(plans) if plan is None), None)
    if asks and none is not None:
        raise BadInput(
            f"{loaded.where_surgery(none)}task {none + 1} gets no slot, and"
            " `router_loss: {kind: task_id}` takes each task for a slot of its own; leave `router_loss` out, or let the"
            " task add one"
        )
    inherited = held.get("router_loss") or {}
    if held.get("expert_router") and (asks or (isinstance(inherited, dict) and inherited.get("task_id"))):
        raise BadInput(
            f"{printable(str(base.path))}: has slots already, and the router's loss takes the first task for the first"
            " slot; leave `router_loss` out (or say `router_loss: none`), or begin from the base without slots"
        )
