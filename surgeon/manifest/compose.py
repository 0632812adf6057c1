"""The manifest of a plan on a base: composed by `apply`, and composed again by `verify` for comparison."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surgeon._version import __version__
from surgeon.anatomy.anatomy import Anatomy
from surgeon.anatomy.decoders import HINTS
from surgeon.anatomy.grafted_config import is_grafted, native_config
from surgeon.blueprint.blueprint import Blueprint
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.grafts.bundle import CODE_FILE
from surgeon.grafts.registry import plugins_in
from surgeon.manifest.facts import kept
from surgeon.manifest.manifest import (
    FORMAT,
    Base,
    ChangeEntry,
    FitEntry,
    GraftEntry,
    LayerEntry,
    Manifest,
    ModelEntry,
    NewTensor,
    OperationEntry,
    StoredTensor,
    Surgery,
    Tool,
    sealed,
)
from surgeon.manifest.reading import manifest_of
from surgeon.operations import OPERATIONS
from surgeon.operations.prepare import Facts
from surgeon.plan.plan import NO_OPERATIONS, LoadedPlan, draw, recorded_plan

TOOL = Tool(name="surgeon", version=__version__)


@dataclass(frozen=True)
class BaseId:
    """The base's name: a Hub id with the commit that was read, or a folder's name."""

    name: str
    revision: str | None = None


def base_entry(
    base: CheckpointFolder, base_id: BaseId, *, layers: int, digests: Mapping[str, str], files: Mapping[str, str]
) -> Base:
    """Return the manifest's entry of an opened base.

    `digests` are the digests of its tensors, `files` those of its side files, by name. Raises BadInput where its code
    file cannot be read.
    """
    beside = {name: files[name] for name in base.side_files}
    if is_grafted(base.config) and (code := base.read_code(CODE_FILE)) is not None:
        beside[CODE_FILE] = hashlib.sha256(code).hexdigest()
    tensors = {name: StoredTensor.of(base.tensors[name], digests[name]) for name in sorted(digests)}
    return Base(
        id=base_id.name,
        revision=base_id.revision,
        model_type=str(base.config["model_type"]),
        layers=layers,
        config=base.config,
        tensors=tensors,
        files=dict(sorted(beside.items())),
    )


@dataclass(frozen=True)
class Written:
    """The results of an execution: what it wrote, and what it found on the way.

    `digests` are digests of output tensors, `files` of the files next to them. `reports` are reports of solvers, of
    networks and of merges, by the names of transport maps, networks and tensors. `models` are other models from which
    tensors were taken. `proven` are the versions of the libraries with which the promise was proven on a twin.
    """

    digests: Mapping[str, str]
    files: Mapping[str, str]
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    models: Mapping[str, ModelEntry] = field(default_factory=dict)
    proven: Mapping[str, str] = field(default_factory=dict)


def compose(
    loaded: LoadedPlan,
    blueprint: Blueprint,
    base: Base,
    lineage: list[Surgery],
    facts: Mapping[int, Facts],
    written: Written,
) -> Manifest:
    """Return the manifest of a finished execution.

    Args:
        loaded: the plan.
        blueprint: the plan drawn on the base.
        base: the manifest's entry of the base.
        lineage: the base's own surgeries, oldest first.
        facts: what operations found in the base, by their numbers.
        written: digests, and what the execution found on the way.
    """
    maps = {name: dict(report) for name, report in sorted(written.reports.items()) if name in blueprint.couplings}
    merged = {name: ChangeEntry(**written.reports[name]) for name in blueprint.changes if name in written.reports}
    others = {name: fit for name, fit in sorted(written.reports.items()) if name not in maps and name not in merged}
    fits = {name: FitEntry(**fit) for name, fit in others.items()}
    # Fields that only some plans have.
    more: dict[str, Any] = {"models": dict(written.models)} if written.models else {}
    more |= {"fits": fits} if fits else {}
    more |= {"merged": merged} if merged else {}
    more |= {"proven": dict(written.proven)} if written.proven else {}
    more |= {"facts": kept(facts)} if facts else {}
    for key, by_number in (("dropped", blueprint.dropped), ("left_behind", blueprint.left_behind)):
        more |= {key: {str(number): list(gone) for number, gone in by_number.items()}} if by_number else {}
    return sealed(
        {
            "surgeon_manifest": FORMAT,
            "tool": TOOL,
            "base": base,
            "plan": loaded.text,
            "promise": blueprint.promise,
            "native": blueprint.native,
            "operations": _operations_of(blueprint),
            "layers": _layers_of(blueprint),
            "new_tensors": _new_tensors_of(blueprint, written.digests),
            "transport_maps": maps,
            "files": dict(sorted(written.files.items())),
            "texts": {},
            "plugins": plugins_of(blueprint),
            "training": [],
            "lineage": lineage,
        }
        | more
    )


def _operations_of(blueprint: Blueprint) -> list[OperationEntry]:
    """Return the manifest's entry of each operation of the plan, in the plan's order."""
    return [
        OperationEntry(
            op=record.op,
            matched=record.matched,
            promise=record.claim.promise,
            reason=record.claim.reason,
            trains=record.trains,
        )
        for record in blueprint.operations
    ]


def _layers_of(blueprint: Blueprint) -> list[LayerEntry]:
    """Return the manifest's entry of each layer of the output: its origin and its grafts."""
    return [
        LayerEntry(
            base=layer.base,
            operation=layer.operation,
            init=layer.init,
            sources=list(layer.sources),
            grafts=[GraftEntry(text=graft.text, operation=graft.operation) for graft in layer.grafts],
        )
        for layer in blueprint.layers
    ]


def _new_tensors_of(blueprint: Blueprint, digests: Mapping[str, str]) -> dict[str, NewTensor]:
    """Return, by name, the manifest's entry of each tensor that the plan makes, with its digest."""
    return {
        output.name: NewTensor.made(output.recipe, digests[output.name], output.operation or 0)
        for output in blueprint.outputs
        if output.new
    }


def without_surgery(
    base: CheckpointFolder, base_id: BaseId, anatomy: Anatomy, *, digests: Mapping[str, str], files: Mapping[str, str]
) -> Manifest:
    """Return the manifest of a model without surgery, for training that starts from it: every tensor is the base's."""
    loaded = recorded_plan(NO_OPERATIONS, source="")
    return compose(
        loaded,
        draw(loaded, anatomy, base.config),
        base_entry(base, base_id, layers=anatomy.sizes.layers, digests=digests, files=files),
        [],
        {},
        Written(digests={}, files=files),
    )


def plugins_of(blueprint: Blueprint) -> dict[str, str]:
    """Return the plugin distributions (with versions) that provided operations, the model family or code."""
    native = native_config(blueprint.config)
    brought = [OPERATIONS.plugin_of(record.op) for record in blueprint.operations]
    brought.append(HINTS.plugin_of(native["model_type"]))
    return {plugin.distribution: plugin.version for plugin in brought if plugin} | plugins_in(blueprint.config)


def surgeries_of(base: CheckpointFolder) -> list[Surgery]:
    """Return the base's own surgeries, oldest first; empty where the base is no output of surgeon.

    Raises BadInput where its manifest was edited.
    """
    return [] if base.manifest is None else as_lineage(manifest_of(base))


def as_lineage(manifest: Manifest) -> list[Surgery]:
    """Return the `lineage` field for the manifest of a further surgery on this manifest's output."""
    return [*manifest.lineage, Surgery(**manifest.own)]
