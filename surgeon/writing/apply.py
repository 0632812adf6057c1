"""`surgeon apply`: grow a base by a plan into a new folder."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.blueprint.shards import MAX_NEW_SHARD_BYTES
from surgeon.checkpoint.folder import CARD_FILE, CheckpointFolder
from surgeon.checkpoint.hub import remote_folder
from surgeon.checkpoint.peft_folder import AdapterFolder
from surgeon.checkpoint.staging import check_destination
from surgeon.common import devices
from surgeon.common.formatting import counted
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet, Stopwatch
from surgeon.common.places import meant
from surgeon.common.promises import PROMISE_STYLES
from surgeon.errors import printable
from surgeon.manifest.compose import BaseId
from surgeon.manifest.manifest import Manifest
from surgeon.manifest.reading import written_manifest
from surgeon.models.gguf_file import locate_base
from surgeon.operations.prepare import WeightsNeeded
from surgeon.plan.plan import LoadedPlan
from surgeon.writing.linked_shards import Moved
from surgeon.writing.preview import Preview, loaded_plan, opened_for, preview_of, proved
from surgeon.writing.surgery import surgery_job
from surgeon.writing.write import check_output, execute


@dataclass(frozen=True)
class Applied:
    """A finished surgery: the output's path, its manifest, its preview, and the seconds of each stage.

    `left_behind` are files of the base that were not carried along; `moved` counts the bytes of tensors by how they
    were written; `read_back` is whether the output was read again and compared.
    """

    path: Path
    manifest: Manifest
    preview: Preview
    left_behind: tuple[str, ...]
    seconds: dict[str, float]
    read_back: bool = True
    moved: Moved = field(default_factory=Moved)

    def __repr__(self) -> str:
        """Return path, layers, new tensors and promise in a line."""
        manifest = self.manifest
        shown = f"{_written(manifest)}, promise {manifest.promise!r}"
        return f"Applied({str(self.path)!r}, {shown})"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `path`: the output's folder
            `base_digest`: the digest of the base
            `left_behind`: the base's files that were not copied
            `fits`: each network that predicted matrices (LESA), with `explained`, `cosine`, `norm`, `triples`; else
                empty
            `merged`: each tensor that an adapter was merged into; else empty. With `change` (‖ΔW‖ / ‖W‖), the shares of
                ΔW that are left by rounding to nearest (`nearest`) and as the tensor was rounded (`kept`), and how many
                rows were rounded along the adapter's directions (`guided`)
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
) -> Applied:
    """Grow `base` by `plan` into the new folder `out`; `overrides` (`operations.0.init.reg=0.1`) replace its values.

    With `read_back` the written shards are read again and compared with the base during the run: the static part of
    `verify`. `device` computes new weights; `max_shard_bytes` cuts shards of new tensors, between layers.

    Shards of the base that are unchanged in `out` share its blocks where the file system has reflinks. With `link` they
    are hard-linked: one file under two names, made read-only, so that a later write to either is refused.

    `out` is absent or complete at any moment; the same call continues an interrupted run. Raises BadInput.
    """
    listener = listener or Quiet()
    target, base = Path(out), meant(str(base))
    devices.check(device)
    loaded = loaded_plan(plan, overrides)
    check_destination(target, Path(base) if Path(base).exists() else None)
    adapters: dict[str, AdapterFolder] = {}
    if not Path(base).exists():
        # Everything that can be refused is refused before the first weight is downloaded.
        headers = opened_for(loaded, remote_folder(base, revision, trust_remote_code=trust_remote_code), weights=False)
        with contextlib.suppress(WeightsNeeded):
            proved(preview_of(loaded, headers), headers)
        adapters = headers.adapters
    located = locate_base(base, revision=revision, code=trust_remote_code, say=listener.say)
    folder = CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)
    opened = replace(opened_for(loaded, folder, listener=listener), adapters=adapters)
    shown = preview_of(loaded, opened, max_shard_bytes=max_shard_bytes, link=link)
    base_id = BaseId(located.repo_id or located.path.resolve().name, located.revision)
    job = surgery_job(
        shown.drawing, opened, base_id, device=lambda: devices.resolve(device), read_back=read_back, link=link
    )
    check_output(job, located.path, target)
    if device != "auto":
        # Checked even where nothing is computed, so that a device that does not exist is reported.
        devices.resolve(device)
    shown = proved(shown, opened)
    for note in shown.notes_on_it:
        listener.say(note)
    stopwatch = Stopwatch()
    moved = execute(job, target, listener, stopwatch)
    come = (*(job.carried_names or ()), *job.files)
    left_behind = tuple(sorted({*folder.left_behind, *folder.side_files} - {*come, CARD_FILE}))
    return Applied(target, written_manifest(target), shown, left_behind, stopwatch.seconds, read_back, moved)


def _written(manifest: Manifest) -> str:
    """Return words for the counts of layers and new tensors."""
    return f"{counted(len(manifest.layers), 'layer')}, {counted(len(manifest.new_tensors), 'new tensor')}"


def applied_view(applied: Applied) -> RenderableType:
    """Return a view of a finished surgery in a few lines."""
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
