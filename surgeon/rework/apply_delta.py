"""`surgeon apply --delta`: put a delta back onto its base."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from surgeon.apply.apply import check_way, written
from surgeon.apply.job import Job
from surgeon.apply.readback import ReadBack
from surgeon.apply.write import index_of
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.folder import DELTA_FILE, CheckpointFolder
from surgeon.checkpoint.header import Header
from surgeon.checkpoint.hub import locate, locate_delta, remote_folder
from surgeon.checkpoint.source import LocalSource, Source
from surgeon.checkpoint.staging import check_destination
from surgeon.checkpoint.weights import INDEX_FILE, SINGLE_FILE
from surgeon.common.distributed import Ranks
from surgeon.common.formatting import size
from surgeon.common.listener import Listener, Quiet
from surgeon.common.timing import Stopwatch
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import dissect
from surgeon.manifest.manifest import Manifest
from surgeon.rework.delta_folder import Delta, blueprint_of, copied, edited, places_of
from surgeon.rework.make_delta import AsItIs


@dataclass(frozen=True)
class AppliedDelta:
    """A delta that was put back: `tensors` of the output's `whole` came from it, the rest from the base."""

    path: Path
    base: str
    manifest: Manifest
    tensors: int
    whole: int
    nbytes: int
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {
            "path": str(self.path),
            "base": self.base,
            "tensors": self.tensors,
            "whole": self.whole,
            "bytes": self.nbytes,
            "seconds": self.seconds,
        }


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


# What stands before the delta's tensors and shards, so that they are told from the base's of the same name.
_MARK = "delta/"


@dataclass(frozen=True)
class PutBack(AsItIs):
    """The purpose of a job that puts a delta back onto its base. `held` are digests of the delta's tensors."""

    held: Mapping[str, str] = field(default_factory=dict)

    def settle(self, job: Job, proof: ReadBack) -> None:
        """BadInput where the base is another, or the delta was edited."""
        proof.digest_the_rest()
        for name, digest in proof.base_digests.items():
            own = name.removeprefix(_MARK)
            if name.startswith(_MARK) and self.held[own] != digest:
                raise BadInput(
                    f"{printable(own)}: not what {DELTA_FILE} of {self.source} says, so the delta was edited or"
                    " damaged; get it again. Nothing was written"
                )
            if not name.startswith(_MARK) and self.told.base.tensors.get(name) != digest:
                raise wrong_base(self.told, name, job.base.source.shown)


def putting_job(delta: Delta, base: CheckpointFolder, *, small_files: bool = True) -> Job:
    """The job that writes the output again. Raises BadInput where headers (and `small_files`) tell that it cannot."""
    manifest, shown = delta.manifest, printable(str(delta.path / DELTA_FILE))
    missing = sorted(manifest.base.tensors.keys() - base.tensors.keys())
    unknown = sorted(base.tensors.keys() - manifest.base.tensors.keys())
    if missing or unknown:
        raise wrong_base(manifest, (missing or unknown)[0], base.source.shown)
    both = _both(delta, base)
    source_of = {place: name for name, place in places_of(manifest).items()}
    source_of |= {name: f"{_MARK}{name}" for name in delta.tensors}
    named = [name for names in delta.index.shards.values() for name in names]
    if len(named) != len(set(named)) or not delta.tensors.keys() <= set(named):
        raise edited(shown, "`shards` does not name each tensor once")
    if SINGLE_FILE in delta.index.shards and len(delta.index.shards) > 1:
        raise edited(shown, f"`shards` has {SINGLE_FILE} beside others")
    shards: list[Shard] = []
    for file, names in delta.index.shards.items():
        for name in names:
            if name not in source_of:
                raise edited(shown, f"{printable(name)} is neither the base's nor the delta's")
        infos = {name: both.tensors[source_of[name]] for name in names}
        twins = {info.file for info in infos.values()}
        if not twins:
            raise edited(shown, f"`shards` has {printable(file)} without a tensor")
        twin = twins.pop() if len(twins) == 1 else None
        shards.append(Shard(file, tuple(copied(name, info) for name, info in infos.items()), twin))
    outputs = {output.name: both.tensors[source_of[output.name]] for shard in shards for output in shard.outputs}
    try:
        dissect(delta.config, {name: dataclasses.replace(info, name=name) for name, info in outputs.items()})
    except BadInput as error:
        raise BadInput(f"{shown}: what would be put together is no model ({error})") from error
    files = dict(delta.files)
    for name, digest in delta.index.from_base.items() if small_files else ():
        content = base.read_side_file(name) if name in base.side_files else None
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            how = "not there" if content is None else "not what the output had"
            raise BadInput(
                f"{base.source.shown}: {printable(name)} is {how}; take the base as the surgery found it, or make the"
                " delta with `--base`, so that it brings that file. Nothing was written"
            )
        files[name] = content
    if delta.index.shards.keys() != {SINGLE_FILE}:
        files[INDEX_FILE] = index_of(tuple(shards))
    return Job(
        purpose=PutBack(
            source=printable(str(delta.path)),
            told=manifest,
            what="put back",
            held={name: tensor.sha256 for name, tensor in delta.index.tensors.items()},
        ),
        blueprint=blueprint_of(tuple(shards), delta.config),
        base=both,
        shards=tuple(shards),
        files=files,
    )


def wrong_base(manifest: Manifest, name: str, shown: str) -> BadInput:
    """What is said of a base that the delta does not belong to: `name` is the first tensor that tells."""
    revision = f"@{manifest.base.revision}" if manifest.base.revision else ""
    return BadInput(
        f"{printable(name)}: not what the delta's base holds there, so {shown} is another checkpoint; the delta goes"
        f" onto what its last surgery found, {printable(manifest.base.id + revision)}. Nothing was written"
    )


@dataclass(frozen=True)
class _Both:
    """The base's files, and the delta's shards behind a mark."""

    base: Source
    delta: LocalSource

    @property
    def shown(self) -> str:
        """What errors call it."""
        return self.base.shown

    def listing(self) -> dict[str, int]:
        """The base's."""
        return self.base.listing()

    def small(self, name: str, *, max_bytes: int) -> bytes:
        """The base's."""
        return self.base.small(name, max_bytes=max_bytes)

    def check_small(self, name: str) -> None:
        """As the base's."""
        self.base.check_small(name)

    def headers(self, files: list[str]) -> dict[str, Header]:
        """Of the base's shards."""
        return self.base.headers(files)

    def open_shard(self, file: str) -> int:
        """A read-only descriptor."""
        if file.startswith(_MARK):
            return self.delta.open_shard(file.removeprefix(_MARK))
        return self.base.open_shard(file)

    def identity(self) -> list[dict[str, Any]]:
        """Of all shards."""
        return [*self.base.identity(), *self.delta.identity()]

    def check_unchanged(self) -> None:
        """Of all shards."""
        self.base.check_unchanged()
        self.delta.check_unchanged()


def _both(delta: Delta, base: CheckpointFolder) -> CheckpointFolder:
    marked = {
        f"{_MARK}{name}": dataclasses.replace(info, name=f"{_MARK}{name}", file=f"{_MARK}{info.file}")
        for name, info in delta.tensors.items()
    }
    return dataclasses.replace(
        base,
        tensors=base.tensors | marked,
        headers=base.headers | {f"{_MARK}{file}": header for file, header in delta.headers.items()},
        source=_Both(base.source, delta.source),
    )


def applied_delta_view(applied: AppliedDelta) -> RenderableType:
    """What was put together."""
    return Text.assemble(
        ("done ", "bold green"),
        f"{printable(str(applied.path))}: {applied.whole} tensors ({size(applied.nbytes)}), {applied.tensors} from the"
        f" delta and the rest from {printable(applied.base)}, each what its digest says",
        overflow="fold",
    )
