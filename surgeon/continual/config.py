"""tasks.yaml: what a continual run is to do, and what each task adds to the model, as a plan.

A strict schema; nothing unknown gets through, and what can be refused before the first step is.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.yaml import (
    Place,
    check_yaml,
    editor_schema,
    keys_by_section,
    parse_yaml,
    read_text,
    where,
    written_yaml,
)
from surgeon.data.sources import absent
from surgeon.data.specs import ORIGINAL, Entry, SourceSpec
from surgeon.errors import BadInput, bad_input, printable
from surgeon.operations.pmoe_experts import PMoEExperts, RouterLoss
from surgeon.plan.plan import LoadedPlan, load_plan, parse_plan
from surgeon.plan.shipped import find_plan
from surgeon.train.backends import AttentionName
from surgeon.train.config import SHARE_TOLERANCE, LoadedConfig, OptimizerSpec, TrainConfig, first_doubled, settle

_WHAT = "tasks file"
_NAME = r"^[A-Za-z0-9_-]{1,40}$"

NOTHING = "none"

# The operation whose settings a tasks file may give in a plan's place.
SLOTS = PMoEExperts.key("op")

# As many as a training config takes: the last task may replay all of them.
_MOST_SOURCES = 100


class ExpertSettings(Entry):
    """Settings of `pmoe_experts`; what is left out has that operation's default."""

    rank: Annotated[int | None, Field(ge=1, le=2**16, description="of every LoRA")] = None
    alpha: Annotated[float | None, Field(gt=0, allow_inf_nan=False, description="LoRA's α; default: the rank")] = None
    dropout: Annotated[float | None, Field(ge=0, lt=1, description="of what a LoRA reads, in training")] = None
    targets: Annotated[list[str] | None, Field(min_length=1, description="linear modules by their last name")] = None
    threshold: Annotated[
        int | None, Field(ge=0, description="τ: layers below the router, sharing one LoRA; of the first task alone")
    ] = None
    new_slot_mass: Annotated[
        Literal["exact", "paper"] | None, Field(description="how a later task's slot enters the router")
    ] = None
    router_loss: Annotated[
        Literal["none"] | RouterLoss | None, Field(description="cross-entropy of the router against the task (Eq. 7)")
    ] = None
    trains_also: Annotated[
        list[Literal["router", "shared"]] | None,
        Field(description="what trains on with later tasks: the earlier router columns, the shared LoRA"),
    ] = None


class TaskSource(Entry):
    """One source of a task's text."""

    path: Annotated[str, Field(min_length=1, description="file (.jsonl, .json, .txt, .parquet) or folder of them")]
    name: Annotated[
        str | None, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$", description="default: the task's, numbered from the second")
    ] = None
    share: Annotated[
        float | None,
        Field(gt=0, le=1, description="share of what the task itself brings; default: what the others leave, evenly"),
    ] = None
    role: Annotated[
        Literal["task", "original"],
        Field(description="task, or original: mixed in while the task is trained, no part of its performance"),
    ] = "task"
    kind: Annotated[
        Literal["text", "chat"], Field(description="text, or chat: loss and performance on the assistant's words alone")
    ] = "text"
    field: Annotated[
        str | None, Field(description="key of the text or the messages; default `text`, or what the chat's format has")
    ] = None
    validation: Annotated[
        float | str,
        Field(description="what performance is measured on: a share of the documents, held out, or a file of its own"),
    ] = 0.01

    @model_validator(mode="after")
    def _held_out(self) -> TaskSource:
        if isinstance(self.validation, float) and not 0 < self.validation < 1:
            raise ValueError("validation must be a share above 0 and below 1, or a file: performance is measured on it")
        return self


class GeneralSource(Entry):
    """Text that no task trains on, by which general ability is measured (ΔR)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$", description="what the table calls it")]
    path: Annotated[str, Field(min_length=1, description="file (.jsonl, .json, .txt, .parquet) or folder of them")]
    kind: Annotated[Literal["text", "chat"], Field(description="as of a task's source")] = "text"
    field: Annotated[str | None, Field(description="as of a task's source")] = None


class TrainSettings(Entry):
    """How a task is trained; what is left out has the paper's value, as in train.yaml."""

    steps: Annotated[int | None, Field(ge=1, description="optimizer steps")] = None
    batch: Annotated[int | None, Field(ge=1, description="sequences a step")] = None
    micro_batch: Annotated[int | None, Field(ge=1, description="sequences at a time")] = None
    length: Annotated[int | None, Field(ge=2, description="tokens a sequence")] = None
    packing: Annotated[
        Literal["isolated", "joined"] | None, Field(description="whether attention stays within documents")
    ] = None
    optimizer: OptimizerSpec | None = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"] | None, Field(description="of the model while it trains")
    ] = None
    attention: Annotated[AttentionName | None, Field(description="attention implementation")] = None
    checkpointing: Annotated[bool | None, Field(description="recompute activations, to save memory")] = None
    save_every: Annotated[int | None, Field(ge=1, description="steps between checkpoints")] = None
    evaluate_every: Annotated[int | None, Field(ge=1, description="steps between evaluations within a task")] = None
    log_every: Annotated[int | None, Field(ge=1, description="steps between lines of the log")] = None


class TaskSpec(Entry):
    """One task: its text, and what is otherwise with it."""

    name: Annotated[str, Field(pattern=_NAME, description="letters, digits, _ and -")]
    sources: Annotated[list[TaskSource], Field(min_length=1, max_length=100)]
    plan: Annotated[
        str | ExpertSettings | None,
        Field(description="its surgery, where it is not as `plan` and `next_plan` have it; none: nothing is added"),
    ] = None
    train: TrainSettings = TrainSettings()
    replay: Annotated[float | None, Field(ge=0, le=1, description="of this task; default: as for all")] = None

    @model_validator(mode="after")
    def _own(self) -> TaskSpec:
        if all(source.role == "original" for source in self.sources):
            raise ValueError("a task needs a source of the role `task`")
        given = [source.share for source in self.sources if source.share is not None]
        total = math.fsum(given)
        whole = len(given) == len(self.sources)
        if (whole and abs(total - 1) > SHARE_TOLERANCE) or (not whole and total >= 1):
            raise ValueError(f"the sources' shares sum to {total:g}; they must sum to 1")
        return self

    def named_sources(self) -> list[tuple[str, TaskSource, float]]:
        """Its sources with their names and shares (which sum to 1)."""
        given = [source.share for source in self.sources if source.share is not None]
        missing = len(self.sources) - len(given)
        rest = (1 - math.fsum(given)) / missing if missing else 0.0
        found = []
        for number, source in enumerate(self.sources, 1):
            name = source.name or (self.name if number == 1 else f"{self.name}-{number}")
            found.append((name, source, rest if source.share is None else source.share))
        return found


class TasksConfig(Entry):
    """What a continual run is to do."""

    surgeon_continual: Annotated[Literal[1], Field(description="version of this format")]
    tasks: Annotated[list[TaskSpec], Field(min_length=1, max_length=1000)]
    seed: Annotated[int, Field(ge=0, lt=2**32, description="of new weights, the order of documents, and dropout")] = 0
    plan: Annotated[
        str | ExpertSettings,
        Field(description="the first task's surgery: settings of `pmoe_experts`, or a plan's file or name"),
    ] = ExpertSettings()
    next_plan: Annotated[
        str | ExpertSettings | None,
        Field(
            description="every later task's: settings that differ from `plan`, a plan's file or name, or none:"
            " nothing is added, and what is there trains on; default: one more slot by `plan`"
        ),
    ] = None
    train: TrainSettings = TrainSettings()
    replay: Annotated[
        float,
        Field(ge=0, le=1, description="sequences of each earlier task for one of the new task's (the paper: 0.01)"),
    ] = 0.01
    general: Annotated[
        list[GeneralSource], Field(max_length=100, description="text that no task trains on, for ΔR")
    ] = []  # noqa: RUF012  # pydantic copies it
    evaluation_sequences: Annotated[
        int, Field(ge=1, description="of each source performance is measured on so many sequences at most")
    ] = 64

    @model_validator(mode="after")
    def _fits(self) -> TasksConfig:
        names = [task.name for task in self.tasks] + [source.name for source in self.general]
        if doubled := first_doubled(names):
            raise ValueError(f"two tasks or general sources are called {doubled!r}; names must differ")
        sources = [name for task in self.tasks for name, _, _ in task.named_sources()]
        if doubled := first_doubled(sources):
            raise ValueError(f"two sources are called {doubled!r}; give one of them another `name:`")
        if len(sources) > _MOST_SOURCES:
            raise ValueError(f"{len(sources)} sources; a continual run takes {_MOST_SOURCES} at most")
        if self.surgery(0) == NOTHING:
            raise ValueError("the first task needs a plan: there is nothing yet that could train on")
        for task in self.tasks:
            if task.train.steps is None and self.train.steps is None:
                raise ValueError(f"task {task.name} has no `steps`: say so many under `train:`")
        return self

    def training(self, number: int) -> TrainConfig:
        """The training config of task `number` (from 0): its own sources, and earlier ones by `replay`.

        Earlier tasks come first, so that `domain_ids` of task k are k and its slot k - 1, whatever is replayed.
        """
        task = self.tasks[number]
        replay = self.replay if task.replay is None else task.replay
        unit = 1 / (1 + replay * number)
        sources = [
            _source(name, source, share * unit * (replay if nth < number else 1.0), self.tasks[nth].name)
            for nth in range(number + 1)
            for name, source, share in _taught(self.tasks[nth], whole=nth == number)
        ]
        asked = {**_given(self.train), **_given(task.train)}
        optimizer = {**_given(self.train.optimizer), **_given(task.train.optimizer)}
        asked["optimizer"] = OptimizerSpec(**optimizer)
        return TrainConfig(
            surgeon_train=1,
            sources=sources,
            seed=(self.seed + number) % 2**32,
            validation_sequences=self.evaluation_sequences,
            **asked,
        )

    def surgery(self, number: int) -> str | dict[str, Any]:
        """What task `number` (from 0) adds: settings of `pmoe_experts` as in a plan, a plan's name, or NOTHING."""
        own = self.tasks[number].plan
        general = self.plan if number == 0 or self.next_plan is None else self.next_plan
        chosen = general if own is None else own
        if isinstance(chosen, str):
            return chosen
        settings: dict[str, Any] = _given(self.plan) if isinstance(self.plan, ExpertSettings) else {}
        if number and isinstance(self.next_plan, ExpertSettings):
            settings |= _given(self.next_plan)
        settings |= _given(chosen)
        # The router stays where the first task put it; what a first task has not, it cannot let train on.
        for key in ("threshold",) if number else ("new_slot_mass", "trains_also"):
            settings.pop(key, None)
        return settings


def _taught(task: TaskSpec, *, whole: bool) -> list[tuple[str, TaskSource, float]]:
    """Sources of a training config, shares renormalised to 1: of an earlier task those of its own role alone."""
    named = [entry for entry in task.named_sources() if whole or entry[1].role == "task"]
    total = math.fsum(share for _, _, share in named)
    return [(name, source, share / total) for name, source, share in named]


def _source(name: str, source: TaskSource, share: float, task: str) -> SourceSpec:
    return SourceSpec(
        name=name,
        path=source.path,
        share=min(share, 1.0),
        role=ORIGINAL if source.role == "original" else f"task:{task}",
        kind=source.kind,
        field=source.field,
        validation=source.validation,
    )


def _given(settings: BaseModel | None) -> dict[str, Any]:
    """What was said, without what was left out, as plain data."""
    return {} if settings is None else settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)


@dataclass(frozen=True)
class LoadedTasks:
    """A tasks file as read; relative paths in it start at the file's folder."""

    config: TasksConfig
    source: Path
    lines: Mapping[Place, int]

    def line_of_surgery(self, number: int) -> int:
        """The line (from 1) that says what task `number` (from 0) adds; of a default, the task's own."""
        general: Place = ("next_plan",) if number and ("next_plan",) in self.lines else ("plan",)
        places: list[Place] = [("tasks", number, "plan"), general, ("tasks", number)]
        return next(self.lines[place] for place in places if place in self.lines)

    def resolve(self, path: str) -> Path:
        """A path that the file names."""
        return self.source.parent / path


def load_tasks(path: Path) -> LoadedTasks:
    """Read and check a tasks file; BadInput names file and line."""
    text = read_text(path, what=_WHAT)
    data, lines = parse_yaml(text, str(path), what=_WHAT, needs="`surgeon_continual: 1` and `tasks:`")
    known_keys = keys_by_section(TasksConfig, _SECTIONS)
    config = check_yaml(TasksConfig, data, lines, str(path), what=_WHAT, known_keys=known_keys)
    return LoadedTasks(config, path, lines)


def json_schema() -> dict[str, Any]:
    """The JSON schema of tasks files, for editors that complete YAML by it."""
    return editor_schema(TasksConfig, "surgeon tasks file")


_SECTIONS: dict[str, type[BaseModel]] = {
    "tasks": TaskSpec,
    "sources": TaskSource,
    "general": GeneralSource,
    "train": TrainSettings,
    "optimizer": OptimizerSpec,
    "plan": ExpertSettings,
    "next_plan": ExpertSettings,
    "router_loss": RouterLoss,
}


def plans_of(loaded: LoadedTasks) -> list[LoadedPlan | None]:
    """The plan of each task; None where nothing is added. Raises BadInput."""
    return [_plan_of(loaded, number) for number in range(len(loaded.config.tasks))]


def _plan_of(loaded: LoadedTasks, number: int) -> LoadedPlan | None:
    asked = loaded.config.surgery(number)
    if asked == NOTHING:
        return None
    if isinstance(asked, str):
        beside = loaded.resolve(asked)
        if beside.is_file():
            return load_plan(beside)
        with at_line(loaded, number):
            return load_plan(find_plan(asked))
    # Seeds differ by the slot's number in tensors' names.
    plan = {"surgeon": 1, "seed": loaded.config.seed, "operations": [{"op": SLOTS, **asked}]}
    with at_line(loaded, number):
        return parse_plan(written_yaml(plan), source=_name(loaded, number))


def _name(loaded: LoadedTasks, number: int) -> str:
    return f"{loaded.source} (surgery of {loaded.config.tasks[number].name})"


@contextlib.contextmanager
def at_line(loaded: LoadedTasks, number: int) -> Iterator[None]:
    """Errors about the surgery of task `number` (from 0) name the line of the tasks file, not of the plan."""
    try:
        yield
    except BadInput as error:
        made = re.escape(printable(_name(loaded, number)))
        message = re.sub(rf"^{made}:\d+: (operations\[0\] \({SLOTS}\): )?", "", str(error))
        if message == str(error) and isinstance(loaded.config.surgery(number), dict):
            # Of the base or the disk, not of what was asked.
            raise
        raise BadInput(f"{printable(str(loaded.source))}:{loaded.line_of_surgery(number)}: {message}") from None


def check_texts(loaded: LoadedTasks) -> None:
    """Raise BadInput with every text of the tasks file that is not there, by its line."""
    named: list[tuple[Place, str]] = []
    for number, task in enumerate(loaded.config.tasks):
        for nth, source in enumerate(task.sources):
            place: Place = ("tasks", number, "sources", nth)
            named.append(((*place, "path"), source.path))
            if isinstance(source.validation, str):
                named.append(((*place, "validation"), source.validation))
    named += [(("general", nth, "path"), source.path) for nth, source in enumerate(loaded.config.general)]
    found = ((place, absent(loaded.resolve(path), str(place[-1]))) for place, path in named)
    if wrong := [where(place, loaded.lines, str(loaded.source)) + why for place, why in found if why]:
        raise bad_input(wrong)


def check_tasks(loaded: LoadedTasks, plans: Sequence[LoadedPlan | None], base: CheckpointFolder) -> None:
    """Raise BadInput for settings that a later task's training would refuse."""
    context = base.config.get("max_position_embeddings")
    operations: list[str] = []
    for number, plan in enumerate(plans):
        if plan is not None:
            operations = [operation.op for operation in plan.plan.operations]
        settle(LoadedConfig(loaded.config.training(number), loaded.source), operations, context=context, processes=1)
    surgery = base.config.get("surgery")
    held = surgery if isinstance(surgery, dict) else {}
    asks = any(operation.needs_task_ids for plan in plans if plan is not None for operation in plan.plan.operations)
    none = next((number for number, plan in enumerate(plans) if plan is None), None)
    if asks and none is not None:
        raise BadInput(
            f"{printable(str(loaded.source))}:{loaded.line_of_surgery(none)}: task {none + 1} gets no slot, and"
            " `router_loss: {kind: task_id}` takes each task for a slot of its own; leave `router_loss` out, or let the"
            " task add one"
        )
    inherited = held.get("router_loss") or {}
    if held.get("expert_router") and (asks or (isinstance(inherited, dict) and inherited.get("task_id"))):
        raise BadInput(
            f"{printable(str(base.path))}: has slots already, and the router's loss takes the first task for the first"
            " slot; leave `router_loss` out (or say `router_loss: none`), or begin from the base without slots"
        )
