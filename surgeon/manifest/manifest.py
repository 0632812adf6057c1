"""The manifest, `surgery.json`: what was done to a checkpoint, tensor by tensor, with digests.

It is a claim: whoever writes a checkpoint writes its manifest too. On reading, each surgery in it must have the seal
that its content asks for, so that no field was edited alone; who seals it anew is found out by the base alone, of which
`verify` makes the manifest again (`surgeon/verify/claims.py`), or by a digest of the base that was noted elsewhere.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgeon.blueprint.draft import Promise, Trains
from surgeon.blueprint.measured import MeasuredLayers, TextLoss
from surgeon.checkpoint.folder import MANIFEST_FILE as MANIFEST_FILE
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.peft_folder import Adapter, AdapterTensor, check_pattern
from surgeon.checkpoint.tokenizer_files import GrownVocabulary, MeasuredText
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import layer_of, owner_of, renumbered

FORMAT = 1
# The share of variance below which a network's fit is called poor.
LITTLE_EXPLAINED = 0.1
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Entry(BaseModel):
    """A part of a file that surgeon writes; unknown keys are refused."""

    # `model_type` is a model's; pydantic before 2.10 warns of every field that begins as its own names do.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


EntryT = TypeVar("EntryT", bound=Entry)

# A tensor of the base, the first of its rows that is meant, and the first that is not.
Rows = tuple[str, int, int]


class Tool(Entry):
    """What wrote the checkpoint."""

    name: Literal["surgeon"]
    version: str


class StoredTensor(Entry):
    """A tensor's value, as a file of weights has it: dtype, shape, and the digest of its bytes."""

    dtype: str
    shape: list[Annotated[int, Field(ge=0)]]
    sha256: Sha256

    @classmethod
    def of(cls, info: TensorInfo, sha256: str) -> StoredTensor:
        """The value of a tensor whose bytes have this digest."""
        return cls(dtype=info.dtype, shape=list(info.shape), sha256=sha256)


class Base(Entry):
    """The checkpoint that was operated on: where it came from and what it held.

    `config` is its config.json as data; `files` are digests of the files beside its weights that came along: tokenizer
    and other side files, and the code of its grafts.
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
    """One graft of a layer; `operation` is None where the base brought it."""

    text: str
    operation: int | None


class LayerEntry(Entry):
    """One layer of the output: which base layer it is, or what made it from what, and the grafts it carries."""

    base: int | None
    operation: int | None
    init: str
    sources: list[int]
    grafts: list[GraftEntry] = []


class NewTensor(StoredTensor):
    """A tensor the base does not have, or has otherwise: which operation made it, how, and its value at birth."""

    operation: int
    recipe: dict[str, Any]

    @property
    def extends(self) -> str | None:
        """The base's tensor that its first rows are, where it has that and more rows."""
        of = self.recipe.get("extended")
        source = of.get("copy") if isinstance(of, dict) else None
        return source if isinstance(source, str) else None

    @property
    def per_layer(self) -> str | None:
        """The base's tensor whose parts of layers it holds, where it has one for each: none trains with new layers."""
        source = self.recipe.get("per_layer")
        return source if isinstance(source, str) else None

    @property
    def rows(self) -> tuple[Rows, ...]:
        """The rows of the base's tensors that it holds, one piece below the other: (tensor, first, end)."""
        told = self.recipe["rows"] if "still" in self.recipe else ()
        return tuple((name, start, stop) for name, start, stop in told)

    @property
    def still(self) -> bool:
        """Whether it stays as it is where new tensors train: the base computes with what it holds."""
        return self.per_layer is not None or self.recipe.get("still") is True

    @property
    def axis(self) -> int:
        """Along which it was joined."""
        axis = self.recipe.get("axis")
        return axis if type(axis) is int else 0

    @property
    def joined(self) -> list[JoinedPart]:
        """What stands side by side in it, where it was joined of several tensors."""
        parts, sizes = self.recipe.get("joined"), self.recipe.get("sizes")
        if not isinstance(parts, list) or not isinstance(sizes, list):
            return []
        sources = [part.get("copy") if isinstance(part, dict) else None for part in parts]
        return [JoinedPart(source, size) for source, size in zip(sources, sizes, strict=False)]

    @property
    def begins(self) -> list[int]:
        """Where along the axis each of the parts begins."""
        return [0, *itertools.accumulate(part.size for part in self.joined)][:-1]

    def places_of_parts(self) -> dict[str, tuple[int, ...]]:
        """Of each tensor of the base in it the indices along the axis at which it lies, in its own order."""
        found: dict[str, tuple[int, ...]] = {}
        for begin, part in zip(self.begins, self.joined, strict=True):
            if part.source is not None:
                found[part.source] = (*found.get(part.source, ()), *range(begin, begin + part.size))
        return found

    @property
    def fixed_spans(self) -> tuple[tuple[int, int], ...]:
        """Where in it tensors of the base lie that do not train with it; those of grafts do."""
        spans: list[tuple[int, int]] = []
        for begin, part in zip(self.begins, self.joined, strict=True):
            if part.source is not None and not _of_graft(part.source):
                spans.append((begin, begin + part.size))
        return tuple(spans)


@dataclass(frozen=True)
class JoinedPart:
    """A part of a joined tensor: the base's tensor that it is (None for another), and its size along the axis."""

    source: str | None
    size: int


class TrainedTensor(Entry):
    """What training made of a tensor: its digest, max |Δ| and ‖Δ‖ / ‖before‖ (None: it was zero before).

    `before` is the digest that it had before the run, where it held something of the base's that was to change.
    """

    sha256: Sha256
    max_change: float
    relative_change: float | None
    before: Sha256 | None = None


class AdapterEntry(Entry):
    """The PEFT adapter in `adapter/` whose product with itself is merged into what trained: its config and tensors."""

    config: Sha256
    tensors: dict[str, StoredTensor]


class TrainingEntry(Entry):
    """One training run of this surgery's output: by which config and settings, for how long, what it changed.

    `kept` are the tensors whose values from before all training lie in `base-tensors/` of this run's output.
    `published_step` is the step that was published, where that is the best one on a source. `scores` are, by source,
    what else was measured of a classification head: accuracy, and F1 and Matthews' correlation where there are any.
    """

    tool: Tool
    config: dict[str, Any]
    settings: dict[str, Any]
    steps: int
    tokens: int
    losses: dict[str, list[float]]
    tensors: dict[str, TrainedTensor]
    adapter: AdapterEntry | None = None
    kept: list[str] = []
    published_step: int | None = None
    # What was measured of a domain gate that the run fitted.
    gate: dict[str, Any] | None = None
    scores: dict[str, dict[str, float]] = {}


class ImportedAdapter(Entry):
    """A PEFT adapter that the plan imported: everything that drawing the plan again needs."""

    id: str
    revision: str | None
    alpha: Annotated[float, Field(allow_inf_nan=False)]
    rslora: bool
    dropout: Annotated[float, Field(ge=0, lt=1)]
    alpha_pattern: dict[str, Annotated[float, Field(allow_inf_nan=False)]]
    tensors: dict[str, StoredTensor]


class ModelEntry(Entry):
    """Another model that the plan took tensors from: what it is called, and one digest of those tensors' digests."""

    id: str
    sha256: Sha256


class MeasuredEntry(Entry):
    """What a growth of the vocabulary makes of a text (`MeasuredText`)."""

    use: str
    text: str
    sha256: Sha256
    documents: Annotated[int, Field(ge=0)]
    unchanged: Annotated[int, Field(ge=0)]
    words: Annotated[int, Field(ge=0)]
    before: Annotated[int, Field(ge=0)]
    after: Annotated[int, Field(ge=0)]


class VocabularyEntry(Entry):
    """A growth of the vocabulary: everything that drawing the plan again needs (`GrownVocabulary`).

    `made_of` has a line for each new token: the old ids that the old tokenizer made of it (none: it knew none).
    """

    kind: str
    how: str
    rows: Annotated[int, Field(ge=1)]
    made_of: list[Annotated[str, Field(pattern=r"^([0-9]{1,9}( [0-9]{1,9}){0,255})?$")]]
    inserted: dict[str, list[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]]]
    measured: list[MeasuredEntry]


class TextLossEntry(Entry):
    """What the base and what is left of it do on a text (`TextLoss`)."""

    text: str
    sha256: Sha256
    tokens: Annotated[int, Field(ge=1)]
    before: Annotated[float, Field(allow_inf_nan=False)]
    after: Annotated[float, Field(allow_inf_nan=False)]
    scores: list[Annotated[float, Field(allow_inf_nan=False)]]


_Layer = Annotated[int, Field(ge=0)]
_Number = Annotated[str, Field(pattern=r"^[0-9]{1,4}$")]


class DroppedEntry(Entry):
    """The layers of the base that an operation took out: everything that drawing the plan again needs.

    `layers` are these; `chosen` says that a measurement chose them, `merged` what became of layers that took others in
    (by layer the factor), `silent` which of these layers add exactly nothing in the base (`MeasuredLayers`).
    """

    layers: list[_Layer]
    chosen: bool
    merged: dict[_Number, dict[_Number, int]]
    silent: list[_Layer]
    text: TextLossEntry | None


class FitEntry(Entry):
    """How well a network that predicted matrices fits those that it learned from (`surgeon.apply.prediction.Fit`)."""

    explained: Annotated[float, Field(le=1, allow_inf_nan=False)]
    cosine: Annotated[float, Field(allow_inf_nan=False)]
    norm: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    triples: Annotated[int, Field(ge=1)]


class Surgery(Entry):
    """One applied plan: the base, what was done to it, and what training made of the result since.

    `files` are digests of every file beside the weights but the card and the manifest itself. `sha256` is over all of
    this and the `sha256` of the surgery before (`seal_of`), so that no field can be edited alone. `proven`: the
    libraries, with versions, by which a promise of exactness was proven on a twin before anything was written.
    """

    surgeon_manifest: Literal[1]
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
    texts: dict[str, Sha256]
    adapters: dict[str, ImportedAdapter]
    plugins: dict[str, str]
    training: list[TrainingEntry]
    vocabularies: dict[Annotated[str, Field(pattern=r"^[0-9]{1,2}$")], VocabularyEntry] = {}
    models: dict[str, ModelEntry] = {}
    dropped: dict[Annotated[str, Field(pattern=r"^[0-9]{1,2}$")], DroppedEntry] = {}
    fits: dict[str, FitEntry] = {}
    proven: dict[str, str] = {}

    @property
    def own(self) -> dict[str, Any]:
        """The fields of this surgery alone, as they are; those that came after it was written are not among them."""
        return {name: getattr(self, name) for name in Surgery.model_fields if name in self.model_fields_set}

    @property
    def inserted(self) -> dict[str, list[list[int]]]:
        """Of the tokenizer files that grew, where bytes were inserted, and how many."""
        return {name: where for grown in self.vocabularies.values() for name, where in grown.inserted.items()}

    @property
    def poor_fits(self) -> list[str]:
        """The networks that explain less than `LITTLE_EXPLAINED` of what they learned from."""
        return [name for name, fit in self.fits.items() if fit.explained < LITTLE_EXPLAINED]

    @property
    def fit_text(self) -> str:
        """How well networks predict the matrices that they learned from, in a sentence; empty where there is none."""
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
    def dropped_layers(self) -> dict[int, int]:
        """The layers of the base that are not in the output, each with the operation that took it out."""
        return {layer: int(number) for number, entry in self.dropped.items() for layer in entry.layers}

    @property
    def code(self) -> dict[str, Sha256]:
        """Digests of the files of code."""
        return {name: digest for name, digest in self.files.items() if name.endswith(".py")}

    @property
    def trained(self) -> dict[str, Sha256]:
        """Digests of the tensors that were trained since the surgery, as the last run left each."""
        return {name: tensor.sha256 for run in self.training for name, tensor in run.tensors.items()}

    @property
    def changed_of_base(self) -> dict[str, Sha256]:
        """Digests that tensors had before the first training that was to change something of the base's in them."""
        found: dict[str, Sha256] = {}
        for run in self.training:
            for name, tensor in run.tensors.items():
                if tensor.before is not None:
                    found.setdefault(name, tensor.before)
        return found

    @property
    def kept(self) -> dict[str, Sha256]:
        """Digests of what lies in `base-tensors/` of this very output, by the tensors' names."""
        held = set(self.training[-1].kept) if self.training else set()
        return {name: digest for name, digest in self.changed_of_base.items() if name in held}

    @property
    def adapter(self) -> AdapterEntry | None:
        """The PEFT adapter in `adapter/` of this very output."""
        return self.training[-1].adapter if self.training else None


class Manifest(Surgery):
    """Everything `surgery.json` says: the last surgery, and in `lineage` those before it, oldest first."""

    lineage: list[Surgery]

    @property
    def base_digest(self) -> str:
        """One digest of the base: its config, tensors, files, and the seal of its own last surgery."""
        base = self.base.model_dump(include={"config", "tensors", "files"})
        return _sha256({**base, "surgery": self.lineage[-1].sha256 if self.lineage else None})

    def changed(self, **fields: Any) -> Manifest:
        """The manifest with other fields, sealed anew."""
        changed = self.model_copy(update=fields)
        return changed.model_copy(update={"sha256": seal_of(changed.data())})

    def data(self) -> dict[str, Any]:
        """As JSON data. Fields that came after an entry was written stay out of it: its seal is without them."""
        return self.model_dump(exclude_unset=True)

    def to_bytes(self) -> bytes:
        """The file's content."""
        return (json.dumps(self.data(), indent=1, ensure_ascii=False) + "\n").encode()


def seal_of(data: Mapping[str, Any]) -> str:
    """What `sha256` of a manifest (as JSON data) must be: a digest of all else in it.

    Of the surgeries before it counts the seal of the last, which stands for those before.
    """
    own = {key: value for key, value in data.items() if key not in ("sha256", "lineage")}
    lineage = data.get("lineage")
    return _sha256({**own, "after": lineage[-1]["sha256"] if lineage else None})


def _sha256(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def sealed(data: dict[str, Any]) -> Manifest:
    """The manifest of these fields, all but its seal."""
    return Manifest(**data, sha256="0" * 64).changed()


def adapters_of(manifest: Manifest, *, file: str) -> dict[str, Adapter]:
    """What is known of the adapters that the manifest's plan imported; BadInput where that is no adapter's."""
    for entry in manifest.adapters.values():
        for pattern in entry.alpha_pattern:
            check_pattern(pattern, printable(file))
    adapters: dict[str, Adapter] = {}
    for name, entry in manifest.adapters.items():
        tensors = {
            tensor: AdapterTensor(known.dtype, tuple(known.shape), known.sha256)
            for tensor, known in entry.tensors.items()
        }
        adapters[name] = Adapter(**entry.model_dump(exclude={"tensors"}), tensors=tensors)
    return adapters


def vocabularies_of(manifest: Surgery, *, file: str) -> dict[int, GrownVocabulary]:
    """What the manifest's plan added to the vocabulary, by operation; BadInput where that is no base's."""
    found: dict[int, GrownVocabulary] = {}
    for number, entry in manifest.vocabularies.items():
        made_of = tuple(tuple(map(int, line.split())) for line in entry.made_of)
        if any(token >= entry.rows for named in made_of for token in named):
            raise BadInput(f"{printable(file)}: `vocabularies` names a token beyond the base's; was it edited by hand?")
        found[int(number)] = GrownVocabulary(
            kind=entry.kind,
            how=entry.how,
            rows=entry.rows,
            made_of=made_of,
            inserted={
                name: tuple((begin, length) for begin, length in where) for name, where in entry.inserted.items()
            },
            measured=tuple(MeasuredText(**text.model_dump()) for text in entry.measured),
        )
    return found


def measured_of(manifest: Surgery) -> dict[int, MeasuredLayers]:
    """What was measured of the base's layers for the operations of the manifest's plan that took some out."""
    return {
        int(number): MeasuredLayers(
            layers=tuple(entry.layers) if entry.chosen else (),
            merged={int(layer): {int(of): by for of, by in made.items()} for layer, made in entry.merged.items()},
            silent=frozenset(entry.silent),
            text=None if entry.text is None else _text_loss(entry.text),
        )
        for number, entry in manifest.dropped.items()
    }


def _text_loss(entry: TextLossEntry) -> TextLoss:
    return TextLoss(**entry.model_dump(exclude={"scores"}), scores=tuple(entry.scores))


def parse(data: object, *, file: str) -> Manifest:
    """Check a manifest read as JSON data; BadInput names the first thing that is not as it must be.

    Every surgery in it must have the seal that its content asks for.
    """
    manifest = checked(Manifest, data, "manifest", file=file)
    assert isinstance(data, dict)
    lineage: list[dict[str, Any]] = data["lineage"]
    for number, entry in enumerate([*lineage, data], 1):
        if seal_of({**entry, "lineage": lineage[: number - 1]}) != entry["sha256"]:
            which = f" (surgery {number})" if number <= len(lineage) else ""
            raise BadInput(
                f"{printable(file)}{which}: not what its sha256 says, so it was edited since surgeon wrote it; use the"
                " file as it was"
            )
    for surgery in (*manifest.lineage, manifest):
        _check_extended(surgery, file)
        _check_parts(surgery, file)
        _check_rows(surgery, file)
        _check_joined(surgery, file)
    return manifest


def _check_extended(surgery: Surgery, file: str) -> None:
    """Raise BadInput where a tensor is said to begin with rows of the base's that it cannot begin with."""
    for name, made in surgery.new_tensors.items():
        old = surgery.base.tensors.get(made.extends or "")
        fits = old is not None and old.shape[1:] == made.shape[1:] and 0 < len(old.shape) == len(made.shape)
        if made.extends is not None and not (fits and old is not None and 0 < old.shape[0] <= made.shape[0]):
            raise BadInput(
                f"{printable(file)}: {printable(name)} is said to have the rows of the base's"
                f" {printable(made.extends)} and more, which it cannot; was it edited by hand?"
            )


def _check_parts(surgery: Surgery, file: str) -> None:
    """Raise BadInput where a tensor is said to hold parts of layers of the base's, and there are no such parts."""
    for name, made in surgery.new_tensors.items():
        if made.per_layer is None:
            continue
        old, axis = surgery.base.tensors.get(made.per_layer), made.recipe.get("axis")
        if old is None or type(axis) is not int or not 0 <= axis < len(old.shape):
            fits = False
        else:
            fits = [*old.shape[:axis], *made.shape[axis : axis + 1], *old.shape[axis + 1 :]] == made.shape
        if not fits:
            raise BadInput(
                f"{printable(file)}: {printable(name)} is said to hold a part of the base's"
                f" {printable(made.per_layer)} for each layer, which it cannot; was it edited by hand?"
            )


def _check_rows(surgery: Surgery, file: str) -> None:
    """Raise BadInput where a tensor is said to hold rows of the base's tensors, and these do not make it up."""
    for name, made in surgery.new_tensors.items():
        # An extended tensor tells a number of rows, and holds them otherwise.
        if "still" not in made.recipe:
            continue
        told = made.recipe.get("rows")
        if not isinstance(told, list) or not told or not all(_are_rows(piece, made, surgery) for piece in told):
            found = -1
        else:
            found = sum((stop - start) * _row(surgery.base.tensors[of]) for of, start, stop in told)
        if found != math.prod(made.shape):
            raise BadInput(
                f"{printable(file)}: {printable(name)} is said to hold rows of the base's tensors, which it cannot; was"
                " it edited by hand?"
            )


def _are_rows(piece: Any, made: NewTensor, surgery: Surgery) -> bool:
    """Whether it names rows of a tensor of the base, of the dtype of `made`."""
    if not isinstance(piece, list) or [type(each) for each in piece] != [str, int, int]:
        return False
    of = surgery.base.tensors.get(piece[0])
    return of is not None and of.dtype == made.dtype and bool(of.shape) and 0 <= piece[1] < piece[2] <= of.shape[0]


def _row(tensor: StoredTensor) -> int:
    """How many numbers are in one row."""
    return math.prod(tensor.shape[1:])


def _check_joined(surgery: Surgery, file: str) -> None:
    """Raise BadInput where a tensor is said to be joined of tensors that it cannot be joined of."""
    for name, made in surgery.new_tensors.items():
        if "joined" not in made.recipe:
            continue
        sizes = [part.size for part in made.joined]
        fits = 0 <= made.axis < len(made.shape) and all(type(size) is int and size > 0 for size in sizes)
        if not fits or sum(sizes) != made.shape[made.axis] or len(made.recipe["joined"]) != len(sizes):
            raise BadInput(
                f"{printable(file)}: {printable(name)} is said to be joined of parts that do not make it; was it edited"
                " by hand?"
            )


def checked(model: type[EntryT], data: object, what: str, *, file: str) -> EntryT:
    """The JSON data of a file that surgeon writes (`what`: its format's key is surgeon_WHAT), as `model` has it.

    Raises BadInput for another version of the format, and names the first thing that is not as it must be.
    """
    version = data.get(f"surgeon_{what}") if isinstance(data, dict) else None
    if version not in (FORMAT, None):
        raise BadInput(
            f"{printable(file)}: {what} format {printable(repr(version))}, this surgeon reads {FORMAT}; use the version"
            " that wrote it, or a newer one"
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = printable(".".join(str(step) for step in problem["loc"]) or "the file")
        raise BadInput(f"{printable(file)}: not a surgeon {what}: {where}: {printable(problem['msg'])}") from None


def layers_of(manifest: Manifest, *, file: str) -> dict[int, int]:
    """For every base layer its number in the output, if it was not taken out.

    BadInput where the manifest contradicts itself.
    """
    layers = {layer.base: index for index, layer in enumerate(manifest.layers) if layer.base is not None}
    named = sum(layer.base is not None for layer in manifest.layers)
    gone = [layer for entry in manifest.dropped.values() for layer in entry.layers]
    if sorted([*layers, *gone]) != list(range(manifest.base.layers)) or named != len(layers):
        raise BadInput(
            f"{printable(file)}: `layers` does not name each of the base's {manifest.base.layers} layers once;"
            " was it edited by hand?"
        )
    return layers


def places_of(manifest: Manifest, names: Iterable[str] | None = None, *, file: str = MANIFEST_FILE) -> dict[str, str]:
    """Where the base's tensors (or those of `names`) stand in the output; BadInput where the manifest does not say.

    Those that stand there in several pieces, or in a tensor with others, are left out (`pieces_of` has them), and those
    of layers taken out.
    """
    layers = _with_those_beyond(layers_of(manifest, file=file), manifest)
    gone = manifest.dropped_layers
    places: dict[str, str] = {}
    moved = pieces_of(manifest)
    for name in manifest.base.tensors if names is None else names:
        if name in moved:
            place = moved[name][0].place
            if len(moved[name]) == 1 and manifest.new_tensors[place].shape == manifest.base.tensors[name].shape:
                places[name] = place
            continue
        of_layer = layer_of(name)
        if of_layer is not None and of_layer[1] in gone:
            continue
        try:
            places[name] = renumbered(name, layers)
        except KeyError:
            raise BadInput(
                f"{printable(file)}: the base's {printable(name)} is in none of its {len(layers)} layers; was it edited"
                " by hand?"
            ) from None
    return places


def _with_those_beyond(layers: Mapping[int, int], manifest: Manifest) -> dict[int, int]:
    """Layers of the base above its stack, which predict further tokens, stay above the output's."""
    held = {place[1] for name in manifest.base.tensors if (place := layer_of(name)) is not None}
    grown = len(manifest.layers) - manifest.base.layers
    return dict(layers) | {index: index + grown for index in held if index >= manifest.base.layers}


@dataclass(frozen=True)
class Piece:
    """Numbers `begin:end` of the output's tensor `place`, counted through its rows."""

    place: str
    begin: int
    end: int


def pieces_of(manifest: Surgery) -> dict[str, tuple[Piece, ...]]:
    """Of the base's tensors that the output holds under other names, where it does: one piece after the other.

    Of several places those that stay as they are come first, then the first. What a graft begins as stands in the
    base's own place too.
    """
    tensors = manifest.base.tensors
    found: dict[str, dict[int, tuple[int, Piece]]] = {}
    for name, made in sorted(manifest.new_tensors.items(), key=lambda item: not item[1].still):
        if _of_graft(name):
            continue
        at = 0
        for of, start, stop in made.rows:
            end = at + (stop - start) * _row(tensors[of])
            found.setdefault(of, {}).setdefault(start, (stop, Piece(name, at, end)))
            at = end
    whole: dict[str, tuple[Piece, ...]] = {}
    for of, rows in found.items():
        pieces: list[Piece] = []
        at = 0
        while at in rows:
            at, piece = rows[at]
            pieces.append(piece)
        if at == tensors[of].shape[0]:
            whole[of] = tuple(pieces)
    return whole


def _of_graft(name: str) -> bool:
    """Whether a tensor is of a graft, by its name."""
    place = layer_of(name)
    return place is not None and owner_of(place[2]) is not None


def held_by(manifest: Manifest, *, file: str) -> dict[str, StoredTensor]:
    """What every tensor of the output holds, as far as the manifest says: born, kept, trained since."""
    held = {place: manifest.base.tensors[name] for name, place in places_of(manifest, file=file).items()}
    for made in manifest.new_tensors.values():
        # What became a part of a wider tensor stands there alone.
        for part in made.joined:
            held.pop(part.source or "", None)
    for name, made in manifest.new_tensors.items():
        held[name] = StoredTensor(dtype=made.dtype, shape=made.shape, sha256=made.sha256)
    for name, sha256 in manifest.trained.items():
        if name not in held:
            raise BadInput(f"{printable(file)}: `training` names {printable(name)}, which the output does not have")
        held[name] = held[name].model_copy(update={"sha256": sha256})
    return held


def manifest_of(folder: CheckpointFolder) -> Manifest:
    """The manifest of an output of surgeon; BadInput for any other checkpoint."""
    if folder.manifest is None:
        raise BadInput(
            f"{printable(str(folder.path))}: no {MANIFEST_FILE}, so this is not an output of surgeon (or it was"
            " saved again by another tool, which leaves that file out)"
        )
    return parse(folder.manifest, file=str(folder.path / MANIFEST_FILE))


def written_manifest(out: Path) -> Manifest:
    """The manifest of an output that surgeon has just written (or found complete)."""
    file = out / MANIFEST_FILE
    return parse(json.loads(file.read_bytes()), file=str(file))
