"""The manifest, `surgery.json`: what was done to a checkpoint, tensor by tensor, with digests.

`verify`, the trainer and further surgery trust it and nothing else; it is itself checked on reading, since a
checkpoint's manifest is as untrusted as its weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgeon._version import __version__
from surgeon.blueprint.draft import Blueprint
from surgeon.blueprint.recipes import describe
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.folder import MANIFEST_FILE as MANIFEST_FILE
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.peft_folder import Adapter, AdapterTensor, check_pattern
from surgeon.common.plain import plain_fields
from surgeon.errors import BadInput, printable
from surgeon.families import ENCODERS, FAMILIES
from surgeon.families.anatomy import native_config, renumbered
from surgeon.operations import OPERATIONS
from surgeon.plan.plan import LoadedPlan
from surgeon.runtime.bundle import bundle
from surgeon.runtime.known import plugins_in

FORMAT = 1
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Entry(BaseModel):
    """A part of a file that surgeon writes; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


EntryT = TypeVar("EntryT", bound=Entry)


class Tool(Entry):
    """What wrote the checkpoint."""

    name: Literal["surgeon"]
    version: str


class Base(Entry):
    """The checkpoint that was operated on: where it came from and what it held.

    `config` is its config.json as data; older versions of surgeon did not keep it.
    """

    id: str
    revision: str | None
    model_type: str
    layers: int
    tensors: dict[str, Sha256]
    config: dict[str, Any] | None = None

    @property
    def digest(self) -> str:
        """One digest for all tensors: sha256 over their names and digests, sorted."""
        return hashlib.sha256(json.dumps(self.tensors, sort_keys=True).encode()).hexdigest()


class OperationEntry(Entry):
    """One operation as it was carried out."""

    op: str
    matched: str
    promise: Literal["exact", "none"]
    reason: str
    trains: Literal["new", "all"]


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


class NewTensor(Entry):
    """A tensor the base does not have: how it came to be and its digest at birth."""

    shard: str
    operation: int
    recipe: dict[str, Any]
    sha256: Sha256


class TrainedTensor(Entry):
    """What training made of a tensor: its digest, max |Δ| and ‖Δ‖ / ‖before‖ (None: it was zero before)."""

    sha256: Sha256
    max_change: float
    relative_change: float | None


class TrainingEntry(Entry):
    """One training run of this surgery's output: by which config and settings, for how long, what it changed."""

    tool: Tool
    config: dict[str, Any]
    settings: dict[str, Any]
    steps: int
    tokens: int
    losses: dict[str, list[float]]
    tensors: dict[str, TrainedTensor]


class Ancestor(Entry):
    """An earlier surgery that the base itself came from.

    `sha256` is of that surgery's complete manifest, `manifest` that manifest as data without its `lineage` (which are
    the entries before this one); older versions of surgeon did not keep it.
    """

    sha256: Sha256
    base: str
    revision: str | None
    operations: list[str]
    tool: str
    manifest: dict[str, Any] | None = None


class ImportedTensor(Entry):
    """A tensor of an imported adapter, as the adapter's file had it."""

    dtype: str
    shape: list[Annotated[int, Field(ge=0)]]
    sha256: Sha256


class ImportedAdapter(Entry):
    """A PEFT adapter that the plan imported: everything that drawing the plan again needs."""

    id: str
    revision: str | None
    alpha: Annotated[float, Field(allow_inf_nan=False)]
    rslora: bool
    dropout: Annotated[float, Field(ge=0, lt=1)]
    alpha_pattern: dict[str, Annotated[float, Field(allow_inf_nan=False)]]
    tensors: dict[str, ImportedTensor]


class Manifest(Entry):
    """Everything `surgery.json` says."""

    surgeon_manifest: Literal[1]
    tool: Tool
    base: Base
    plan: str
    promise: Literal["exact", "none"]
    native: bool
    operations: list[OperationEntry]
    layers: list[LayerEntry]
    new_tensors: dict[str, NewTensor]
    transport_maps: dict[str, dict[str, Any]]
    lineage: list[Ancestor]
    code: dict[str, Sha256] = {}
    texts: dict[str, Sha256] = {}
    adapters: dict[str, ImportedAdapter] = {}
    plugins: dict[str, str] = {}
    training: list[TrainingEntry] = []

    @property
    def trained(self) -> dict[str, Sha256]:
        """Digests of the tensors that were trained since the surgery, as the last run left each."""
        return {name: tensor.sha256 for run in self.training for name, tensor in run.tensors.items()}

    def to_bytes(self) -> bytes:
        """The file's content."""
        # An ancestor whose entry lacks a field that came later is written as it was: digests are over such entries.
        return (json.dumps(self.model_dump(exclude_unset=True), indent=1, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class BaseId:
    """How the base is called: a Hub id with the commit it was read at, or a folder's name."""

    name: str
    revision: str | None = None


def compose(
    loaded: LoadedPlan,
    blueprint: Blueprint,
    base: CheckpointFolder,
    base_id: BaseId,
    shards: tuple[Shard, ...],
    *,
    digests: Mapping[str, str],
    base_digests: Mapping[str, str],
    maps: Mapping[str, dict[str, Any]],
    texts: Mapping[str, str],
    adapters: Mapping[str, Adapter],
) -> Manifest:
    """The manifest of a finished execution. `digests` are of output tensors, `base_digests` of base tensors."""
    manifest = Manifest(
        surgeon_manifest=1,
        tool=Tool(name="surgeon", version=__version__),
        base=Base(
            id=base_id.name,
            revision=base_id.revision,
            model_type=str(base.config["model_type"]),
            layers=len(blueprint.layer_of_base),
            tensors=dict(sorted(base_digests.items())),
            config=base.config,
        ),
        plan=loaded.text,
        promise=blueprint.promise,
        native=blueprint.native,
        operations=[
            OperationEntry(
                op=record.op,
                matched=record.matched,
                promise=record.claim.promise,
                reason=record.claim.reason,
                trains=record.trains,
            )
            for record in blueprint.operations
        ],
        layers=[
            LayerEntry(
                base=layer.base,
                operation=layer.operation,
                init=layer.init,
                sources=list(layer.sources),
                grafts=[GraftEntry(text=graft.text, operation=graft.operation) for graft in layer.grafts],
            )
            for layer in blueprint.layers
        ],
        new_tensors={
            output.name: NewTensor(
                shard=shard.file,
                operation=output.operation or 0,
                recipe=describe(output.recipe),
                sha256=digests[output.name],
            )
            for shard in shards
            for output in shard.outputs
            if output.new
        },
        transport_maps=dict(sorted(maps.items())),
        lineage=_lineage(base),
        code={name: hashlib.sha256(bundle(blueprint.config)).hexdigest() for name in blueprint.code_files},
        texts=dict(texts),
        adapters={name: ImportedAdapter(**plain_fields(adapter)) for name, adapter in adapters.items()},
    )
    plugins = plugins_of(blueprint)
    return manifest.model_copy(update={"plugins": plugins}) if plugins else manifest


def plugins_of(blueprint: Blueprint) -> dict[str, str]:
    """The distributions (with versions) whose operations, family or code took part."""
    native = native_config(blueprint.config)
    brought = [OPERATIONS.plugin_of(record.op) for record in blueprint.operations]
    brought += [families.plugin_of(native["model_type"]) for families in (FAMILIES, ENCODERS)]
    return {plugin.distribution: plugin.version for plugin in brought if plugin} | plugins_in(blueprint.config)


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


def parse(data: object, *, file: str) -> Manifest:
    """Check a manifest read as JSON data; BadInput names the first thing that is not as it must be."""
    return checked(Manifest, data, "manifest", file=file)


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
    """For every base layer its number in the output; BadInput where the manifest contradicts itself."""
    layers = {layer.base: index for index, layer in enumerate(manifest.layers) if layer.base is not None}
    named = sum(layer.base is not None for layer in manifest.layers)
    if sorted(layers) != list(range(manifest.base.layers)) or named != len(layers):
        raise BadInput(
            f"{printable(file)}: `layers` does not name each of the base's {manifest.base.layers} layers once;"
            " was it edited by hand?"
        )
    return layers


def places_of(manifest: Manifest, names: Iterable[str] | None = None, *, file: str = MANIFEST_FILE) -> dict[str, str]:
    """Where the base's tensors (or those of `names`) stand in the output; BadInput where the manifest does not say."""
    layers = layers_of(manifest, file=file)
    places: dict[str, str] = {}
    for name in manifest.base.tensors if names is None else names:
        try:
            places[name] = renumbered(name, layers)
        except KeyError:
            raise BadInput(
                f"{printable(file)}: the base's {printable(name)} is in none of its {len(layers)} layers; was it edited"
                " by hand?"
            ) from None
    return places


def held_by(manifest: Manifest, *, file: str) -> dict[str, str]:
    """What every tensor of the output holds, by digests, as far as the manifest says: born, kept, trained since."""
    held = {place: manifest.base.tensors[name] for name, place in places_of(manifest, file=file).items()}
    held.update({name: tensor.sha256 for name, tensor in manifest.new_tensors.items()})
    return held | manifest.trained


def digest_of(manifest: Mapping[str, Any]) -> str:
    """The digest by which a later surgery's lineage knows this one's manifest (as data)."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _lineage(base: CheckpointFolder) -> list[Ancestor]:
    """The base's own surgeries, oldest first; none where its manifest is absent."""
    if base.manifest is None:
        return []
    earlier = parse(base.manifest, file=f"{base.path / MANIFEST_FILE}")
    return [
        *earlier.lineage,
        Ancestor(
            sha256=digest_of(base.manifest),
            base=earlier.base.id,
            revision=earlier.base.revision,
            operations=[entry.op for entry in earlier.operations],
            tool=earlier.tool.version,
            manifest={key: value for key, value in base.manifest.items() if key != "lineage"},
        ),
    ]


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
