"""What each task of a continual run takes: its plan, its training config, and what its base allows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.yaml import written_yaml
from surgeon.continual.config.loading import SLOTS, LoadedTasks, at_line, surgery_name
from surgeon.continual.config.schema import NOTHING, TasksConfig, TaskSource, TaskSpec
from surgeon.data.specs import ORIGINAL, SourceSpec
from surgeon.errors import BadInput, printable
from surgeon.plan.plan import LoadedPlan, load_plan, parse_plan
from surgeon.plan.shipped import load_named
from surgeon.train.config.loading import LoadedConfig
from surgeon.train.config.schema import OptimizerSpec, TrainConfig
from surgeon.train.config.settings import settle


def training_of(config: TasksConfig, number: int) -> TrainConfig:
    """Return the training config of task `number` (from 0): its own sources, and earlier ones by `replay`.

    Earlier tasks come first, so that `domain_ids` of task k are k and its slot k - 1, whatever is replayed.
    """
    task = config.tasks[number]
    replay = config.replay if task.replay is None else task.replay
    unit = 1 / (1 + replay * number)
    sources = [
        _source(name, source, share * unit * (replay if nth < number else 1.0), config.tasks[nth].name)
        for nth in range(number + 1)
        for name, source, share in _taught(config.tasks[nth], whole=nth == number)
    ]
    return TrainConfig(
        surgeon_train=1,
        sources=sources,
        seed=(config.seed + number) % 2**32,
        validation_sequences=config.validation_sequences,
        optimizer=OptimizerSpec(**{**config.train.given_optimizer(), **task.train.given_optimizer()}),
        **{**config.train.given(), **task.train.given()},
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
        kind=source.kind,
        field=source.field,
        validation=source.validation,
    )


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


def check_tasks(loaded: LoadedTasks, plans: Sequence[LoadedPlan | None], base: CheckpointFolder) -> None:
    """Raise BadInput for settings that a later task's training would refuse."""
    context = base.config.get("max_position_embeddings")
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
