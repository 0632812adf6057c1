"""The plan: its schema, which refuses unknown keys, its file, and the step from plan to blueprint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from surgeon.anatomy.anatomy import Anatomy
from surgeon.blueprint.blueprint import Blueprint, OperationRecord
from surgeon.blueprint.draft import Draft
from surgeon.checkpoint.own_code import builds_models, has_own_code
from surgeon.checkpoint.weights import COMPRESSED, quantisation
from surgeon.common.checked_yaml import check_yaml, editor_schema
from surgeon.common.formatting import listed
from surgeon.common.schema import Bounded
from surgeon.common.yaml import Document, Place, parse_yaml, read_text, written_yaml
from surgeon.errors import BadInput, printable
from surgeon.operations import OPERATIONS, AnyOperation
from surgeon.operations.classification_head import ClassificationHead
from surgeon.operations.operation import Operation, Spec
from surgeon.operations.prepare import Facts, OpenedBase, WeightsNeeded
from surgeon.operations.stack_layers import Slice

MERGEKIT_KEYS = ("merge_method", "slices", "base_model", "experts", "modules", "models")
_HABITS = {
    "parameters": "`insert_layers` with `init: copy`, whose `zero_init` silences copies as `scale` 0 does",
    "tokenizer_source": "left out: the base's tokenizer goes along",
}

# A word that YAML reads as a text.
_PLAIN_WORD = re.compile(r"(?!(?:true|false|null)$)[A-Za-z][A-Za-z_]*", re.IGNORECASE)


class Plan(Bounded):
    """A list of operations, applied in order; later selectors refer to the model as the earlier operations left it."""

    # Built at first use, when the operations of plugins are known.
    model_config = ConfigDict(defer_build=True)

    surgeon: Annotated[Literal[1], Field(description="version of the plan format")]
    seed: Annotated[int, Field(ge=0, lt=2**63, description="seeds every random tensor, together with its name")] = 0
    operations: Annotated[list[Annotated[Operation, AnyOperation]], Field(min_length=1, max_length=100)]


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of plans, for editors that complete YAML by it."""
    return editor_schema(Plan, "surgeon plan")


@dataclass(frozen=True)
class LoadedPlan:
    """A plan with its text as it is carried out, its source (a file name), and source line numbers for messages.

    `lines` maps a place in the plan (keys and list numbers from the top) to its line in the source.
    """

    plan: Plan
    text: str
    source: str
    lines: Mapping[Place, int] = field(default_factory=dict, repr=False, compare=False)
    # The options that changed values of the source, by the place that they set.
    given: Mapping[Place, str] = field(default_factory=dict, repr=False, compare=False)

    def data(self) -> dict[str, Any]:
        """Return the plan as JSON data, including defaults."""
        operations = [operation.model_dump(mode="json", by_alias=True) for operation in self.plan.operations]
        return {"surgeon": self.plan.surgeon, "seed": self.plan.seed, "operations": operations}

    def operation(self, number: int) -> str:
        """Return an operation's name for errors: its file, line, number and kind, and the options that changed it."""
        if not self.lines:
            # A plan that a command made has no file that a user could look at.
            return printable(self.source)
        place = ("operations", number)
        line = self.lines.get(place)
        where = f"{printable(self.source)}:{line}" if line else printable(self.source)
        set_in_it = [printable(option) for at, option in self.given.items() if at[:2] == place]
        changed = f", with {' '.join(dict.fromkeys(set_in_it))}" if set_in_it else ""
        return f"{where}: operations[{number}] ({self.plan.operations[number].op}{changed})"


def load_plan(path: Path, overrides: Sequence[str] = ()) -> LoadedPlan:
    """Read and check a plan file with `overrides` (`operations.0.alpha=0.5`) applied; BadInput names file and line."""
    return parse_plan(read_text(path, what="plan"), source=str(path), overrides=overrides)


def parse_plan(text: str, *, source: str = "plan", overrides: Sequence[str] = ()) -> LoadedPlan:
    """Check a plan given as text; `source` is its file's name in messages, and relative paths start at its folder.

    `overrides` replace values before the check: a dotted path, with operations by their number or kind, and a value in
    YAML (`operations.0.init.reg=0.1`). The text of the result then includes them. A mergekit config that only stacks
    layers is converted to a plan. Raises BadInput.
    """
    document = parse_yaml(text, source, what="plan", needs="`surgeon: 1` and `operations:`")
    if not {"surgeon", "operations"} & document.data.keys() and any(key in document.data for key in MERGEKIT_KEYS):
        document.data = of_mergekit(document)
    document.override(overrides, example="operations.0.layers=all")
    plan = check_yaml(Plan, document)
    if overrides:
        options = " ".join(f"--set {setting}" for setting in overrides)
        text = f"# With {printable(options, len(options))}\n{written_yaml(document.data)}"
    return LoadedPlan(plan, text, source, document.lines, document.given)


def overrides_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return values by dotted keys as `--set` takes them: plain words as they are, anything else as JSON."""
    return tuple(
        f"{key}={value}"
        if isinstance(value, str) and _PLAIN_WORD.fullmatch(value)
        else f"{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in settings.items()
    )


# The recorded plan of a model that was trained without surgery.
NO_OPERATIONS = "surgeon: 1\noperations: []\n"
# The beginning of the recorded plan of a head that training made; JSON with the seed and the labels follows.
_HEAD = "# surgeon train: a classification head\n"


def head_plan(labels: list[str], *, seed: int) -> LoadedPlan:
    """Return the plan of a classification head for these labels, which training carries out where there is no head."""
    text = _HEAD + json.dumps({"seed": seed, "labels": labels}, ensure_ascii=False) + "\n"
    return recorded_plan(text, source="classification head")


def recorded_plan(text: str, *, source: str) -> LoadedPlan:
    """Read a plan from a manifest: like `parse_plan`, and also training's own plans, which no file can contain.

    Raises BadInput where the text is not such a plan.
    """
    if text == NO_OPERATIONS:
        return LoadedPlan(Plan.model_construct(surgeon=1, seed=0, operations=[]), text, source)
    if text.startswith(_HEAD):
        try:
            recorded = json.loads(text.removeprefix(_HEAD))
            seed, made = int(recorded["seed"]), ClassificationHead(labels=recorded["labels"])
        except (ValueError, TypeError, LookupError):
            raise BadInput(f"{printable(source)}: not the plan of a classification head; was it edited?") from None
        return LoadedPlan(Plan.model_construct(surgeon=1, seed=seed, operations=[made]), text, source)
    return parse_plan(text, source=source)


def prepare(loaded: LoadedPlan, base: OpenedBase) -> dict[int, Facts]:
    """Let the operations of a plan gather what they need from a base; return their facts, by operation number.

    Operations that need no facts are left out, and decoder-only operations on an encoder, which `draw` refuses. Raises
    BadInput, with file, line and operation, and WeightsNeeded for a base of which only headers are at hand.
    """
    found: dict[int, Facts] = {}
    for number, operation in enumerate(loaded.plan.operations):
        if base.anatomy.family.encoder and not operation.on_encoders:
            # `draw` refuses it with the reason.
            continue
        with placed(loaded, number):
            _check_classes(base.folder.config)
            facts = operation.prepare(replace(base, number=number))
        if facts is not None:
            found[number] = facts
    return found


def draw(
    loaded: LoadedPlan, anatomy: Anatomy, config: Mapping[str, Any], facts: Mapping[int, Facts] | None = None
) -> Blueprint:
    """Draw the blueprint of a plan on a base. BadInput names file, line and operation of what cannot be done.

    `facts` are the result of `prepare`, or what a surgery.json keeps of it.
    """
    draft = Draft(anatomy, config, seed=loaded.plan.seed)
    known = facts or {}
    for number, operation in enumerate(loaded.plan.operations):
        with placed(loaded, number):
            carry_out(operation, draft, known.get(number))
    return draft.finish()


@contextmanager
def placed(loaded: LoadedPlan, number: int | None = None) -> Iterator[None]:
    """Put file, line and operation before the message of a BadInput that is raised within the context.

    Without a `number` the error concerns the whole plan: its operation is named where it has only one, else its file.
    """
    try:
        yield
    except BadInput as error:
        kind = WeightsNeeded if isinstance(error, WeightsNeeded) else BadInput
        alone = 0 if len(loaded.plan.operations) == 1 else None
        place = number if number is not None else alone
        where = printable(loaded.source) if place is None else loaded.operation(place)
        raise kind(f"{where}: {error}") from None


def carry_out(operation: Operation, draft: Draft, facts: Facts | None = None) -> None:
    """Let the plan's next operation edit the draft. Raises BadInput for what this base does not allow."""
    if draft.converted is not None:
        raise BadInput(
            f"it comes after `{draft.records[-1].op}`, which makes a model of other tensors; apply it by a plan of its"
            " own, to the output of this one"
        )
    _check_classes(draft.config)
    _check_kind(operation, draft.anatomy)
    settings = quantisation(draft.config)
    if settings is not None and settings["quant_method"] == COMPRESSED and operation.op != "dequantise":
        raise BadInput(
            f"config.json: the base is quantised ({COMPRESSED}); `dequantise` it first, by a plan of its own, or"
            " operate on the full-precision weights"
        )
    before = dict(draft.widths)
    record = operation.edit(draft, facts)
    if not isinstance(record, OperationRecord):
        raise BadInput(f"its `edit` returns {type(record).__name__}, no OperationRecord; mend the operation")
    draft.records.append(record)
    if before and draft.widths == before:
        raise BadInput("an earlier operation of this plan changes widths; put this one into a second plan")


def _check_classes(config: Mapping[str, Any]) -> None:
    """Raise BadInput for a base whose model is built by its own code."""
    mapped = config.get("auto_map")
    if has_own_code(config) and isinstance(mapped, dict) and builds_models(mapped):
        raise BadInput(
            "config.json: `auto_map` names the base's own code, and operations are for models of transformers' classes;"
            " use a release of transformers that has this model type, or convert the checkpoint to one that it has"
        )


def _check_kind(operation: Operation, anatomy: Anatomy) -> None:
    """Raise BadInput where the operation cannot work on a base of this kind: unreadable tensors, or an encoder."""
    if operation.attaches and (odd := anatomy.unread) is not None:
        raise BadInput(
            f"{printable(odd.name)} ({odd.file}): {odd.dtype} in a layer that surgeon only moves as bytes, so nothing"
            " can be made to stand beside it; add layers, or operate on the full-precision weights and quantise the"
            " output"
        )
    if anatomy.family.encoder and not operation.on_encoders:
        others = sorted(op for op, other in OPERATIONS.items() if other.on_encoders)
        raise BadInput(
            f"the base is an encoder ({anatomy.family.model_type}), and this operation is for decoders; on an encoder"
            f" use {', '.join(others)}"
        )


class _Source(Spec):
    """One source of a part of a mergekit config: a model, and a range of its layers."""

    model: str
    layer_range: Slice


class _Part(Spec):
    """One part of a mergekit config's stack of layers; several sources here mean a merge."""

    sources: Annotated[list[_Source], Field(min_length=1)]


class _Passthrough(Spec):
    """A mergekit config whose method stacks layers and merges nothing."""

    slices: Annotated[list[_Part], Field(min_length=1)]
    merge_method: str
    dtype: str | None = None


def of_mergekit(document: Document) -> dict[str, Any]:
    """Return the plan equivalent to a mergekit config. Raises BadInput where the config merges models.

    The line of `slices` is recorded in the document as the line of the plan's only operation.
    """
    merges = document.data.get("merge_method") != "passthrough"
    config = None if merges else check_yaml(_Passthrough, replace(document, what="mergekit config"), _HABITS)
    stacked = [] if config is None else [each for part in config.slices for each in part.sources]
    # The part after a plus is an adapter.
    models = {name for each in stacked for name in each.model.split("+")}
    if config is None or len(models) != 1 or len(stacked) != len(config.slices):
        raise BadInput(
            f"{printable(document.source)}: a mergekit config that merges models{' ' if models else ''}"
            f"{listed(sorted(models))}; surgeon grows one model and merges none, so merge with mergekit, then grow what"
            " it wrote"
        )
    document.lines["operations", 0] = document.lines["slices",]
    slices = [each.layer_range for each in stacked]
    return {"surgeon": 1, "operations": [{"op": "stack_layers", "slices": slices, "dtype": config.dtype}]}
