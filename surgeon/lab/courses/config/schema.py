"""The schema of tasks.yaml, the file of a continual run. Unknown keys and invalid values are refused."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from surgeon import LayersSpec, LoraSpec, RouterLoss, RunSettings, UnlabelledSpec
from surgeon.common.schema import Entry, check_shares, first_doubled

_NAME = r"^[A-Za-z0-9_-]{1,40}$"

NOTHING = "none"
_PATH = "file (.jsonl, .json, .txt, .parquet) or folder of them; left out: --text NAME=FILE gives it"

# Pairs of keys of which a training may have only one.
EXCLUDING = (("steps", "epochs"), ("what", "lora"))

# The limit of a training config, because the last task may replay all sources.
_MOST_SOURCES = 100


class ExpertSettings(Entry):
    """Settings of `pmoe_experts`. Keys that are left out have that operation's defaults."""

    rank: Annotated[int | None, Field(ge=1, le=2**16, description="rank of every LoRA")] = None
    alpha: Annotated[float | None, Field(gt=0, allow_inf_nan=False, description="LoRA's α; default: the rank")] = None
    dropout: Annotated[float | None, Field(ge=0, lt=1, description="dropout on a LoRA's input, in training")] = None
    targets: Annotated[list[str] | None, Field(min_length=1, description="linear modules by their last name")] = None
    threshold: Annotated[
        int | None,
        Field(ge=0, description="τ: number of layers below the router, which share one LoRA; first task only"),
    ] = None
    new_slot_mass: Annotated[
        Literal["exact", "paper"] | None,
        Field(description="mass of a later task's slot in the router at first; exact: zero; paper: as in the paper"),
    ] = None
    router_loss: Annotated[
        Literal["none"] | RouterLoss | None, Field(description="cross-entropy of the router against the task (Eq. 7)")
    ] = None
    trains_also: Annotated[
        list[Literal["router", "shared"]] | None,
        Field(description="earlier tensors that later tasks train too: router columns, the shared LoRA"),
    ] = None


class TaskSource(UnlabelledSpec):
    """One source of a task's text."""

    path: Annotated[str, Field(description=_PATH)] = ""
    name: Annotated[
        str | None, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$", description="default: the task's, numbered from the second")
    ] = None
    share: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="share of the task's own sequences; default: an equal part of what the other shares leave",
        ),
    ] = None
    role: Annotated[
        Literal["task", "original"],
        Field(description="task; original: mixed in, but not counted in the task's performance"),
    ] = "task"
    validation: Annotated[
        float | str,
        Field(description="held-out text that performance is measured on: a share of the documents, or a file"),
    ] = 0.01

    @model_validator(mode="after")
    def _held_out(self) -> TaskSource:
        """Raise ValueError unless some text of the source is held out."""
        if isinstance(self.validation, float) and not 0 < self.validation < 1:
            raise ValueError("validation must be a share above 0 and below 1, or a file: performance is measured on it")
        return self


class GeneralSource(UnlabelledSpec):
    """Text that belongs to no task: general ability (ΔR) is measured on it, or every task replays it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$", description="name in results")]
    path: Annotated[str, Field(description=_PATH)] = ""


class TrainSettings(RunSettings):
    """How a task trains. Keys that are left out have the defaults of a training config."""

    steps: Annotated[int | None, Field(ge=1, description="optimizer steps")] = None
    epochs: Annotated[
        float | None, Field(gt=0, description="instead of `steps`, without replay: passes through the task's text")
    ] = None
    what: Annotated[
        Literal["last", "added", "base", "all"] | LayersSpec | None,
        Field(description="what trains, as in a training config; default: the last surgery's new tensors"),
    ] = None
    lora: Annotated[LoraSpec | None, Field(description="a LoRA, merged after the task, instead of `what`")] = None
    batch: Annotated[int | None, Field(ge=1, description="sequences a step")] = None
    length: Annotated[int | None, Field(ge=2, description="tokens a sequence")] = None
    save_every: Annotated[int | None, Field(ge=1, description="steps between checkpoints")] = None
    evaluate_every: Annotated[int | None, Field(ge=1, description="steps between evaluations within a task")] = None
    keep_best: Annotated[
        str | None, Field(description="go on from the evaluated step with the lowest held-out loss on this source")
    ] = None
    log_every: Annotated[int | None, Field(ge=1, description="steps between lines of the log")] = None

    @model_validator(mode="after")
    def _one_of_each(self) -> TrainSettings:
        """Raise ValueError where both keys of a pair in EXCLUDING are given."""
        for one, other in EXCLUDING:
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"give `{one}` or `{other}`, not both (null takes a key away)")
        return self


class TaskSpec(Entry):
    """One task of a continual run."""

    name: Annotated[str, Field(pattern=_NAME, description="letters, digits, _ and -")]
    sources: Annotated[list[TaskSource], Field(min_length=1, max_length=100, description="the task's text")]
    plan: Annotated[
        str | ExpertSettings | None,
        Field(description="this task's surgery, instead of `plan` or `next_plan`; none: add nothing"),
    ] = None
    train: Annotated[TrainSettings, Field(description="this task's, where they differ")] = TrainSettings()
    replay: Annotated[float | None, Field(ge=0, le=1, description="this task's; default: the file's")] = None

    @model_validator(mode="after")
    def _own(self) -> TaskSpec:
        """Raise ValueError where no source has the role `task`, or the shares do not fit."""
        if all(source.role == "original" for source in self.sources):
            raise ValueError("a task needs a source of the role `task`")
        check_shares([source.share for source in self.sources])
        return self

    def named_sources(self) -> list[tuple[str, TaskSource, float]]:
        """Return (name, source, share) for each of the task's sources; the shares sum to 1."""
        given = [source.share for source in self.sources if source.share is not None]
        missing = len(self.sources) - len(given)
        rest = (1 - math.fsum(given)) / missing if missing else 0.0
        found = []
        for number, source in enumerate(self.sources, 1):
            name = source.name or (self.name if number == 1 else f"{self.name}-{number}")
            found.append((name, source, rest if source.share is None else source.share))
        return found


class TasksConfig(Entry):
    """A continual run."""

    surgeon_continual: Annotated[Literal[1], Field(description="version of this format")]
    tasks: Annotated[list[TaskSpec], Field(min_length=1, max_length=1000, description="tasks, in order")]
    seed: Annotated[
        int,
        Field(
            ge=0,
            lt=2**32,
            description="seed of new weights; document order and dropout take this plus the number of earlier tasks",
        ),
    ] = 0
    plan: Annotated[
        str | ExpertSettings,
        Field(description="the first task's surgery: settings of `pmoe_experts`, or a plan's file or name"),
    ] = ExpertSettings()
    next_plan: Annotated[
        str | ExpertSettings | None,
        Field(
            description="every later task's surgery: settings that differ from `plan`, a plan's file or name, or none:"
            " add nothing and train the first task's tensors further; default: one more slot by `plan`"
        ),
    ] = None
    train: Annotated[TrainSettings, Field(description="how every task trains")] = TrainSettings()
    replay: Annotated[
        float,
        Field(ge=0, le=1, description="sequences of each earlier task per sequence of the new task (the paper: 0.01)"),
    ] = 0.01
    memory: Annotated[
        list[GeneralSource],
        Field(max_length=20, description="texts that every task replays as it does an earlier task; LIMA in the paper"),
    ] = []  # noqa: RUF012  # pydantic copies it
    general: Annotated[
        list[GeneralSource], Field(max_length=100, description="texts that no task trains on, for ΔR")
    ] = []  # noqa: RUF012
    validation_sequences: Annotated[int, Field(ge=1, description="most held-out sequences measured, per source")] = 64
    rows: Annotated[
        dict[Annotated[str, StringConstraints(pattern=_NAME)], dict[str, Any]] | None,
        Field(
            min_length=1,
            max_length=100,
            description="methods to compare, by name, and what each sets in this file: {full: {plan: none, next_plan:"
            " none, train.what: all}}; each becomes a run of its own, RUN/NAME",
        ),
    ] = None

    @model_validator(mode="after")
    def _fits(self) -> TasksConfig:
        """Raise ValueError for repeated names, too many sources, and settings with which a task cannot train."""
        names = [task.name for task in self.tasks] + [source.name for source in self.general]
        if doubled := first_doubled(names):
            raise ValueError(f"two tasks or general sources are called {doubled!r}; names must differ")
        sources = [name for task in self.tasks for name, _, _ in task.named_sources()]
        sources += [source.name for source in self.memory]
        if doubled := first_doubled(sources):
            raise ValueError(f"two sources are called {doubled!r}; give one of them another `name:`")
        if len(sources) > _MOST_SOURCES:
            raise ValueError(f"{len(sources)} sources; a continual run takes {_MOST_SOURCES} at most")
        for number, task in enumerate(self.tasks):
            self._check_training(number, task)
        return self

    def _check_training(self, number: int, task: TaskSpec) -> None:
        """Raise ValueError where the settings of task `number` (from 0) do not make a complete training."""
        train = self.training(number)
        if number == 0 and self.surgery(0) == NOTHING and not {"what", "lora"} & train.keys():
            raise ValueError(
                "the first task needs a plan: there is nothing yet that could train on; or let `what` or `lora` under"
                " `train:` say what of the base trains"
            )
        if not {"steps", "epochs"} & train.keys():
            raise ValueError(f"task {task.name} has no `steps`: say so many under `train:`")
        held = [
            name
            for each in self.tasks[: number + 1]
            for name, source, _ in each.named_sources()
            if source.role == "task"
        ]
        if (best := train.get("keep_best")) is not None and best not in held:
            raise ValueError(f"task {task.name}: `keep_best` names {best!r}; texts held out by then: {', '.join(held)}")
        if number and "epochs" in train and (self.replay if task.replay is None else task.replay):
            raise ValueError(
                f"task {task.name} has `epochs` and replays earlier tasks, whose text would count too; give `steps`, or"
                " `replay: 0`"
            )

    def training(self, number: int) -> dict[str, Any]:
        """Return the training settings of task `number` (from 0) as plain data, without the optimizer.

        The task's own settings replace the file's.
        """
        own, general = self.tasks[number].train.given(), self.train.given()
        for one, other in EXCLUDING:
            for key, instead in ((one, other), (other, one)):
                if key in own and instead in general:
                    del general[instead]
        return general | own

    def surgery(self, number: int) -> str | dict[str, Any]:
        """Return the surgery of task `number` (from 0): settings of `pmoe_experts`, a plan's name, or NOTHING."""
        own = self.tasks[number].plan
        general = self.plan if number == 0 or self.next_plan is None else self.next_plan
        chosen = general if own is None else own
        if isinstance(chosen, str):
            return chosen
        settings: dict[str, Any] = _given(self.plan) if isinstance(self.plan, ExpertSettings) else {}
        if number and isinstance(self.next_plan, ExpertSettings):
            settings |= _given(self.next_plan)
        settings |= _given(chosen)
        # The first task fixes the router's place, and it has no earlier tensors that could train further.
        for key in ("threshold",) if number else ("new_slot_mass", "trains_also"):
            settings.pop(key, None)
        return settings


def _given(settings: ExpertSettings) -> dict[str, Any]:
    """Return the keys that the file sets, as plain data."""
    return settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)
