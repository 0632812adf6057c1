"""What operations found out of a base, as surgery.json keeps it: written, and read again to draw the plan anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from surgeon.blueprint.blueprint import Blueprint
from surgeon.errors import BadInput, printable
from surgeon.manifest.manifest import Surgery
from surgeon.operations.drop_layers import LayerFacts
from surgeon.operations.operation import Operation
from surgeon.operations.prepare import Facts
from surgeon.plan.plan import Plan


def facts_of(surgery: Surgery, plan: Plan, *, file: str) -> dict[int, Facts]:
    """The facts that a surgery keeps for the operations of its plan, by their numbers.

    Raises BadInput, which names `file`, for facts that are none of the operation's or contradict themselves.
    """
    found: dict[int, Facts] = {}
    for number, operation in enumerate(plan.operations):
        key = operation.facts_key(number)
        if operation.facts is None or key is None:
            continue
        kept = getattr(surgery, operation.facts.section).get(key)
        if kept is None:
            continue
        facts = kept if isinstance(kept, Facts) else _read(operation, operation.facts, kept, file)
        facts.check(file)
        found[number] = facts
    return found


def _read(operation: Operation, kind: type[Facts], kept: object, file: str) -> Facts:
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = printable(".".join(str(step) for step in problem["loc"]) or "they")
        raise BadInput(
            f"{printable(file)}: facts of `{operation.op}`: {where}: {printable(problem['msg'])}; was it edited by"
            " hand?"
        ) from None


def sections_of(facts: Mapping[int, Facts], plan: Plan, blueprint: Blueprint) -> dict[str, Any]:
    """The fields of surgery.json that keep the facts of a plan's operations; those that would be empty are left out.

    Layers of the base that an operation took out are in `dropped`, whatever its facts are.
    """
    found: dict[str, dict[str, Any]] = {}
    for number, layers in blueprint.dropped.items():
        found.setdefault("dropped", {})[str(number)] = LayerFacts(layers=list(layers))
    if blueprint.left_behind:
        found["left_behind"] = {str(number): list(names) for number, names in blueprint.left_behind.items()}
    for number, operation in enumerate(plan.operations):
        key = operation.facts_key(number)
        if operation.facts is None or key is None:
            continue
        # Where nothing was prepared, as of a base whose weights are elsewhere, an operation may settle on defaults.
        settled = operation.settled(facts.get(number), blueprint.dropped.get(number, ()))
        if settled is not None:
            section = operation.facts.section
            kept = settled.model_dump(mode="json", exclude_unset=True) if section == Facts.section else settled
            found.setdefault(section, {})[key] = kept
    return found
