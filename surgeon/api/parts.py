"""Take an output apart: its earlier states, what it has beyond its base, one slot of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from surgeon.api.common import Quiet, check_way, disk_trouble, manifest_of, written
from surgeon.checkpoint.folder import CARD_FILE, CheckpointFolder, digests_of
from surgeon.checkpoint.hub import locate, locate_delta, remote_folder
from surgeon.checkpoint.staging import check_destination
from surgeon.deltas import Delta, making_job, putting_job
from surgeon.errors import BadInput
from surgeon.execute import Job, Listener
from surgeon.exporting import export
from surgeon.layout import lay_out
from surgeon.manifest import MANIFEST_FILE
from surgeon.metadata import Metadata, metadata_of
from surgeon.ranks import Ranks
from surgeon.recipes import numel
from surgeon.results import AppliedDelta, Exported, MadeDelta, Reverted
from surgeon.stopwatch import Stopwatch
from surgeon.undoing import Return, find_state
from surgeon.views.card import delta_card


def revert(
    out: str | Path,
    dest: str | Path,
    *,
    to: int | None = None,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Reverted:
    """Write what `out` was after `to` of its surgeries into the new folder `dest` (None: before the last one; 0: base).

    A surgery is one applied plan. Every tensor of that state comes back byte for byte under its name of then, with its
    config.json, manifest and code; new tensors of the surgeries that stay have the values the next surgery found, so
    what was trained in between is kept. Raises BadInput, and `dest` stays absent, where a tensor is no longer what it
    was (trained, edited, merged away) or the manifest is too old or was edited.
    """
    listener = listener or Quiet()
    target = Path(dest)
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    state = find_state(folder, manifest_of(folder), to)
    blueprint = state.blueprint(folder)
    job = Job(
        purpose=Return(state, source=str(Path(out) / MANIFEST_FILE), metadata=metadata_of(folder)),
        blueprint=blueprint,
        base=folder,
        shards=lay_out(blueprint, folder.tensors),
    )
    check_way(job, Path(out), target)
    for note in folder.notes:
        listener.say(note)
    stopwatch = Stopwatch()
    written(job, target, listener, stopwatch, Ranks())
    return Reverted(
        path=target,
        to=state.number,
        surgeries=state.surgeries,
        base=state.undone[0].base.id,
        undone=tuple(tuple(entry.op for entry in manifest.operations) for manifest in state.undone),
        manifest=state.manifest,
        tensors=len(blueprint.outputs),
        dropped=len(folder.tensors) - len(blueprint.outputs),
        nbytes=job.bytes_to_write,
        left_behind=tuple(folder.left_behind),
        seconds=stopwatch.seconds,
    )


def make_delta(
    out: str | Path,
    dest: str | Path,
    *,
    base: str | Path | None = None,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> MadeDelta:
    """Write what `out` has and the base of its last surgery lacks into the new folder `dest`.

    That is every tensor that is not the base's byte for byte in its place, config.json, manifest, code and cards; the
    tokenizer and other side files stay out, as the base brings them. With `base` (a folder) those that it lacks or has
    otherwise go in. `dest` is absent or complete at any moment. Raises BadInput.
    """
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    other = CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code) if base is not None else None
    return make_delta_of(folder, Path(dest), other, metadata_of(folder), listener or Quiet())


def apply_delta(
    delta: str | Path,
    base: str,
    out: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> AppliedDelta:
    """Put `delta` (a folder, or `user/name[@revision]`) back onto `base`: `out` is what the delta was made of.

    Every tensor of `base`, which is what the last surgery was carried out on, is compared with its digest in the
    manifest and every tensor of the delta with its own. Raises BadInput where one differs; `out` then stays absent.
    """
    listener = listener or Quiet()
    target = Path(out)
    opened = Delta.open(locate_delta(str(delta)).path, trust_remote_code=trust_remote_code)
    if not Path(base).exists():
        # A base that headers tell to be another is refused before its weights are downloaded.
        putting_job(opened, remote_folder(base, revision, trust_remote_code=trust_remote_code), small_files=False)
    located = locate(base, revision=revision)
    folder = CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)
    job = putting_job(opened, folder)
    check_destination(target, opened.path)
    check_way(job, located.path, target)
    stopwatch = Stopwatch()
    written(job, target, listener, stopwatch, Ranks())
    return AppliedDelta(
        path=target,
        base=located.repo_id or str(located.path),
        manifest=opened.manifest,
        tensors=len(opened.tensors),
        whole=len(job.blueprint.outputs),
        nbytes=job.bytes_to_write,
        seconds=stopwatch.seconds,
    )


def export_slot(
    out: str | Path,
    slot: int,
    dest: str | Path,
    *,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Exported:
    """Write slot `slot` of `out` into the new folder `dest` as a PEFT LoRA adapter for the base the slots stand on.

    `peft.PeftModel.from_pretrained(base, dest)` then computes what `out` does with all of the router's mass on the
    slot: shallow layers' shared LoRA is part of it. Matrices keep their bytes. Raises BadInput, and `dest` stays
    absent, for a slot that is not there or that stands in layers the base lacks.
    """
    listener = listener or Quiet()
    folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    target = Path(dest)
    try:
        exported = export(folder, manifest_of(folder), slot, target, say=listener.say)
    except OSError as error:
        raise BadInput(disk_trouble(error, target)) from error
    for note in exported.notes:
        listener.say(note)
    return exported


def make_delta_of(
    folder: CheckpointFolder,
    target: Path,
    base: CheckpointFolder | None,
    metadata: Metadata,
    listener: Listener,
    *,
    repo_id: str | None = None,
    verified: Sequence[str] = (),
) -> MadeDelta:
    """`make_delta` of an opened checkpoint; `repo_id` and `verified` go into the card that it is pushed with."""
    manifest = manifest_of(folder)
    check_destination(target, folder.path)
    listener.begin("reading", sum(info.nbytes for info in folder.tensors.values()))
    job = making_job(folder, manifest, digests_of(folder, folder.tensors, listener.advance), base)
    sizes = {output.name: numel(output.recipe) for output in job.blueprint.outputs}
    text = delta_card(manifest, folder.config, sizes, metadata, repo_id=repo_id, verified=verified)
    job = dataclasses.replace(job, files={**(job.files or {}), CARD_FILE: text})
    check_way(job, folder.path, target)
    stopwatch = Stopwatch()
    written(job, target, listener, stopwatch, Ranks())
    return MadeDelta(
        out=folder.path,
        path=target,
        base=manifest.base.id,
        revision=manifest.base.revision,
        tensors=len(sizes),
        whole=len(folder.tensors),
        nbytes=job.bytes_to_write,
        whole_nbytes=sum(info.nbytes for info in folder.tensors.values()),
        from_base=tuple(name for name in folder.side_files if name not in (job.files or {})),
        seconds=stopwatch.seconds,
    )
