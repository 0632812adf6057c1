"""`surgeon apply`: grow a base by a plan into a new folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.apply.job import Computing, Job, beside_weights, manifest_and_card, model_files, places_in, twins_in
from surgeon.apply.linked_shards import Moved
from surgeon.apply.preview import Preview, loaded_plan, opened_for, preview_of, proved, texts_of
from surgeon.apply.readback import ReadBack
from surgeon.apply.write import assist, check_output, execute
from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.shards import MAX_NEW_SHARD_BYTES
from surgeon.checkpoint.card_metadata import Metadata, metadata_of
from surgeon.checkpoint.folder import CARD_FILE, CheckpointFolder, digests_of
from surgeon.checkpoint.hub import locate, remote_folder
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.checkpoint.staging import check_destination
from surgeon.checkpoint.tokenizer_files import without
from surgeon.checkpoint.trimmed_vocabulary import trimmed_files
from surgeon.common import devices
from surgeon.common.distributed import Ranks
from surgeon.common.formatting import counted
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet, Stopwatch
from surgeon.common.places import meant
from surgeon.common.promises import PROMISE_STYLES
from surgeon.errors import BadInput, printable
from surgeon.manifest.compose import BaseId, Written, base_entry, compose, surgeries_of
from surgeon.manifest.manifest import Manifest, ModelEntry
from surgeon.manifest.reading import written_manifest
from surgeon.operations.grow_vocabulary import VocabularyFacts
from surgeon.operations.merge_adapter import MergeFacts
from surgeon.operations.prepare import Facts, OpenedBase, WeightsNeeded, digest_of_file
from surgeon.operations.trim_vocabulary import TrimFacts
from surgeon.plan.plan import LoadedPlan
from surgeon.runtime.bundle import bundle


@dataclass(frozen=True)
class Applied:
    """A finished surgery: where the output lies, its manifest, what the preview said, and seconds by stage.

    `left_behind` are files of the base that were not carried along; `moved` says how the bytes of tensors came there.
    """

    path: Path
    manifest: Manifest
    preview: Preview
    left_behind: tuple[str, ...]
    seconds: dict[str, float]
    read_back: bool = True
    moved: Moved = field(default_factory=Moved)

    def __repr__(self) -> str:
        manifest = self.manifest
        shown = f"{_written(manifest)}, promise {manifest.promise!r}"
        return f"Applied({str(self.path)!r}, {shown})"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `path`, `base_digest`: the output; the digest of the base
            `left_behind`: the base's files that were not copied
            `fits`: each network that predicted matrices (LESA), with `explained`, `cosine`, `norm`, `triples`; else
                empty
            `merged`: each tensor that an adapter was merged into, with `change` (‖ΔW‖ / ‖W‖), the shares of ΔW that are
                left by rounding to `nearest` and as it was rounded (`kept`), and how many rows were `guided`; else
                empty
            `moved`: bytes of tensors `written`, `reflinked`, `linked`
            `seconds`: by stage
        """
        told = plain_fields(self, without=("manifest", "preview", "read_back")) | self.preview.to_json()
        fits = {name: fit.model_dump() for name, fit in self.manifest.fits.items()}
        merged = {name: entry.model_dump() for name, entry in self.manifest.merged.items()}
        return told | {"base_digest": self.manifest.base_digest, "fits": fits, "merged": merged}


def apply(
    plan: str | Path | LoadedPlan,
    base: str | Path,
    out: str | Path,
    *,
    overrides: Sequence[str] = (),
    revision: str | None = None,
    device: str = "auto",
    max_shard_bytes: int = MAX_NEW_SHARD_BYTES,
    read_back: bool = True,
    link: bool = False,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
    ranks: Ranks | None = None,
) -> Applied:
    """Grow `base` by `plan` into the new folder `out`; `overrides` (`operations.0.init.reg=0.1`) replace its values.

    With `read_back` what was written is read again and compared with the base on the way: the static part of
    `verify`. `device` computes new weights; `max_shard_bytes` cuts shards of new tensors, between layers. `ranks` are
    the processes that torchrun has started (`surgeon.common.distributed.joined`), which all make this call.

    Shards of the base that go unchanged into `out` share its blocks where the file system has reflinks. With `link`
    they are hard-linked: one file under two names, made read-only, so that a later write to either is refused.

    `out` is absent or complete at any moment; the same call continues what a killed one began. Raises BadInput.
    """
    listener = listener or Quiet()
    ranks = ranks or Ranks()
    target, base = Path(out), meant(str(base))
    devices.check(device)
    loaded = loaded_plan(plan, overrides)
    if ranks.size == 1:
        # Of several processes only the first one says it, where the others wait for it.
        check_destination(target, Path(base) if Path(base).exists() else None)
    adapters: dict[str, AdapterFolder] = {}
    if not Path(base).exists():
        # Everything that can be refused is refused before the first weight is downloaded.
        headers = opened_for(loaded, remote_folder(base, revision, trust_remote_code=trust_remote_code), weights=False)
        with contextlib.suppress(WeightsNeeded):
            proved(preview_of(loaded, headers), headers)
        adapters = headers.adapters
    located = locate(base, revision=revision, code=trust_remote_code)
    folder = CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)
    opened = replace(opened_for(loaded, folder, listener=listener), adapters=adapters)
    shown = preview_of(loaded, opened, max_shard_bytes=max_shard_bytes, link=link)
    base_id = BaseId(located.repo_id or located.path.resolve().name, located.revision)
    job = surgery_job(shown, opened, base_id, device=lambda: _device(device, ranks), read_back=read_back, link=link)
    stopwatch, moved = Stopwatch(), Moved()
    if ranks.leads:
        with ranks.leading():
            check_output(job, located.path, target)
            if device != "auto":
                # Although nothing may be computed: who names a device that is not there is told so.
                devices.resolve(device)
            shown = proved(shown, opened)
            for note in shown.notes_on_it:
                listener.say(note)
            if not shown.blueprint.native:
                from surgeon.apply.preflight import check_skeleton

                check_skeleton(shown.blueprint.config, shown.blueprint.outputs)
            moved = execute(job, target, listener, stopwatch, ranks)
    else:
        assist(job, listener, stopwatch, ranks)
    come = (*(job.carried_names or ()), *job.files)
    left_behind = tuple(sorted({*folder.left_behind, *folder.side_files} - {*come, CARD_FILE}))
    return Applied(target, written_manifest(target), shown, left_behind, stopwatch.seconds, read_back, moved)


def surgery_job(
    shown: Preview,
    opened: OpenedBase,
    base_id: BaseId,
    *,
    device: Callable[[], str],
    read_back: bool,
    link: bool = False,
) -> Job:
    """The job that carries out a plan; `device` is asked only where a tensor must be computed: that needs torch."""
    blueprint, shards, base, changed = shown.blueprint, shown.shards, opened.folder, opened.side_files
    code = {name: bundle(blueprint.config) for name in blueprint.code_files}
    texts = {name: digest_of_file(path) for name, path in texts_of(blueprint, opened.plan_folder).items()}
    finish = _Finish(shown, opened, base_id, texts, metadata_of(base))
    _check_side_files(shown.facts, opened)

    def look(staged: Path) -> None:
        from surgeon.apply.overflow import check_finite

        check_finite(staged, opened, blueprint, device=device(), say=opened.listener.say)

    return Job(
        shards=shards,
        sources={"": base.source},
        places=places_in(base.tensors, shards),
        twins=twins_in(base, shards),
        files=model_files(blueprint.config, shards, code) | {n: c for n, c in changed.items() if c is not None},
        carried=base,
        carried_names=tuple(name for name in base.side_files if name not in (*changed, *blueprint.files_left)),
        finish=finish,
        identity={
            "plan": shown.plan.data(),
            "base": base.identity(),
            "base_id": [base_id.name, base_id.revision],
            "base_config": base.config,
            "texts": texts,
            "metadata": asdict(finish.metadata),
            "facts": {str(number): facts.model_dump(mode="json") for number, facts in shown.facts.items()},
            "models": {name: model.identity() for name, model in opened.models.items()},
        },
        computing=Computing(blueprint, base, shown.plan.source, opened.adapters, opened.models, device())
        if any(output.computed for output in blueprint.outputs)
        else None,
        read_back=read_back,
        link=link,
        recall=True,
        look=look if blueprint.promise == "exact" else None,
    )


@dataclass(frozen=True)
class _Finish:
    """The end of a surgery, once its tensors are written: the manifest, and the card."""

    shown: Preview
    opened: OpenedBase
    base_id: BaseId
    texts: Mapping[str, str]
    metadata: Metadata

    def __call__(self, proof: ReadBack) -> Mapping[str, bytes]:
        """Raise BadInput where something that was read is not what it was; else return the last files."""
        shown, base = self.shown, self.opened.folder
        blueprint = shown.blueprint
        # Files that changed were the base's before; others do not come along.
        others = [n for n in base.side_files if n in self.opened.side_files or n in blueprint.files_left]
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
            texts=self.texts,
            models=_model_entries(blueprint, self.opened.models),
            proven=shown.proof.libraries,
        )
        manifest = compose(shown.plan, blueprint, found, surgeries_of(base), shown.facts, written)
        return manifest_and_card(manifest, blueprint.config, shown.shards, self.metadata)


def _model_entries(blueprint: Blueprint, models: Mapping[str, CheckpointFolder]) -> dict[str, ModelEntry]:
    """What the manifest says of other models: how they are called, and one digest of the tensors that were taken."""
    found: dict[str, ModelEntry] = {}
    for name, tensors in blueprint.taken.items():
        models[name].check_unchanged()
        digests = digests_of(models[name], tensors, lambda _: None)
        digest = _digest_of(json.dumps(digests, sort_keys=True).encode())
        found[name] = ModelEntry(id=models[name].path.resolve().name, sha256=digest)
    return found


def _check_side_files(facts: Mapping[int, Facts], opened: OpenedBase) -> None:
    """Raise BadInput where a side file is to get other bytes than what the facts make of the base's.

    These alone `verify` can make again: bytes that were inserted, or a vocabulary without some tokens.
    """
    grown = [each for each in facts.values() if isinstance(each, VocabularyFacts)]
    inserted = {name: places for each in grown for name, places in each.inserted.items()}
    base, trims = opened.folder, [each for each in facts.values() if isinstance(each, TrimFacts)]
    files = {name: base.read_side_file(name) for name in base.side_files} if trims else {}
    trimmed = {name: content for each in trims for name, content in trimmed_files(files, each.tokens).items()}
    brought = {name for each in facts.values() if isinstance(each, MergeFacts) for name in each.side_files}
    for name in {**opened.side_files, **inserted, **trimmed}.keys() - brought:
        content = opened.side_files.get(name)
        if name in trimmed and name in opened.side_files and content == trimmed[name]:
            continue
        known = name in base.side_files and name in inserted and content is not None
        if not known or without(content or b"", inserted[name]) != base.read_side_file(name):
            raise BadInput(
                f"{printable(name)}: an operation changes it otherwise than by inserting the bytes that its facts name,"
                " which `verify` and `revert` could not take out again; report this to whoever wrote the operation"
            )


def _check_code(base: CheckpointFolder, files: Mapping[str, str]) -> None:
    """Raise BadInput where the base's own code that was carried along is not that which was run."""
    for name, content in base.own.files.items() if base.own is not None else ():
        if files[name] != _digest_of(content):
            raise BadInput(f"{printable(name)}: changed meanwhile; start again when nothing writes to it")


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _device(device: str, ranks: Ranks) -> str:
    """The device of this process; of several, `auto` gives each its own."""
    resolved = devices.resolve(device)
    return ranks.local_device or resolved if device == "auto" and resolved == "cuda" else resolved


def _written(manifest: Manifest) -> str:
    return f"{counted(len(manifest.layers), 'layer')}, {counted(len(manifest.new_tensors), 'new tensor')}"


def applied_view(applied: Applied) -> RenderableType:
    """A finished surgery in a few lines."""
    manifest = applied.manifest
    kept = sum(not output.new for output in applied.preview.blueprint.outputs)
    proof = "read back and byte-identical" if applied.read_back else "not read back (surgeon verify does it)"
    lines: list[RenderableType] = [
        Text.assemble(
            ("done ", "bold green"),
            printable(str(applied.path)),
            f": {_written(manifest)}, promise ",
            PROMISE_STYLES[manifest.promise],
            f": {applied.preview.proof.text}" if applied.preview.proof.text else "",
        ),
        Text(f"{kept} base tensors in their places, {proof}", style="dim"),
        Text(f"digest of the base: {manifest.base_digest}", style="dim"),
    ]
    if applied.moved.text:
        lines.insert(1, Text(applied.moved.text, style="dim"))
    if manifest.fits:
        lines.append(Text(f"predicted: {manifest.fit_text}", style="yellow" if manifest.poor_fits else "dim"))
    if manifest.merged:
        lines.append(Text(f"merged: {manifest.merge_text}", style="dim"))
    return Group(*lines)
