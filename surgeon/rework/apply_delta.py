"""`surgeon apply --delta`: apply a delta to its base."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.anatomy.dissect import dissect
from surgeon.blueprint.blueprint import Output
from surgeon.blueprint.recipes import Copy
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.folder import CONFIG_FILE, DELTA_FILE, CheckpointFolder
from surgeon.checkpoint.header import TensorInfo
from surgeon.checkpoint.hub import locate, locate_delta, remote_folder
from surgeon.checkpoint.own_code import OwnCode
from surgeon.checkpoint.piece_bytes import in_files, places_of
from surgeon.checkpoint.pieces import Pieces
from surgeon.checkpoint.staging import check_destination
from surgeon.checkpoint.weights import INDEX_FILE, SINGLE_FILE
from surgeon.common.formatting import at_revision, size
from surgeon.common.json_results import plain_fields, same_json
from surgeon.common.listener import Listener, Quiet, Stopwatch
from surgeon.errors import BadInput, printable
from surgeon.manifest.compose import surgeries_of
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest, StoredTensor
from surgeon.manifest.moves import kept_as_they_are, made_of_base
from surgeon.rework.make_delta import Delta
from surgeon.verification.claims import manifest_differences
from surgeon.verification.static import Drawn
from surgeon.writing.job import Job, Mirrored, index_of
from surgeon.writing.linked_shards import Moved
from surgeon.writing.readback import ReadBack
from surgeon.writing.write import check_output, execute

# The name of the delta among the job's sources; the base has the name "".
_DELTA = "delta"


@dataclass(frozen=True)
class AppliedDelta:
    """An applied delta: `tensors` of the output's `whole` tensors came from it, the rest from the base.

    `moved` states how the bytes were copied.
    """

    path: Path
    base: str
    manifest: Manifest
    tensors: int
    whole: int
    nbytes: int
    seconds: dict[str, float]
    moved: Moved = field(default_factory=Moved)

    def __repr__(self) -> str:
        return f"AppliedDelta({str(self.path)!r}, {self.tensors} of {self.whole} tensors from the delta)"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `path`, `base`: the output, and its base
            `tensors`, `whole`: the number of tensors from the delta, and of all tensors of the output
            `bytes`, `moved`, `seconds`: as in `apply`
        """
        return plain_fields(self, without=("manifest",))


def apply_delta(
    delta: str | Path,
    base: str,
    out: str | Path,
    *,
    revision: str | None = None,
    link: bool = False,
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> AppliedDelta:
    """Apply `delta` (a folder, or `user/name[@revision]`) to `base`; this restores the delta's output as `out`.

    Every tensor of `base`, the base of the last surgery, is compared with its digest in the manifest, and every tensor
    and file of the delta with its own digest; the manifest must agree with what its plan makes of `base`. Raises
    BadInput where one differs; `out` then stays absent. The delta's content is its maker's: whether it keeps its
    promises, `verify` checks. With `link`, shards that equal the base's (or the delta's) are hard-linked and become
    read-only (`apply`).
    """
    listener = listener or Quiet()
    target = Path(out)
    opened = Delta.open(locate_delta(str(delta)).path, trust_remote_code=trust_remote_code)
    if not Path(base).exists():
        # Refuse a wrong base by its headers, before its weights are downloaded.
        applying_job(opened, remote_folder(base, revision, trust_remote_code=trust_remote_code), small_files=False)
    located = locate(base, revision=revision)
    folder = CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)
    for note in folder.notes:
        listener.say(note)
    job = dataclasses.replace(applying_job(opened, folder), link=link)
    check_destination(target, opened.path)
    check_output(job, located.path, target)
    stopwatch = Stopwatch()
    moved = execute(job, target, listener, stopwatch)
    return AppliedDelta(
        path=target,
        base=located.repo_id or str(located.path),
        manifest=opened.manifest,
        tensors=len(opened.tensors),
        whole=len(job.outputs),
        nbytes=job.bytes_to_write,
        seconds=stopwatch.seconds,
        moved=moved,
    )


def applying_job(delta: Delta, base: CheckpointFolder, *, small_files: bool = True) -> Job:
    """Return the job that writes the output of a delta on `base`.

    Raises BadInput where headers show that this is impossible. With `small_files`, the small files that the base
    provides are read and checked too; without, the job lacks them and serves only as a check.
    """
    manifest = delta.manifest
    if differing := sorted(manifest.base.tensors.keys() ^ base.tensors.keys()):
        raise wrong_base(manifest, differing[0], base.source.shown)
    if not same_json(manifest.base.config, base.config):
        raise wrong_base(manifest, CONFIG_FILE, base.source.shown)
    if manifest.lineage != surgeries_of(base):
        raise wrong_base(manifest, MANIFEST_FILE, base.source.shown)
    drawn = Drawn.of(manifest, base.config, base.tensors, base.own, str(delta.path / MANIFEST_FILE))
    if wrong := manifest_differences(manifest, drawn.loaded, drawn.blueprint, drawn.facts):
        raise BadInput(
            f"{printable(str(delta.path / MANIFEST_FILE))}: `{printable(wrong[0])}` is not what plan and base make, so"
            " the delta was edited; get it again"
        )
    in_base = _in_base(delta, base)
    copies = in_base | {name: Copy.of(info) for name, info in delta.tensors.items()}
    shards = tuple(Shard(file, _outputs(delta, file, copies), None) for file in delta.index.shards)
    _check_whole(delta, shards, base.own)
    files = dict(delta.files)
    if small_files:
        files |= _from_base(delta, base)
    if delta.index.shards.keys() != {SINGLE_FILE}:
        files[INDEX_FILE] = index_of(shards)

    def finish(proof: ReadBack) -> Mapping[str, bytes]:
        """Raise BadInput where the base is another, or the delta was edited."""
        for name, tensor in delta.index.tensors.items():
            if proof.digests[name] != tensor.sha256:
                raise BadInput(
                    f"{printable(name)}: not what {DELTA_FILE} of {delta.source.shown} says, so the delta was edited or"
                    " damaged; get it again. Nothing was written"
                )
        for name, digest in proof.digests_of(base).items():
            if manifest.base.tensors[name] != StoredTensor.of(base.tensors[name], digest):
                raise wrong_base(manifest, name, base.source.shown)
        return {}

    outputs = [output for shard in shards for output in shard.outputs]
    places = in_files({o.name: o.pieces for o in outputs if o.name not in delta.tensors}, base.tensors)
    places |= places_of(delta.tensors, _DELTA)
    return Job(
        shards=shards,
        sources={"": base.source, _DELTA: delta.source},
        places=places,
        mirrored=_mirrored(delta, base, shards, places),
        files=files,
        finish=finish,
        identity={"what": "apply delta", "base": base.identity(), "delta": delta.source.identity()},
    )


def _in_base(delta: Delta, base: CheckpointFolder) -> dict[str, Copy]:
    """Return, for each output tensor that the base provides, what to copy from the base."""
    found = {place: Copy.of(base.tensors[name]) for name, place in kept_as_they_are(delta.manifest).items()}
    for name, pieces in made_of_base(delta.manifest).items():
        made = delta.manifest.new_tensors[name]
        found[name] = Copy(pieces.spans, made.dtype, tuple(made.shape))
    return found


def _outputs(delta: Delta, file: str, copies: Mapping[str, Copy]) -> tuple[Output, ...]:
    """Return the tensors of one shard of the output, in the order of their bytes.

    Raises BadInput for a shard without tensors, and for a tensor that neither the base nor the delta has.
    """
    names = delta.index.shards[file]
    if not names:
        raise delta.edited(f"`shards` has {printable(file)} without a tensor")
    for name in names:
        if name not in copies:
            raise delta.edited(f"{printable(name)} is neither the base's nor the delta's")
    return tuple(Output(name, copies[name], None) for name in names)


def _check_whole(delta: Delta, shards: tuple[Shard, ...], own: OwnCode | None) -> None:
    """Raise BadInput where the index misses or repeats a tensor, or the result would be no model."""
    outputs = [output for shard in shards for output in shard.outputs]
    every = [output.name for output in outputs]
    if len(every) != len(set(every)) or not delta.tensors.keys() <= set(every):
        raise delta.edited("`shards` does not name each tensor once")
    if SINGLE_FILE in delta.index.shards and len(delta.index.shards) > 1:
        raise delta.edited(f"`shards` has {SINGLE_FILE} beside others")
    try:
        dissect(delta.config, {output.name: _described(output) for output in outputs}, own)
    except BadInput as error:
        raise BadInput(f"{delta.shown}: what would be put together is no model ({error})") from error


def _described(output: Output) -> TensorInfo:
    """Return the tensor as a header entry; it is in no file."""
    return TensorInfo(output.name, output.recipe.dtype, output.recipe.shape, "", 0, output.nbytes)


def _from_base(delta: Delta, base: CheckpointFolder) -> dict[str, bytes]:
    """Return the small files that the base provides. Raises BadInput where one is missing or different."""
    files: dict[str, bytes] = {}
    for name, digest in delta.index.from_base.items():
        content = base.read_side_file(name) if name in base.side_files else None
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            how = "not there" if content is None else "not what the output had"
            raise BadInput(
                f"{base.source.shown}: {printable(name)} is {how}; take the base as the surgery found it, or make the"
                " delta with `--base`, so that it brings that file. Nothing was written"
            )
        files[name] = content
    return files


def _mirrored(
    delta: Delta, base: CheckpointFolder, shards: tuple[Shard, ...], places: Mapping[str, Pieces]
) -> dict[str, Mirrored]:
    """Map each shard whose tensors all come from one file to that file."""
    mirrored: dict[str, Mirrored] = {}
    for shard in shards:
        files = {places[output.name].tensors[0] for output in shard.outputs}
        if len(files) == 1:
            source, _, file = files.pop().partition("/")
            mirrored[shard.file] = Mirrored(source, file, (delta if source == _DELTA else base).headers[file])
    return mirrored


def wrong_base(manifest: Manifest, name: str, shown: str) -> BadInput:
    """Return the error for a base to which the delta does not belong; `name` is the first differing tensor or file."""
    base = printable(at_revision(manifest.base.id, manifest.base.revision))
    return BadInput(
        f"{printable(name)}: not what the delta's base holds there, so {shown} is another checkpoint; the delta goes"
        f" onto what its last surgery found, {base}. Nothing was written"
    )


def applied_delta_view(applied: AppliedDelta) -> RenderableType:
    """Return a line on what was put together."""
    line = Text.assemble(
        ("done ", "bold green"),
        f"{printable(str(applied.path))}: {applied.whole} tensors ({size(applied.nbytes)}), {applied.tensors} from the"
        f" delta and the rest from {printable(applied.base)}, each what its digest says",
        overflow="fold",
    )
    return Group(line, Text(applied.moved.text, style="dim")) if applied.moved.text else line
