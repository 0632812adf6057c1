"""What a base makes of operations: each is drawn on it, from headers and config, by the code that would refuse it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from surgeon.apply.proofs import prove
from surgeon.apply.shapes import check_shapes
from surgeon.apply.surgery import Drawing
from surgeon.blueprint.blueprint import Promise
from surgeon.blueprint.draft import Draft
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.operations.operation import Operation
from surgeon.operations.prepare import Facts, OpenedBase, WeightsNeeded
from surgeon.plan.plan import LoadedPlan, Plan, carry_out


@dataclass(frozen=True)
class Trial:
    """An operation with the options of one of its `examples`, drawn on a base.

    Where the base takes it, `promise` is what it promises there; elsewhere `refusal` is the reason.
    """

    op: str
    options: Mapping[str, object]
    promise: Promise | None
    refusal: str


def tried(
    name: str, operation: type[Operation], options: Mapping[str, object], anatomy: Anatomy, folder: CheckpointFolder
) -> Trial:
    """Draw an operation on a base, as a plan of nothing else would."""
    try:
        promise = _promise_of(_entry(name, operation, options), anatomy, folder)
    except BadInput as error:
        return Trial(name, options, None, str(error))
    return Trial(name, options, promise, "")


def _entry(name: str, operation: type[Operation], options: Mapping[str, object]) -> Operation:
    """Return an operation with these options. Raises BadInput where they are no entry of a plan."""
    try:
        return operation.model_validate({"op": name, **options})
    except ValidationError as error:
        wrong = "; ".join(
            f"`{'.'.join(map(str, problem['loc']))}` {problem['msg']}".removeprefix("`` ") for problem in error.errors()
        )
        raise BadInput(f"not tried, as its `examples` are no entries of a plan: {printable(wrong)}") from None


def _promise_of(operation: Operation, anatomy: Anatomy, folder: CheckpointFolder) -> Promise:
    """Draw an operation on a base, as a plan of it alone would. Raises BadInput for what it would refuse."""
    base = OpenedBase(folder, anatomy, weights=False)
    draft = Draft(anatomy, folder.config, seed=0)
    found = _facts(operation, base)
    carry_out(operation, draft, found)
    blueprint = draft.finish()
    check_shapes(blueprint, anatomy)
    plan = LoadedPlan(Plan.model_construct(surgeon=1, seed=0, operations=[operation]), "", "plan")
    drawn = Drawing(plan, {} if found is None else {0: found}, blueprint, ())
    prove(drawn, base)
    return blueprint.promise


def _facts(operation: Operation, base: OpenedBase) -> Facts | None:
    """What an operation finds out of a base; nothing where that needs weights which are elsewhere."""
    if base.anatomy.family.encoder and not operation.on_encoders:
        return None
    try:
        return operation.prepare(base)
    except WeightsNeeded:
        return None


def options_text(options: Mapping[str, object]) -> str:
    """Write the options of an operation as a plan has them."""
    return _written(options)[1:-1]


def _written(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_written(each)}" for key, each in value.items()) + "}"
    return str(value)
