"""`surgeon apply`: grow a base by a plan into a new folder."""

from __future__ import annotations

import errno
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.apply.job import Growth, Job
from surgeon.apply.preview import Preview, adapters_of_plan, loaded_plan, preview_of, texts_of
from surgeon.apply.write import assist, execute
from surgeon.blueprint.draft import Blueprint
from surgeon.blueprint.recipes import is_computed
from surgeon.blueprint.shards import MAX_NEW_SHARD_BYTES
from surgeon.checkpoint.card_metadata import metadata_of
from surgeon.checkpoint.folder import CARD_FILE, CheckpointFolder
from surgeon.checkpoint.hub import locate, remote_folder
from surgeon.checkpoint.staging import check_destination, check_space
from surgeon.common import devices
from surgeon.common.distributed import Ranks
from surgeon.common.formatting import PROMISE_STYLES, listed
from surgeon.common.listener import Listener, Quiet
from surgeon.common.timing import Stopwatch
from surgeon.errors import BadInput, printable
from surgeon.manifest.manifest import BaseId, Manifest, manifest_of
from surgeon.plan.loading import LoadedPlan


@dataclass(frozen=True)
class Applied:
    """A finished surgery: where the output lies, its manifest, what the preview said, and seconds by stage.

    `left_behind` are files of the base that were not carried along.
    """

    path: Path
    manifest: Manifest
    preview: Preview
    left_behind: tuple[str, ...]
    seconds: dict[str, float]
    read_back: bool = True

    def __repr__(self) -> str:
        manifest = self.manifest
        told = f"{len(manifest.layers)} layers, {len(manifest.new_tensors)} new tensors, promise {manifest.promise!r}"
        return f"Applied({str(self.path)!r}, {told})"

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "left_behind": list(self.left_behind),
            "seconds": self.seconds,
            **self.preview.to_json(),
        }


def apply(
    plan: str | Path | LoadedPlan,
    base: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    device: str = "auto",
    max_shard_bytes: int = MAX_NEW_SHARD_BYTES,
    read_back: bool = True,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
    ranks: Ranks | None = None,
) -> Applied:
    """Grow `base` by `plan` into the new folder `out`.

    With `read_back` what was written is read again and compared with the base on the way: the static part of
    `verify`. `device` computes new weights; `max_shard_bytes` cuts shards of new tensors, between layers. `ranks` are
    the processes that torchrun has started (`surgeon.ranks.joined`), which all make this call.

    `out` is absent or complete at any moment; the same call continues what a killed one began. Raises BadInput.
    """
    listener = listener or Quiet()
    ranks = ranks or Ranks()
    target, base = Path(out), str(base)
    loaded = loaded_plan(plan)
    adapters = adapters_of_plan(loaded)
    if not Path(base).exists():
        # Everything that can be refused is refused before the first weight is downloaded.
        preview_of(loaded, remote_folder(base, revision, trust_remote_code=trust_remote_code), adapters)
    located = locate(base, revision=revision)
    folder = CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)
    shown = preview_of(loaded, folder, adapters, max_shard_bytes=max_shard_bytes)
    job = Job(
        purpose=Growth(
            loaded,
            BaseId(located.repo_id or located.path.resolve().name, located.revision),
            texts={name: _digest(path) for name, path in texts_of(shown.blueprint, loaded).items()},
            metadata=metadata_of(folder),
            adapters=adapters,
        ),
        blueprint=shown.blueprint,
        base=folder,
        shards=shown.shards,
        device=_device(device, ranks) if computes(shown.blueprint) else "cpu",
        read_back=read_back,
    )
    stopwatch = Stopwatch()
    if ranks.leads:
        with ranks.leading():
            manifest = _lead(job, shown, located.path, target, listener, stopwatch, ranks)
    else:
        assist(job, listener, stopwatch, ranks)
        manifest = manifest_of(CheckpointFolder.open(target))
    left_behind = tuple(name for name in folder.left_behind if name != CARD_FILE)
    return Applied(target, manifest, shown, left_behind, stopwatch.seconds, read_back)


def _lead(
    job: Job, shown: Preview, base: Path, out: Path, listener: Listener, stopwatch: Stopwatch, ranks: Ranks
) -> Manifest:
    """Check what stands in the way of a surgery, then write."""
    check_way(job, base, out)
    for note in shown.notes:
        listener.say(note)
    if not shown.blueprint.native:
        from surgeon.apply.preflight import check_skeleton

        check_skeleton(shown.blueprint)
    manifest = written(job, out, listener, stopwatch, ranks)
    assert manifest is not None
    return manifest


def _digest(text: Path) -> str:
    with text.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _device(device: str, ranks: Ranks) -> str:
    """The device of this process; of several, `auto` gives each its own."""
    resolved = devices.resolve(device)
    return ranks.local_device or resolved if device == "auto" and resolved == "cuda" else resolved


def computes(blueprint: Blueprint) -> bool:
    """Whether some tensor of the output must be computed, so that torch is needed."""
    return any(is_computed(output.recipe) for output in blueprint.outputs)


def check_way(job: Job, base: Path, out: Path) -> None:
    """BadInput where `out` is taken, or stands in `base`, or the disk has no room for what the job writes."""
    check_destination(out, base)
    check_space(out, job.bytes_to_write, fingerprint=job.fingerprint)


def written(job: Job, out: Path, listener: Listener, stopwatch: Stopwatch, ranks: Ranks) -> Manifest | None:
    """Carry out a job; BadInput where the disk, or what is read, gives trouble."""
    try:
        return execute(job, out, listener, stopwatch, ranks)
    except OSError as error:
        raise BadInput(disk_trouble(error, out)) from error


def disk_trouble(error: OSError, out: Path) -> str:
    """What to tell of an error while `out` was being written: where, what, and that nothing finished is lost."""
    where = printable(str(error.filename or out))
    working = printable(str(out.parent / f".{out.name}.surgeon"))
    staged = f"what was finished is kept in {working}: the same command continues"
    if error.errno == errno.ENOSPC:
        return f"{where}: the disk is full; make room and run the same command again ({staged})"
    return f"{where}: {error.strerror or error}; {staged}"


def applied_view(applied: Applied) -> RenderableType:
    """A finished surgery in a few lines."""
    manifest = applied.manifest
    kept = sum(not output.new for output in applied.preview.blueprint.outputs)
    proof = "read back and byte-identical" if applied.read_back else "not read back (surgeon verify does it)"
    lines: list[RenderableType] = [
        Text.assemble(
            ("done ", "bold green"),
            printable(str(applied.path)),
            f": {len(manifest.layers)} layers, {len(manifest.new_tensors)} new tensors, promise ",
            PROMISE_STYLES[manifest.promise],
        ),
        Text(
            f"{kept} base tensors in their places, {proof}",
            style="dim",
        ),
    ]
    if applied.left_behind:
        lines.append(Text(f"not carried along: {listed(applied.left_behind)}", style="dim"))
    return Group(*lines)
