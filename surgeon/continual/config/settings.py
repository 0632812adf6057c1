"""What each task of a continual run takes: its plan, its training config, and what its base allows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from surgeon import (
    Checkpoint,
    LoadedConfig,
    LoadedPlan,
    OptimizerSpec,
    SourceSpec,
    TextSpec,
    TrainConfig,
    check_source,
    load_named,
    load_plan,
    parse_plan,
    settle,
)
from surgeon.common.checked_yaml import where
from surgeon.common.schema import ORIGINAL
from surgeon.common.yaml import Place, written_yaml
from surgeon.continual.config.loading import SLOTS, LoadedTasks, at_line, surgery_name
from surgeon.continual.config.schema import NOTHING, TasksConfig, TaskSource, TaskSpec
from surgeon.errors import BadInput, bad_input, printable


def training_of(config: TasksConfig, number: int) -> TrainConfig:
    """Return the training config of task `number` (from 0): its own sources, earlier ones and the memory by `replay`.

    Earlier tasks come first, so that `domain_ids` of task k are k and its slot k - 1, whatever is replayed.
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
        validation=source.validation,
        **source.reading,
    )


def own_sources(config: TasksConfig, number: int) -> list[SourceSpec]:
    """Return the sources of task `number` (from 0), as a training config names them, without earlier tasks' ones."""
    task = config.tasks[number]
    return [_source(name, source, share, task.name) for name, source, share in task.named_sources()]


def general_texts(config: TasksConfig) -> list[TextSpec]:
    """Return the texts that no task trains on."""
    return [TextSpec(**text.model_dump()) for text in config.general]


def memory_texts(config: TasksConfig) -> list[TextSpec]:
    """Return the texts that every task replays."""
    return [TextSpec(**text.model_dump()) for text in config.memory]


def check_texts(loaded: LoadedTasks) -> None:
    """Raise BadInput with every text of the tasks file that is not there, by its line."""
    named: list[tuple[Place, TextSpec]] = [
        (("tasks", number, "sources", nth), source)
        for number in range(len(loaded.config.tasks))
        for nth, source in enumerate(own_sources(loaded.config, number))
    ]
    named += [(("general", nth), text) for nth, text in enumerate(general_texts(loaded.config))]
    named += [(("memory", nth), text) for nth, text in enumerate(memory_texts(loaded.config))]
    wrong = [
        where((*place, key), loaded.lines, str(loaded.source)) + why
        for place, text in named
        for key, why in check_source(text, loaded)
    ]
    if wrong:
        raise bad_input(wrong)


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
            return load_named(asked)
    # Seeds differ by the slot's number in tensors' names.
    plan = {"surgeon": 1, "seed": loaded.config.seed, "operations": [{"op": SLOTS, **asked}]}
    with at_line(loaded, number):
        return parse_plan(written_yaml(plan), source=surgery_name(loaded, number))


def check_tasks(loaded: LoadedTasks, plans: Sequence[LoadedPlan | None], base: Checkpoint) -> None:
    """Raise BadInput for settings that a later task's training would refuse."""
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
