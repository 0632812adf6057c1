"""`surgeon families BASE --after OP`: which operations can follow an operation, in its plan and on its output.

On a base both are drawn from its headers. What only weights show (that a layer is still silent) is not known of an
output that nobody wrote, so the weaker promise is given. Without a base the answers are those that
`python -m benchmarks.pairs` recorded on tiny models (pairs.json), where it also carried out whatever is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.blueprint.blueprint import Blueprint, Promise
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import Header, TensorInfo
from surgeon.checkpoint.source import Source
from surgeon.common.json_results import plain_fields
from surgeon.common.promises import PROMISE_STYLES
from surgeon.common.suggestions import did_you_mean
from surgeon.common.tables import FittedTable
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.dissect_folder import dissect_folder
from surgeon.operations import OPERATIONS
from surgeon.operations.operation import Operation
from surgeon.report.trials import drawn, entry, options_text

RECORD = Path(__file__).with_name("pairs.json")


@dataclass(frozen=True)
class Answer:
    """What an operation promises there; where it is refused, `promise` is None and `refusal` the reason."""

    promise: Promise | None
    refusal: str = ""


@dataclass(frozen=True)
class Follower:
    """An operation that may follow: in the same plan, and in a plan of its own on the output; by model type."""

    op: str
    same_plan: Mapping[str, Answer]
    next_plan: Mapping[str, Answer]


@dataclass(frozen=True)
class Followers:
    """What can follow the operation `after`, with its `options`: on `base`, or for None as recorded on tiny models."""

    after: str
    options: Mapping[str, object]
    base: str | None
    followers: tuple[Follower, ...]

    def __repr__(self) -> str:
        taken = [each.op for each in self.followers if self.takes(each.op)]
        return f"Followers(after {self.after}, takes {', '.join(taken)})"

    def takes(self, op: str) -> bool:
        """Return whether an operation can follow, in the same plan or in the next one, on every model type named."""
        return any(
            follower.op == op and any(_allowed(each) for each in (follower.same_plan, follower.next_plan))
            for follower in self.followers
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `after`, `options`, `base`: the first operation and its options; null without BASE
            `followers`: each with `op`, and by model type `promise` (null: refused) and `refusal` in the `same_plan`
                and the `next_plan`
        """
        return plain_fields(self)


def _allowed(answers: Mapping[str, Answer]) -> bool:
    return all(answer.promise is not None for answer in answers.values())


def recorded_followers(after: str) -> Followers:
    """Return what the record says of an operation. Raises BadInput for one that is not in it."""
    record = _record()
    _check_known(after, tuple(record["same_plan"]))
    return Followers(
        after,
        record["entries"][after],
        None,
        tuple(
            Follower(op, _recorded(record, "same_plan", after, op), _recorded(record, "next_plan", after, op))
            for op in record["same_plan"][after]
        ),
    )


def _recorded(record: Mapping[str, Any], plan: str, first: str, second: str) -> dict[str, Answer]:
    """The answers of one pair: a promise, or the number of a refusal, for each model type."""
    cell = zip(record["model_types"], record[plan][first][second], strict=True)
    return {
        model_type: Answer(None, record["refusals"][found]) if isinstance(found, int) else Answer(found)
        for model_type, found in cell
    }


@cache
def _record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def _check_known(op: str, known: Sequence[str]) -> None:
    if op not in known:
        raise BadInput(f"--after: no operation `{printable(op)}`{did_you_mean(op, known)}")


def followers_of(after: str, base: str, anatomy: Anatomy, folder: CheckpointFolder) -> Followers:
    """Return what can follow an operation on a base. Raises BadInput where the base refuses that operation itself."""
    _check_known(after, tuple(OPERATIONS))
    model_type = anatomy.family.model_type
    first, options, blueprint = _first_taken(after, base, anatomy, folder)
    output = _output_of(folder, blueprint)
    grown = dissect_folder(output)
    return Followers(
        after,
        options,
        base,
        tuple(
            Follower(
                name,
                {model_type: _answer([first], name, operation, anatomy, folder)},
                {model_type: _answer([], name, operation, grown, output)},
            )
            for name, operation in OPERATIONS.items()
        ),
    )


def _examples(operation: type[Operation]) -> tuple[Mapping[str, object], ...]:
    return tuple(operation.examples) or ({},)


def _first_taken(
    name: str, base: str, anatomy: Anatomy, folder: CheckpointFolder
) -> tuple[Operation, Mapping[str, object], Blueprint]:
    """Return the operation with the first options that the base takes, and what it makes of the base."""
    refusal = ""
    for options in _examples(OPERATIONS[name]):
        try:
            first = entry(name, OPERATIONS[name], options)
            return first, options, drawn([first], anatomy, folder)
        except BadInput as error:
            refusal = refusal or str(error)
    raise BadInput(f"{printable(base)}: {name} is refused on this base already: {refusal}")


def _answer(
    before: Sequence[Operation], name: str, operation: type[Operation], anatomy: Anatomy, folder: CheckpointFolder
) -> Answer:
    """Return the promise of an operation with the first options that are taken, or why its first ones are refused."""
    refusal = ""
    for options in _examples(operation):
        try:
            blueprint = drawn([*before, entry(name, operation, options)], anatomy, folder)
            return Answer(blueprint.promise)
        except BadInput as error:
            refusal = refusal or str(error)
    return Answer(None, refusal)


def _output_of(folder: CheckpointFolder, blueprint: Blueprint) -> CheckpointFolder:
    """Return the output of a blueprint as a base: config, headers and the base's side files, without weights."""
    tensors = {
        output.name: TensorInfo(output.name, output.recipe.dtype, output.recipe.shape, "planned", 0, output.nbytes)
        for output in blueprint.outputs
    }
    return replace(folder, config=blueprint.config, tensors=tensors, source=_Planned(folder.source))


class _Planned:
    """The files of an output that nobody wrote: the base's small ones, and no weights."""

    at_hand = False

    def __init__(self, base: Source) -> None:
        self.shown = base.shown
        self.listing = base.listing
        self.tree = base.tree
        self.small = base.small
        self.check_small = base.check_small

    def headers(self, files: list[str]) -> dict[str, Header]:
        raise BadInput(f"{self.shown}: its output is planned, not written")

    def open_shard(self, file: str) -> int:
        raise BadInput(f"{self.shown}: its output is planned, not written")

    def identity(self) -> list[dict[str, Any]]:
        return []

    def check_unchanged(self) -> None:
        """Nothing was read that could change."""


def followers_view(found: Followers) -> RenderableType:
    """What can follow, operation by operation, in the same plan and in the next."""
    table = FittedTable("operation", "in the same plan", "on its output", "why not")
    for each in found.followers:
        table.add_row(each.op, _cell(each.same_plan), _cell(each.next_plan), printable(_why(each), 600))
    where = f"on {printable(found.base)}" if found.base is not None else "as recorded on tiny models of two families"
    options = options_text(found.options)
    return Group(Text(f"after {found.after}{f' ({options})' if options else ''}, {where}", "bold"), Text(), table)


def _why(follower: Follower) -> str:
    """Why a follower is refused: once where one reason holds in both plans."""
    same, following = (
        dict.fromkeys(answer.refusal for answer in answers.values() if answer.refusal)
        for answers in (follower.same_plan, follower.next_plan)
    )
    if same == following:
        return "; ".join(same)
    return "; ".join([*(f"same plan: {each}" for each in same), *(f"output: {each}" for each in following)])


def _cell(answers: Mapping[str, Answer]) -> Text:
    styled = {
        model_type: Text("refused", "bold red") if answer.promise is None else PROMISE_STYLES[answer.promise]
        for model_type, answer in answers.items()
    }
    if len({text.plain for text in styled.values()}) == 1:
        return next(iter(styled.values()))
    return Text(", ").join(Text.assemble(text, f" ({model_type})") for model_type, text in styled.items())
