"""What operations found in a base, as surgery.json keeps it; read again to draw the plan again."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from surgeon.checkpoint.source import is_side_file
from surgeon.errors import BadInput, printable
from surgeon.manifest.manifest import Surgery
from surgeon.operations.operation import Operation
from surgeon.operations.prepare import Facts, KeptFacts
from surgeon.plan.plan import Plan


def facts_of(surgery: Surgery, plan: Plan, *, file: str) -> dict[int, Facts]:
    """Return the facts that a surgery keeps for the operations of its plan, by operation number.

    Raises BadInput, which names `file`, for facts that do not belong to the operation or contradict themselves.
    """
    found: dict[int, Facts] = {}
    for number, operation in enumerate(plan.operations):
        kept = surgery.facts.get(str(number))
        if kept is not None and operation.facts is not None and operation.has_facts:
            found[number] = _read(operation, operation.facts, kept, file)
            found[number].check(file)
            if odd := next((name for name in kept.side_files if not is_side_file(name)), None):
                raise BadInput(
                    f"{printable(file)}: facts of `{operation.op}`: {printable(odd)} is no side file; was it edited by"
                    " hand?"
                )
    return found


def _read(operation: Operation, kind: type[Facts], kept: KeptFacts, file: str) -> Facts:
    """Return kept facts as an instance of the operation's class of facts. Raises BadInput where they do not fit it."""
    try:
        return kind.model_validate(kept.model_dump(exclude_unset=True))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = printable(".".join(str(step) for step in problem["loc"]) or "they")
        raise BadInput(
            f"{printable(file)}: facts of `{operation.op}`: {where}: {printable(problem['msg'])}; was it edited by"
            " hand?"
        ) from None


def kept(facts: Mapping[int, Facts]) -> dict[str, KeptFacts]:
    """Return the facts of a plan's operations in surgery.json's form, by operation number as text.

    Default values are left out, so that each set of facts has only one form.
    """
    dumped = {number: each.model_dump(mode="json", exclude_defaults=True) for number, each in facts.items()}
    return {str(number): KeptFacts(**data) for number, data in dumped.items()}
