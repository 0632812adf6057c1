"""`surgeon families`: what is known of model types, or of one base: its kinds of layers, and the operations it accepts.

Whether a base accepts an operation is decided by the code that would refuse the operation: each operation's examples
are drawn on the base, from headers and config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.decoders import USUAL_DECODERS, USUAL_ENCODERS
from surgeon.anatomy.dissect import dissect_folder
from surgeon.anatomy.kinds import period_of
from surgeon.blueprint.blueprint import Promise
from surgeon.blueprint.draft import Draft
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common.formatting import show
from surgeon.common.json_results import plain_fields
from surgeon.common.promises import PROMISE_STYLES
from surgeon.common.tables import FittedTable
from surgeon.errors import BadInput, printable
from surgeon.models.gguf_file import base_headers
from surgeon.operations import OPERATIONS
from surgeon.operations.expert_fusion import of_experts
from surgeon.operations.fusion import ways
from surgeon.operations.operation import Operation
from surgeon.operations.prepare import Facts, OpenedBase, WeightsNeeded
from surgeon.plan.plan import LoadedPlan, Plan, carry_out
from surgeon.writing.proofs import prove
from surgeon.writing.shapes import check_shapes
from surgeon.writing.surgery import Drawing

_DERIVED = "so is any other text decoder or encoder of the installed transformers ({version}): `surgeon families BASE`"
_NO_NEW_LAYERS = "layers are added to decoders alone"


@dataclass(frozen=True)
class Families:
    """The usual model types, each with the operations that accept its kind of model.

    Other text decoders and encoders that transformers, in the version `derived_by`, can build are supported too; their
    structure is derived.
    """

    decoders: Mapping[str, tuple[str, ...]]
    encoders: Mapping[str, tuple[str, ...]]
    derived_by: str

    def __repr__(self) -> str:
        return f"Families({len(self.decoders)} decoders, {len(self.encoders)} encoders, and others)"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `decoders`, `encoders`: by model type, the operations that it takes
            `derived_by`: the version of transformers whose other models are derived
        """
        return plain_fields(self)


@dataclass(frozen=True)
class KindOfLayer:
    """One kind of layer in a base, and the numbers of its layers.

    `silence` maps tensors to the values that make such a layer add exactly zero; `refusal` is the reason where there
    are none. `experts` is the router by which init `ot_fusion` matches their experts, `unaligned` lists the modules
    that `ot_fusion` cannot align; both are empty where there are none.
    """

    title: str
    layers: tuple[int, ...]
    silence: Mapping[str, float]
    refusal: str
    experts: str
    unaligned: tuple[str, ...]


@dataclass(frozen=True)
class KnownBase:
    """What is known about one base, with the `evidence` for it; kinds of layers repeat after `period` layers."""

    base: str
    model_type: str
    evidence: str
    period: int | None
    kinds: tuple[KindOfLayer, ...]
    trials: tuple[Trial, ...]
    notes: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        taken = [op for op in dict.fromkeys(trial.op for trial in self.trials) if self.takes(op)]
        return f"KnownBase({self.model_type}, {len(self.kinds)} kinds of layers, takes {', '.join(taken)})"

    def takes(self, op: str) -> bool:
        """Return whether the base accepts an operation with some of its example options."""
        return any(trial.op == op and trial.promise is not None for trial in self.trials)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `base`, `model_type`, `evidence`, `period`, `notes`: the base, and how it is known
            `kinds`: kinds of layers, each with `title`, `layers`, `silence`, `refusal`
            `trials`: operations, each with `op`, `options`, `promise` (null: refused), `refusal`
        """
        return plain_fields(self)


def families(
    base: str | Path | None = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Families | KnownBase:
    """Return what is known about all model types, or about one base (a folder, or a Hub id).

    Only headers and config are read. Raises BadInput for a base that cannot be read, or about which nothing can be
    derived.
    """
    if base is None:
        if revision is not None:
            raise BadInput("`revision` is a base's: name the base too")
        every = tuple(OPERATIONS)
        some = tuple(name for name, operation in OPERATIONS.items() if operation.on_encoders)
        return Families(
            dict.fromkeys(USUAL_DECODERS, every), dict.fromkeys(USUAL_ENCODERS, some), metadata.version("transformers")
        )
    folder = base_headers(base, revision=revision, trust_remote_code=trust_remote_code)
    anatomy = dissect_folder(folder)
    return KnownBase(
        base=str(base),
        model_type=str(folder.config["model_type"]),
        evidence=anatomy.derivation.evidence,
        period=period_of(anatomy.pattern),
        kinds=tuple(_kinds(anatomy)),
        trials=tuple(
            tried(name, operation, options, anatomy, folder)
            for name, operation in OPERATIONS.items()
            for options in operation.examples
        ),
        notes=tuple(folder.notes),
    )


def _kinds(anatomy: Anatomy) -> Iterator[KindOfLayer]:
    """Yield each kind of layer of a base, in the order of the first layer of the kind."""
    found: dict[tuple[int, str], list[int]] = {}
    for index, entry in enumerate(anatomy.pattern):
        found.setdefault(entry, []).append(index)
    encoder = anatomy.family.encoder
    for (number, title), layers in found.items():
        kind = anatomy.kinds[number]
        fusion = ways(anatomy, anatomy.kind_of.index(number), kind, frozenset(kind.silence))
        yield KindOfLayer(
            title or "every layer",
            tuple(layers),
            {} if encoder else dict(kind.silence),
            _NO_NEW_LAYERS if encoder else kind.refusal,
            fusion.router,
            fusion.averaged,
        )


def families_view(found: Families | KnownBase) -> RenderableType:
    """Return a table for the terminal: the usual model types; or one base's kinds of layers and accepted operations."""
    return _overview_view(found) if isinstance(found, Families) else _base_view(found)


def _overview_view(found: Families) -> RenderableType:
    """Return the table of the usual model types."""
    table = FittedTable("model type", "is", "operations")
    for is_a, known in (("a decoder", found.decoders), ("an encoder", found.encoders)):
        for model_type, operations in known.items():
            table.add_row(model_type, is_a, "all" if len(operations) == len(OPERATIONS) else ", ".join(operations))
    return Group(table, Text(), Text(_DERIVED.format(version=found.derived_by)))


def _base_view(found: KnownBase) -> RenderableType:
    """Return the tables of one base: facts, kinds of layers, and operations."""
    facts = FittedTable(headings=False)
    facts.add_row("model type", printable(found.model_type))
    facts.add_row("known", Text(found.evidence))
    if found.period is not None and found.period > 1:
        facts.add_row("pattern", f"repeats every {found.period} layers")
    for note in found.notes:
        facts.add_row("note", Text(printable(note), style="yellow"))
    partly = any(kind.experts or kind.unaligned for kind in found.kinds)
    kinds = FittedTable(
        "kind of layer", "layers", "numbers", "adds nothing to the stream when", *["ot_fusion"] * partly
    )
    for kind in found.kinds:
        silence = Text(_silence(kind)) if not kind.refusal else Text(f"never: {printable(kind.refusal)}", "yellow")
        fusion = [printable(_aligned(kind), 400)] if partly else []
        kinds.add_row(printable(kind.title), str(len(kind.layers)), show([*kind.layers]), silence, *fusion)
    trials = FittedTable("operation", "options", "promise", "why not")
    earlier = ""
    for trial in found.trials:
        promise = Text("refused", "bold red") if trial.promise is None else PROMISE_STYLES[trial.promise]
        reason = "the same" if trial.refusal == earlier != "" else printable(trial.refusal, 400)
        trials.add_row(trial.op, options_text(trial.options), promise, reason)
        earlier = trial.refusal
    return Group(Text(printable(found.base), "bold"), facts, Text(), kinds, Text(), trials)


def _aligned(kind: KindOfLayer) -> str:
    """Return, as text, what init `ot_fusion` does with such a layer."""
    matched = f"experts matched by {kind.experts}" if kind.experts else "" if kind.unaligned else "aligns all modules"
    left = f"cannot align {', '.join(kind.unaligned)}" if kind.unaligned else ""
    return "; ".join(filter(None, (matched, left)))


def _silence(kind: KindOfLayer) -> str:
    """Return, as text, which tensors must have which value for a layer to add nothing."""
    by_value: dict[float, list[str]] = {}
    for suffix, value in kind.silence.items():
        by_value.setdefault(value, []).append(of_experts(suffix))
    return "; ".join(f"{', '.join(dict.fromkeys(names))} = {value:g}" for value, names in by_value.items())


@dataclass(frozen=True)
class Trial:
    """An operation with one of its example options, tried on a base.

    Where the base accepts it, `promise` is the operation's promise there; elsewhere `refusal` is the reason.
    """

    op: str
    options: Mapping[str, object]
    promise: Promise | None
    refusal: str


def tried(
    name: str, operation: type[Operation], options: Mapping[str, object], anatomy: Anatomy, folder: CheckpointFolder
) -> Trial:
    """Try an operation on a base, in a plan of only this operation; return its promise, or why the base refuses it."""
    try:
        promise = _promise_of(_entry(name, operation, options), anatomy, folder)
    except BadInput as error:
        return Trial(name, options, None, str(error))
    return Trial(name, options, promise, "")


def _entry(name: str, operation: type[Operation], options: Mapping[str, object]) -> Operation:
    """Return an operation with these options. Raises BadInput where the options are not valid in a plan."""
    try:
        return operation.model_validate({"op": name, **options})
    except ValidationError as error:
        wrong = "; ".join(
            f"`{'.'.join(map(str, problem['loc']))}` {problem['msg']}".removeprefix("`` ") for problem in error.errors()
        )
        raise BadInput(f"not tried, as its `examples` are no entries of a plan: {printable(wrong)}") from None


def _promise_of(operation: Operation, anatomy: Anatomy, folder: CheckpointFolder) -> Promise:
    """Draw a plan of only this operation on a base, and return its promise. Raises BadInput where the base refuses."""
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
    """Return the facts that an operation needs about a base.

    None where they need weights that are not local, and for an encoder where the operation is only for decoders.
    """
    if base.anatomy.family.encoder and not operation.on_encoders:
        return None
    try:
        return operation.prepare(base)
    except WeightsNeeded:
        return None


def options_text(options: Mapping[str, object]) -> str:
    """Return an operation's options as text, as a plan writes them."""
    return _written(options)[1:-1]


def _written(value: object) -> str:
    """Return a value as a plan writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_written(each)}" for key, each in value.items()) + "}"
    return str(value)
