"""What each task adds to the model, as a plan; everything about it that can be refused before the first step is."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence

import yaml

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.continual.config import NOTHING, SLOTS, LoadedTasks
from surgeon.errors import BadInput, printable
from surgeon.plan.plan import LoadedPlan, load_plan, parse_plan
from surgeon.plan.shipped import find_plan
from surgeon.train.config import LoadedConfig
from surgeon.train.settings import settle


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
        return parse_plan(yaml.safe_dump(plan, sort_keys=False), source=_name(loaded, number))


def _name(loaded: LoadedTasks, number: int) -> str:
    return f"{loaded.source} (surgery of {loaded.config.tasks[number].name})"


@contextlib.contextmanager
def at_line(loaded: LoadedTasks, number: int) -> Iterator[None]:
    """Errors about the surgery of task `number` (from 0) name the line of the tasks file, not of the plan."""
    try:
        yield
    except BadInput as error:
        made = re.escape(printable(_name(loaded, number)))
        told = re.sub(rf"^{made}:\d+: (operations\[0\] \({SLOTS}\): )?", "", str(error))
        if told == str(error) and isinstance(loaded.config.surgery(number), dict):
            # Of the base or the disk, not of what was asked.
            raise
        raise BadInput(f"{printable(str(loaded.source))}:{loaded.line_of_surgery(number)}: {told}") from None


def check_tasks(loaded: LoadedTasks, plans: Sequence[LoadedPlan | None], base: CheckpointFolder) -> None:
    """Raise BadInput for settings that a later task's training would refuse."""
    context = base.config.get("max_position_embeddings")
    operations: list[str] = []
    for number, plan in enumerate(plans):
        if plan is not None:
            operations = [operation.op for operation in plan.plan.operations]
        settle(
            LoadedConfig(loaded.config.training(number), loaded.source),
            operations,
            context=context if isinstance(context, int) else sys.maxsize,
            processes=1,
        )
    surgery = base.config.get("surgery")
    held = surgery if isinstance(surgery, dict) else {}
    asks = any(operation.needs_task_ids for plan in plans if plan is not None for operation in plan.plan.operations)
    inherited = held.get("router_loss") or {}
    if held.get("expert_router") and (asks or (isinstance(inherited, dict) and inherited.get("task_id"))):
        raise BadInput(
            f"{printable(str(base.path))}: has slots already, and the router's loss takes the first task for the first"
            " slot; leave `router_loss` out (or say `router_loss: none`), or begin from the base without slots"
        )
