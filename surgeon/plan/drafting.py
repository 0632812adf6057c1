"""From plan to blueprint: each operation edits the draft in turn; their errors get the plan's line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgeon.blueprint.draft import Blueprint, Draft
from surgeon.checkpoint.peft_folder import Adapter
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.operations import OPERATIONS
from surgeon.operations.operation import Operation
from surgeon.plan.loading import LoadedPlan


def draw(
    loaded: LoadedPlan,
    anatomy: Anatomy,
    config: Mapping[str, Any],
    adapters: Mapping[str, Adapter] | None = None,
) -> Blueprint:
    """The blueprint of a plan on a base. BadInput names file, line and operation of what cannot be done.

    `adapters` are those that the plan imports, by its names for them.
    """
    draft = Draft(anatomy, config, seed=loaded.plan.seed, adapters=adapters)
    for number, operation in enumerate(loaded.plan.operations):
        try:
            _check_kind(operation, anatomy)
            draft.records.append(operation.edit(draft, number))
        except BadInput as error:
            line = loaded.line_of_operation(number)
            where = f"{printable(loaded.source)}:{line}" if line else printable(loaded.source)
            raise BadInput(f"{where}: operations[{number}] ({operation.op}): {error}") from None
    return draft.finish()


def _check_kind(operation: Operation, anatomy: Anatomy) -> None:
    if anatomy.family.encoder and not operation.on_encoders:
        others = sorted(op for op, other in OPERATIONS.items() if other.on_encoders)
        raise BadInput(
            f"the base is an encoder ({anatomy.family.model_type}), and this operation is for decoders; on an encoder"
            f" use {', '.join(others)}"
        )
