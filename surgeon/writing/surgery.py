"""A surgery: the drawing of a plan on a base, and the job that carries it out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.card_metadata import Metadata, metadata_of
from surgeon.checkpoint.folder import CheckpointFolder, digests_of
from surgeon.errors import BadInput, printable
from surgeon.grafts.bundle import bundle
from surgeon.manifest.compose import BaseId, Written, base_entry, compose, surgeries_of
from surgeon.manifest.manifest import ModelEntry
from surgeon.operations.prepare import Facts, OpenedBase, SideFile
from surgeon.plan.plan import LoadedPlan
from surgeon.writing.job import Computing, Job, beside_weights, manifest_and_card, mirrored_in, model_files, places_in
from surgeon.writing.readback import ReadBack


@dataclass(frozen=True)
class Drawing:
    """A plan drawn on a base: `facts` are what operations gathered from the base, by their numbers.

    `proven` are the versions of the libraries with which its promise was proven.
    """

    plan: LoadedPlan
    facts: Mapping[int, Facts]
    blueprint: Blueprint
    shards: tuple[Shard, ...]
    proven: Mapping[str, str] = field(default_factory=dict)


def surgery_job(
    drawn: Drawing,
    opened: OpenedBase,
    base_id: BaseId,
    *,
    device: Callable[[], str],
    read_back: bool,
    link: bool = False,
) -> Job:
    """Return the job that carries out a plan; `device` is called only where torch is needed anyway.

    Raises BadInput where a side file does not match the facts.
    """
    blueprint, shards, base, changed = drawn.blueprint, drawn.shards, opened.folder, opened.side_files
    code = {name: bundle(blueprint.config) for name in blueprint.code_files}
    finish = _Finish(drawn, opened, base_id, metadata_of(base))
    _check_side_files(drawn.facts, opened)

    def look(staged: Path) -> None:
        """Check that the staged output's new parts compute finite numbers."""
        from surgeon.writing.overflow import check_finite

        check_finite(staged, opened, blueprint, device=device(), say=opened.listener.say)

    return Job(
        shards=shards,
        sources={"": base.source},
        places=places_in(base.tensors, shards),
        mirrored=mirrored_in(base, shards),
        files=model_files(blueprint.config, shards, code) | {n: c for n, c in changed.items() if c is not None},
        carried=base,
        carried_names=tuple(name for name in base.side_files if name not in changed),
        finish=finish,
        identity={
            "plan": drawn.plan.data(),
            "base": base.identity(),
            "base_id": [base_id.name, base_id.revision],
            "base_config": base.config,
            "metadata": asdict(finish.metadata),
            "facts": {str(number): facts.model_dump(mode="json") for number, facts in drawn.facts.items()},
            "models": {name: model.identity() for name, model in opened.models.items()},
        },
        computing=Computing(blueprint, base, opened.adapters, opened.models, device())
        if any(output.computed for output in blueprint.outputs)
        else None,
        read_back=read_back,
        link=link,
        recall=base,
        look=look if blueprint.promise == "exact" else None,
    )


@dataclass(frozen=True)
class _Finish:
    """The end of a surgery, once its tensors are written: the manifest, and the card."""

    drawn: Drawing
    opened: OpenedBase
    base_id: BaseId
    metadata: Metadata

    def __call__(self, proof: ReadBack) -> Mapping[str, bytes]:
        """Return the manifest and the card, by file name. Raises BadInput where something that was read has changed."""
        drawn, base = self.drawn, self.opened.folder
        blueprint = drawn.blueprint
        # Changed files are recorded with the base's digests; other uncarried files are not recorded.
        others = [n for n in base.side_files if n in self.opened.side_files]
        files = {**proof.files, **{n: _digest_of(base.read_side_file(n)) for n in others}}
        digests = proof.digests_of(base)
        found = base_entry(base, self.base_id, layers=len(blueprint.layer_of_base), digests=digests, files=files)
        for adapter in self.opened.adapters.values():
            adapter.check_unchanged()
        _check_code(base, proof.files)
        written = Written(
            digests=proof.digests,
            files=beside_weights(proof.files),
            reports=proof.maps,
            models=_model_entries(blueprint, self.opened.models),
            proven=drawn.proven,
        )
        manifest = compose(drawn.plan, blueprint, found, surgeries_of(base), drawn.facts, written)
        return manifest_and_card(manifest, blueprint.config, drawn.shards, self.metadata)


def _model_entries(blueprint: Blueprint, models: Mapping[str, CheckpointFolder]) -> dict[str, ModelEntry]:
    """Return the manifest's entries for other models: each model's folder name, and one digest of the tensors used.

    Raises BadInput where such a model has changed since it was opened.
    """
    found: dict[str, ModelEntry] = {}
    for name, tensors in blueprint.taken.items():
        models[name].check_unchanged()
        digests = digests_of(models[name], tensors, lambda _: None)
        digest = _digest_of(json.dumps(digests, sort_keys=True).encode())
        found[name] = ModelEntry(id=models[name].path.resolve().name, sha256=digest)
    return found


def _check_side_files(facts: Mapping[int, Facts], opened: OpenedBase) -> None:
    """Raise BadInput where a side file's new bytes do not match the facts, by which `verify` knows the file."""
    said = {name: how for each in facts.values() for name, how in each.side_files.items()}
    for name in sorted({*opened.side_files, *said}):
        how, content = said.get(name, SideFile()), opened.side_files.get(name)
        if how.inserted and content is not None and name in opened.folder.side_files:
            known = how.grew(content, _digest_of(opened.folder.read_side_file(name)))
        else:
            known = name in said and name in opened.side_files and how == SideFile.of(content)
        if not known:
            raise BadInput(
                f"{printable(name)}: an operation changes it otherwise than its facts say, by which `verify` and"
                " `revert` know it; report this to whoever wrote the operation"
            )


def _check_code(base: CheckpointFolder, files: Mapping[str, str]) -> None:
    """Raise BadInput where the base's own code in the output is not the code that was run."""
    for name, content in base.own.files.items() if base.own is not None else ():
        if files[name] != _digest_of(content):
            raise BadInput(f"{printable(name)}: changed meanwhile; start again when nothing writes to it")


def _digest_of(content: bytes) -> str:
    """Return the sha256 of bytes, in hex."""
    return hashlib.sha256(content).hexdigest()
