"""The manifest, `surgery.json`: what was done to a checkpoint, tensor by tensor, with digests.

The manifest is a claim: whoever writes a checkpoint writes its manifest too. On reading, the seal of each surgery is
compared with its content, so that no field can be edited alone. Somebody who edits a field and seals it again is
detected only with the base, from which `verify` makes the manifest again (`surgeon/verification/claims.py`), or with a
digest of the base that was noted elsewhere.
"""

# Mutable defaults are safe, because pydantic copies them.
# ruff: noqa: RUF012
from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from surgeon.blueprint.blueprint import Promise, Trains
from surgeon.blueprint.recipes import Means
from surgeon.blueprint.recipes.recipe import Holds, Recipe, that_stay
from surgeon.checkpoint.folder import MANIFEST_FILE as MANIFEST_FILE
from surgeon.checkpoint.header import DTYPE_BITS, TensorInfo
from surgeon.checkpoint.pieces import Pieces, Span
from surgeon.checkpoint.source import is_side_file
from surgeon.common.schema import Bounded, Many
from surgeon.errors import printable
from surgeon.operations.prepare import KeptFacts, SideFile, TextCounts

FORMAT = 3
# The share of variance below which a network's fit is called poor.
LITTLE_EXPLAINED = 0.1
# An operation's number in its plan.
_Number = Annotated[str, Field(pattern=r"^[0-9]{1,2}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Entry(Bounded):
    """A part of a file that surgeon writes."""


EntryT = TypeVar("EntryT", bound=Entry)


class Tool(Entry):
    """The program that wrote the checkpoint."""

    name: Literal["surgeon"]
    version: str


def _known_dtype(dtype: str) -> str:
    """Return the dtype unchanged. Raises ValueError for a dtype that safetensors does not know."""
    if dtype not in DTYPE_BITS:
        raise ValueError(f"unknown dtype {printable(dtype)}")
    return dtype


class StoredTensor(Entry):
    """A tensor's value as stored in a file of weights: dtype, shape, and the digest of its bytes."""

    dtype: Annotated[str, AfterValidator(_known_dtype)]
    shape: list[Many]
    sha256: Sha256

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @classmethod
    def of(cls, info: TensorInfo, sha256: str) -> StoredTensor:
        """Return the stored value of a tensor, given its header entry and digest."""
        return cls(dtype=info.dtype, shape=list(info.shape), sha256=sha256)


class Base(Entry):
    """The checkpoint that was operated on: its origin and its content.

    `config` is its config.json as data. `files` are the digests of the files next to its weights that the output keeps:
    tokenizer and other side files, and the code of its grafts.
    """

    id: str
    revision: str | None
    model_type: str
    layers: int
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: dict[str, Sha256]

    @property
    def digests(self) -> dict[str, str]:
        """The digest of every tensor's bytes."""
        return {name: tensor.sha256 for name, tensor in self.tensors.items()}


class OperationEntry(Entry):
    """One operation as it was carried out."""

    op: str
    matched: str
    promise: Promise
    reason: str
    trains: Trains


class GraftEntry(Entry):
    """One graft of a layer; `operation` is None where the base already had the graft."""

    text: str
    operation: int | None


class LayerEntry(Entry):
    """One layer of the output: its base layer, or the operation and source layers that made it, and its grafts."""

    base: int | None
    operation: int | None
    init: str
    sources: list[int]
    grafts: list[GraftEntry] = []


def _possible_spans(text: str) -> str:
    """Return the spans' text unchanged. Raises ValueError where the runs of a span overlap."""
    for span in text.split("; "):
        # A span of a single run has three numbers: 1, 0, 0 stand for its count and steps.
        _, length, _, count, step, every = (*map(int, span.split()), 1, 0, 0)[:6]
        if count != 1 and not 0 < length <= min(step, every):
            raise ValueError(f"runs over each other: {span}")
    return text


_SPAN = "[0-9]{1,16}( [0-9]{1,16}){2}( [1-9][0-9]{0,15}( [0-9]{1,16}){2})?"
# Spans of one tensor (`Span`): first byte in the source, length, first byte here; for several runs, count and steps.
_Spans = Annotated[str, Field(pattern=f"^{_SPAN}(; {_SPAN})*$"), AfterValidator(_possible_spans)]


class NewTensor(StoredTensor):
    """A tensor that the base lacks or has with another value: the operation that made it, how, and its value at birth.

    `spans` are the base's bytes in it, by the base's tensors; bytes repeated from a tensor that is complete in it or
    elsewhere are left out. `holds` states whether these bytes train. `copied`: it begins as a copy of one tensor that
    also stays in its own place. `grown_from` is the first row that is not the base's, where a vocabulary grew.
    """

    operation: int
    how: str
    holds: Holds | None = None
    spans: dict[str, _Spans] = {}
    grown_from: Many | None = None

    @classmethod
    def made(cls, recipe: Recipe, sha256: str, operation: int) -> NewTensor:
        """Return the entry of the tensor that a recipe makes and whose bytes have this digest."""
        more: dict[str, Any] = {}
        if recipe.own.spans:
            more = {"holds": recipe.holds, "spans": _as_text(recipe.own)}
            for each in recipe.walk():
                more |= {"grown_from": each.first} if isinstance(each, Means) else {}
        shape = list(recipe.shape)
        return cls(dtype=recipe.dtype, shape=shape, sha256=sha256, operation=operation, how=recipe.how, **more)

    @cached_property
    def pieces(self) -> Pieces:
        """The base's bytes in this tensor, parsed from `spans`."""
        each = ((name, map(int, span.split())) for name, text in self.spans.items() for span in text.split("; "))
        return Pieces.of(self.nbytes, (Span(name, *numbers) for name, numbers in each))

    @cached_property
    def kept(self) -> Pieces:
        """The base's bytes in this tensor that do not train when the new tensors train."""
        return that_stay(self.pieces, self.holds)

    @property
    def is_copy(self) -> bool:
        """Whether this tensor begins as a copy of one tensor that also stays in its own place."""
        return self.holds == "copied"

    @property
    def stays(self) -> bool:
        """Whether the whole tensor stays fixed when new tensors train: the base computes with its content."""
        return bool(self.kept.spans) and self.kept.covered


def _as_text(pieces: Pieces) -> dict[str, str]:
    """Return the spans as text, grouped by their source tensors."""
    found: dict[str, list[str]] = {}
    for span in pieces.spans:
        runs = f" {span.count} {span.step} {span.every}" if span.count > 1 else ""
        found.setdefault(span.tensor, []).append(f"{span.offset} {span.length} {span.at}{runs}")
    return {name: "; ".join(spans) for name, spans in found.items()}


class TrainedTensor(Entry):
    """A tensor's change by training: its digest after it, max |Δ| and ‖Δ‖ / ‖before‖ (None: it was zero before).

    `before` is its digest before the run, where the run was to change bytes of the base in it.
    """

    sha256: Sha256
    max_change: float
    relative_change: float | None
    before: Sha256 | None = None


class AdapterEntry(Entry):
    """The PEFT adapter in `adapter/`, whose product B A is already merged into the trained tensors."""

    config: Sha256
    tensors: dict[str, StoredTensor]


class Mean(Entry):
    """A mean, and the ends of its 95 % confidence interval."""

    value: float
    low: float | None = None
    high: float | None = None


class AnswersEntry(Entry):
    """A model's answers beside those before a run, as `KeptAnswers` says; None where it does not apply."""

    prompts: int
    silent: int
    kl: Mean | None
    prefix: Mean
    same: Mean
    right: Mean | None
    right_of_base: Mean | None

    @property
    def text(self) -> str:
        """The figures in words."""
        apart = "" if self.kl is None else f"KL {self.kl.value:.4f} nats a token, "
        return (
            f"to {self.prompts:,} prompts, beside those before the run: {apart}{self.prefix.value:.0%} of an answer"
            f" before the first difference, {self.same.value:.0%} the same"
        )


class TrainingEntry(Entry):
    """One training run of this surgery's output: its config and settings, its length, and its changes.

    `kept` are the tensors whose values from before all training are in `base-tensors/` of this run's output.
    `published_step` is the step that was published, where this is the best step on a source. `scores` are, by source,
    further measurements of a classification head: accuracy, and F1 and Matthews' correlation where defined. `curves`
    are, by source, the held-out losses by step, for each step with a measurement.
    """

    tool: Tool
    config: dict[str, Any]
    settings: dict[str, Any]
    steps: int
    tokens: Many
    losses: dict[str, list[float]]
    tensors: dict[str, TrainedTensor]
    adapter: AdapterEntry | None = None
    kept: list[str] = []
    published_step: int | None = None
    # Measurements of a domain gate that the run fitted.
    gate: dict[str, Any] | None = None
    scores: dict[str, dict[str, float]] = {}
    # How near answers are to those before the run.
    answers: AnswersEntry | None = None
    curves: dict[str, dict[str, float]] = {}
    # Notes on what was left out of its texts, and on how they were read.
    notes: list[str] = []

    @property
    def blend(self) -> str:
        """The shares of the run in a blend with the base, in words; empty where the tensors were trained instead."""
        shares = self.config.get("blend")
        if not isinstance(shares, dict):
            return ""
        bottom, top = (json.dumps(shares.get(key)) for key in ("alpha", "alpha_top"))
        return f"blended with the base: {bottom} of the run" + ("" if top == bottom else f" to {top} in the top layer")


class ModelEntry(Entry):
    """Another model from which the plan took tensors: its name, and one digest over the digests of those tensors."""

    id: str
    sha256: Sha256


class FitEntry(Entry):
    """How well a network that predicts matrices fits its training matrices (`surgeon.writing.prediction.Fit`)."""

    explained: Annotated[float, Field(le=1, allow_inf_nan=False)]
    cosine: Annotated[float, Field(allow_inf_nan=False)]
    norm: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    triples: Annotated[int, Field(ge=1)]


class ChangeEntry(Entry):
    """A merge's change ΔW of a tensor W, and the part of it that rounding left.

    `change` is ‖ΔW‖ / ‖W‖ (None: W is zero). `nearest` and `kept` are the shares of ΔW that are left by rounding to
    nearest, and by the rounding actually used: ⟨actual change, ΔW⟩ / ‖ΔW‖². `guided` counts rows that were rounded so
    that their error cancels on the inputs of the adapter.
    """

    change: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    nearest: Annotated[float, Field(allow_inf_nan=False)]
    kept: Annotated[float, Field(allow_inf_nan=False)]
    guided: Annotated[int, Field(ge=0)]


class Surgery(Entry):
    """One applied plan: the base, the operations on it, and the training of the result since then.

    `files` are digests of every file next to the weights except the card and the manifest. `sha256` covers all of this
    and the `sha256` of the surgery before (`seal_of`), so that no field can be edited alone. `proven`: the libraries,
    with versions, with which a promise of exactness was proven on a twin before anything was written. Three fields are
    keyed by operation number. `facts` are what operations found in the base before the plan was drawn
    (`surgeon/operations/prepare.py`). `dropped` are the base's layers, and `left_behind` the base's tensors, that the
    output lacks.
    """

    surgeon_manifest: Literal[3]
    sha256: Sha256
    tool: Tool
    base: Base
    plan: str
    promise: Promise
    native: bool
    operations: list[OperationEntry]
    layers: list[LayerEntry]
    new_tensors: dict[str, NewTensor]
    transport_maps: dict[str, dict[str, Any]]
    files: dict[str, Sha256]
    # Empty: no operation names texts here any more.
    texts: dict[str, Sha256]
    plugins: dict[str, str]
    training: list[TrainingEntry]
    models: dict[str, ModelEntry] = {}
    dropped: dict[_Number, list[Many]] = {}
    left_behind: dict[_Number, list[str]] = {}
    fits: dict[str, FitEntry] = {}
    merged: dict[str, ChangeEntry] = {}
    facts: dict[_Number, KeptFacts] = {}
    proven: dict[str, str] = {}

    @property
    def own(self) -> dict[str, Any]:
        """The fields of this surgery only, unchanged, without fields that are newer than the manifest's writer."""
        return {name: getattr(self, name) for name in Surgery.model_fields if name in self.model_fields_set}

    @property
    def side_files(self) -> dict[str, SideFile]:
        """The side files that the output lacks or has changed from the base's, and how they differ."""
        found = (each for facts in self.facts.values() for each in facts.side_files.items())
        return {name: how for name, how in found if is_side_file(name)}

    @property
    def measured(self) -> list[TextCounts]:
        """The token counts of texts before and after changes of the vocabulary."""
        return [text for facts in self.facts.values() for text in facts.texts]

    @property
    def poor_fits(self) -> list[str]:
        """The networks that explain less than `LITTLE_EXPLAINED` of their training data's variance."""
        return [name for name, fit in self.fits.items() if fit.explained < LITTLE_EXPLAINED]

    @property
    def fit_text(self) -> str:
        """How well networks predict the matrices in their training data, in a sentence; empty without networks."""
        if not self.fits:
            return ""
        explained = [fit.explained for fit in self.fits.values()]
        cosines = [fit.cosine for fit in self.fits.values()]
        text = (
            f"{len(explained)} networks explain {min(explained):.1%} to {max(explained):.1%} of the variance of the"
            f" layers that they learned from (zeros: 0%), cosine {min(cosines):.2f} to {max(cosines):.2f}"
        )
        if not self.poor_fits:
            return text
        than = "no better than zeros" if min(explained) <= 0 else f"less than {LITTLE_EXPLAINED:.0%}"
        return f"{text}; {len(self.poor_fits)} of them poorly ({than}): what they made is not what lies between layers"

    @property
    def merge_text(self) -> str:
        """What merges changed and how much of it rounding left, in a sentence; empty without merges."""
        if not self.merged:
            return ""
        if not any(entry.change for entry in self.merged.values()):
            return f"{len(self.merged)} tensors stay as they are: what was merged adds nothing"
        sizes = [entry.change for entry in self.merged.values() if entry.change is not None]
        nearest, kept = ([getattr(e, key) for e in self.merged.values()] for key in ("nearest", "kept"))
        guided = sum(bool(entry.guided) for entry in self.merged.values())
        how = f"; rounding to nearest would leave as little as {min(nearest):.1%}" if guided else ""
        return (
            f"{len(self.merged)} tensors change by {min(sizes, default=0.0):.2g} to {max(sizes, default=0.0):.2g} of"
            f" their norm, of which {min(kept):.1%} or more is left after rounding"
            f"{f' ({guided} guided)' if guided else ''}{how}"
        )

    @property
    def dropped_layers(self) -> dict[int, int]:
        """The base's layers that the output lacks, each with the operation that removed it."""
        return {layer: int(number) for number, layers in self.dropped.items() for layer in layers}

    @property
    def without(self) -> dict[str, int]:
        """The base's tensors that were left behind, each with the operation that left it."""
        return {name: int(number) for number, names in self.left_behind.items() for name in names}

    @property
    def code(self) -> dict[str, Sha256]:
        """Digests of the code files."""
        return {name: digest for name, digest in self.files.items() if name.endswith(".py")}

    @property
    def trained(self) -> dict[str, Sha256]:
        """Digests of the tensors that were trained since the surgery, after the last run that changed each."""
        return {name: tensor.sha256 for run in self.training for name, tensor in run.tensors.items()}

    @property
    def changed_of_base(self) -> dict[str, Sha256]:
        """Digests of tensors before the first training run that was to change bytes of the base in them."""
        found: dict[str, Sha256] = {}
        for run in self.training:
            for name, tensor in run.tensors.items():
                if tensor.before is not None:
                    found.setdefault(name, tensor.before)
        return found

    @property
    def kept(self) -> dict[str, Sha256]:
        """Digests of the tensors in `base-tensors/` of this output, by the tensors' names."""
        there = set(self.training[-1].kept) if self.training else set()
        return {name: digest for name, digest in self.changed_of_base.items() if name in there}

    @property
    def adapter(self) -> AdapterEntry | None:
        """The PEFT adapter in `adapter/` of this output, or None."""
        return self.training[-1].adapter if self.training else None


class Manifest(Surgery):
    """The whole content of `surgery.json`: the last surgery, and in `lineage` the surgeries before it, oldest first."""

    lineage: list[Surgery]

    @property
    def base_digest(self) -> str:
        """One digest of the base: its config, tensors, files, and the seal of its own last surgery."""
        base = self.base.model_dump(include={"config", "tensors", "files"})
        return _sha256({**base, "surgery": self.lineage[-1].sha256 if self.lineage else None})

    def changed(self, **fields: Any) -> Manifest:
        """Return the manifest with these fields replaced and a new seal."""
        changed = self.model_copy(update=fields)
        return changed.model_copy(update={"sha256": seal_of(changed.data())})

    def data(self) -> dict[str, Any]:
        """Return the manifest as JSON data.

        Fields that did not exist when an entry was written stay out: the entry's seal does not cover them.
        """
        return self.model_dump(exclude_unset=True)

    def to_bytes(self) -> bytes:
        """Return the content of surgery.json."""
        return (json.dumps(self.data(), indent=1, ensure_ascii=False) + "\n").encode()


def seal_of(data: Mapping[str, Any]) -> str:
    """Return the correct `sha256` of a manifest (as JSON data): a digest of everything else in it.

    Of the lineage only the last seal enters the digest; it covers the surgeries before.
    """
    own = {key: value for key, value in data.items() if key not in ("sha256", "lineage")}
    lineage = data.get("lineage")
    return _sha256({**own, "after": lineage[-1]["sha256"] if lineage else None})


def _sha256(data: Mapping[str, Any]) -> str:
    """Return the hex sha256 of JSON data with sorted keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def sealed(data: dict[str, Any]) -> Manifest:
    """Return the manifest with these fields (all but the seal) and its seal."""
    return Manifest(**data, sha256="0" * 64).changed()
