"""The manifest that a plan makes on a base: written by `apply`, and made again by `verify` to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surgeon._version import __version__
from surgeon.blueprint.draft import Blueprint
from surgeon.blueprint.measured import MeasuredLayers
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.peft_folder import Adapter
from surgeon.checkpoint.tokenizer_files import GrownVocabulary
from surgeon.common.json_results import plain_fields
from surgeon.families.anatomy import Anatomy, is_grafted, native_config
from surgeon.families.decoders import HINTS
from surgeon.manifest.manifest import (
    Base,
    DroppedEntry,
    FitEntry,
    GraftEntry,
    ImportedAdapter,
    LayerEntry,
    Manifest,
    MeasuredEntry,
    ModelEntry,
    NewTensor,
    OperationEntry,
    StoredTensor,
    Surgery,
    TextLossEntry,
    Tool,
    VocabularyEntry,
    sealed,
)
from surgeon.manifest.reading import manifest_of
from surgeon.operations import OPERATIONS
from surgeon.plan.plan import NO_OPERATIONS, LoadedPlan, draw, recorded_plan
from surgeon.runtime.bundle import CODE_FILE
from surgeon.runtime.known import plugins_in

TOOL = Tool(name="surgeon", version=__version__)


@dataclass(frozen=True)
class BaseId:
    """How the base is called: a Hub id with the commit it was read at, or a folder's name."""

    name: str
    revision: str | None = None


def base_entry(
    base: CheckpointFolder, base_id: BaseId, *, layers: int, digests: Mapping[str, str], files: Mapping[str, str]
) -> Base:
    """What a manifest says of an opened base whose tensors have `digests` and whose side files have those of `files`.

    Raises BadInput where its file of code cannot be read.
    """
    held = {name: files[name] for name in base.side_files}
    if is_grafted(base.config) and (code := base.read_code(CODE_FILE)) is not None:
        held[CODE_FILE] = hashlib.sha256(code).hexdigest()
    tensors = {name: StoredTensor.of(base.tensors[name], digests[name]) for name in sorted(digests)}
    return Base(
        id=base_id.name,
        revision=base_id.revision,
        model_type=str(base.config["model_type"]),
        layers=layers,
        config=base.config,
        tensors=tensors,
        files=dict(sorted(held.items())),
    )


def compose(
    loaded: LoadedPlan,
    blueprint: Blueprint,
    base: Base,
    lineage: list[Surgery],
    *,
    digests: Mapping[str, str],
    maps: Mapping[str, dict[str, Any]],
    texts: Mapping[str, str],
    adapters: Mapping[str, Adapter],
    files: Mapping[str, str],
    vocabularies: Mapping[int, GrownVocabulary],
    models: Mapping[str, ModelEntry],
    measured: Mapping[int, MeasuredLayers],
    fits: Mapping[str, Mapping[str, Any]],
    proven: Mapping[str, str] | None = None,
) -> Manifest:
    """The manifest of a finished execution. `digests` are of output tensors, `files` of the files beside them.

    `proven` are the versions of the libraries by which its promise was proven on a twin.
    """
    # Fields that only plans which grow a vocabulary, take tensors of other models, predict some, or take layers out,
    # have.
    grown: dict[str, Any] = {"vocabularies": _vocabulary_entries(vocabularies)} if vocabularies else {}
    grown |= {"models": dict(models)} if models else {}
    grown |= {"fits": {name: FitEntry(**fit) for name, fit in sorted(fits.items())}} if fits else {}
    grown |= {"dropped": _dropped_entries(blueprint, measured)} if blueprint.dropped else {}
    grown |= {"proven": dict(proven)} if proven else {}
    return sealed(
        {
            "surgeon_manifest": 1,
            "tool": TOOL,
            "base": base,
            "plan": loaded.text,
            "promise": blueprint.promise,
            "native": blueprint.native,
            "operations": [
                OperationEntry(
                    op=record.op,
                    matched=record.matched,
                    promise=record.claim.promise,
                    reason=record.claim.reason,
                    trains=record.trains,
                )
                for record in blueprint.operations
            ],
            "layers": [
                LayerEntry(
                    base=layer.base,
                    operation=layer.operation,
                    init=layer.init,
                    sources=list(layer.sources),
                    grafts=[GraftEntry(text=graft.text, operation=graft.operation) for graft in layer.grafts],
                )
                for layer in blueprint.layers
            ],
            "new_tensors": {
                output.name: NewTensor(
                    dtype=output.recipe.dtype,
                    shape=list(output.recipe.shape),
                    sha256=digests[output.name],
                    operation=output.operation or 0,
                    recipe=blueprint.words[output.name],
                )
                for output in blueprint.outputs
                if output.new
            },
            "transport_maps": dict(sorted(maps.items())),
            "files": dict(sorted(files.items())),
            "texts": dict(texts),
            "adapters": {name: ImportedAdapter(**plain_fields(adapter)) for name, adapter in adapters.items()},
            "plugins": plugins_of(blueprint),
            "training": [],
            "lineage": lineage,
        }
        | grown
    )


def without_surgery(
    base: CheckpointFolder, base_id: BaseId, anatomy: Anatomy, *, digests: Mapping[str, str], files: Mapping[str, str]
) -> Manifest:
    """The manifest of a model that was not operated on, as training begins with it: every tensor is the base's."""
    loaded = recorded_plan(NO_OPERATIONS, source="")
    return compose(
        loaded,
        draw(loaded, anatomy, base.config),
        base_entry(base, base_id, layers=anatomy.sizes.layers, digests=digests, files=files),
        [],
        digests={},
        maps={},
        texts={},
        adapters={},
        files=files,
        vocabularies={},
        models={},
        measured={},
        fits={},
    )


def _dropped_entries(blueprint: Blueprint, measured: Mapping[int, MeasuredLayers]) -> dict[str, DroppedEntry]:
    found: dict[str, DroppedEntry] = {}
    for number, layers in blueprint.dropped.items():
        facts = measured.get(number, MeasuredLayers())
        merged = facts.merged or {}
        found[str(number)] = DroppedEntry(
            layers=list(layers),
            chosen=bool(facts.layers),
            merged={str(layer): {str(of): by for of, by in made.items()} for layer, made in merged.items()},
            silent=[layer for layer in layers if layer in facts.silent],
            text=None if facts.text is None else TextLossEntry(**plain_fields(facts.text)),
        )
    return found


def _vocabulary_entries(vocabularies: Mapping[int, GrownVocabulary]) -> dict[str, VocabularyEntry]:
    return {
        str(number): VocabularyEntry(
            kind=grown.kind,
            how=grown.how,
            rows=grown.rows,
            made_of=[" ".join(map(str, named)) for named in grown.made_of],
            inserted={name: [list(place) for place in where] for name, where in grown.inserted.items()},
            measured=[MeasuredEntry(**plain_fields(text)) for text in grown.measured],
        )
        for number, grown in vocabularies.items()
    }


def plugins_of(blueprint: Blueprint) -> dict[str, str]:
    """The distributions (with versions) whose operations, family or code took part."""
    native = native_config(blueprint.config)
    brought = [OPERATIONS.plugin_of(record.op) for record in blueprint.operations]
    brought.append(HINTS.plugin_of(native["model_type"]))
    return {plugin.distribution: plugin.version for plugin in brought if plugin} | plugins_in(blueprint.config)


def surgeries_of(base: CheckpointFolder) -> list[Surgery]:
    """The base's own surgeries, oldest first (none: it is no output of surgeon). Raises BadInput for edited ones."""
    return [] if base.manifest is None else as_lineage(manifest_of(base))


def as_lineage(manifest: Manifest) -> list[Surgery]:
    """What `lineage` is in the manifest of a surgery on this one's output."""
    return [*manifest.lineage, Surgery(**manifest.own)]
