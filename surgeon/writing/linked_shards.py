"""Shards that equal another file byte for byte: hard-linked, or sharing its blocks, and hashed once.

Their digests are the digests of that file, computed on all cores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.header import Header, TensorInfo
from surgeon.checkpoint.linking import can_clone, check_linkable, clone, hard_link
from surgeon.checkpoint.ranges import sha256_range
from surgeon.checkpoint.source import LocalSource, OpenShards, Stamp
from surgeon.checkpoint.staging import working_folder
from surgeon.common.formatting import size
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Stopwatch
from surgeon.errors import BadInput, printable
from surgeon.writing.finiteness import FiniteCheck
from surgeon.writing.job import Job, Mirrored
from surgeon.writing.readback import FileDigests, ReadBack, Way

# Beyond this many cores the disk or the memory is the limit.
_MOST_HASHERS = 8


@dataclass(frozen=True)
class Moved:
    """Bytes of an output's tensors by how they got there: written, by shared blocks, or as a second name of a file."""

    written: int = 0
    reflinked: int = 0
    linked: int = 0

    @classmethod
    def of(cls, job: Job, ways: Mapping[str, Way]) -> Moved:
        """Return the counts of bytes for a job; `ways` gives, by shard's file, how the shard got into the output."""
        by_way = dict.fromkeys(("copy", "reflink", "link"), 0)
        for shard in job.shards:
            by_way[ways[shard.file]] += shard.nbytes if shard.file in job.unchanged else 0
        unmoved = by_way["reflink"] + by_way["link"]
        return cls(job.bytes_to_write - unmoved, by_way["reflink"], by_way["link"])

    @property
    def text(self) -> str:
        """Describe the counts in words; empty where every byte was written."""
        linked = f"{size(self.linked)} hard-linked: one file with the original, now read-only" if self.linked else ""
        cloned = f"{size(self.reflinked)} share the original's blocks" if self.reflinked else ""
        unmoved = ", ".join(part for part in (linked, cloned) if part)
        return f"{size(self.written)} written, {unmoved}" if unmoved else ""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        return plain_fields(self)


def way_to(job: Job, out: Path) -> Way:
    """Return how unchanged shards get into `out`'s folder: "link", "reflink" or "copy".

    Raises BadInput where linking is asked and impossible.
    """
    folder = working_folder(out).parent
    with OpenShards(job.sources) as shards:
        for mirrored in job.unchanged.values():
            if not job.link:
                # All lie in one folder, so the first stands for most; the others are tried one by one.
                return "reflink" if can_clone(shards.opened(mirrored.place), folder) else "copy"
            check_linkable(shards.opened(mirrored.place), _path(job, mirrored), folder)
    return "link" if job.link else "copy"


def bytes_to_move(job: Job, out: Path) -> int:
    """Return the bytes for which the disk needs room; unchanged shards need none where they are linked or share blocks.

    Raises BadInput like `way_to`.
    """
    return job.bytes_to_write - (job.bytes_unchanged if way_to(job, out) != "copy" else 0)


def _path(job: Job, mirrored: Mirrored) -> Path:
    """Return the path of a mirrored file, which lies on this machine."""
    source = job.sources[mirrored.source]
    assert isinstance(source, LocalSource), source.shown
    return source.place(mirrored.file)


class Unmoved:
    """A worker that brings unchanged shards into an output by `way`, and reports their digests to `proof`."""

    def __init__(self, job: Job, way: Way, proof: ReadBack) -> None:
        """Begin with a pool of threads that hash originals."""
        self._job, self._way, self._proof = job, way, proof
        self._hashers = ThreadPoolExecutor(min(_cores(), _MOST_HASHERS), thread_name_prefix="hash")

    def __enter__(self) -> Self:
        """Return the worker itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the hashing threads."""
        self._hashers.shutdown(wait=True, cancel_futures=True)

    def take(self, shard: Shard, target: Path, stopwatch: Stopwatch) -> bool:
        """Put a shard in place as `target` without writing its bytes; return whether that was done.

        The shard's digests are then recorded. False means that the bytes must be written: the shard differs from every
        file, or its blocks cannot be shared. Raises BadInput where linking is asked and impossible, or the original
        changes meanwhile.
        """
        mirrored = self._job.unchanged.get(shard.file)
        if mirrored is None:
            return False
        with OpenShards(self._job.sources) as shards:
            source = shards.opened(mirrored.place)
            target.parent.mkdir(exist_ok=True)
            before = Stamp.of(os.fstat(source))
            if self._way == "copy" or (self._way == "reflink" and not _cloned(source, target)):
                return False
            found = self._proof.known(mirrored.place, mirrored.header)
            if found is None:
                with stopwatch.stage("hash"):
                    found = self._hashed(source, mirrored.header)
            with stopwatch.stage(self._way):
                if self._way == "link":
                    target.unlink(missing_ok=True)
                    hard_link(source, _path(self._job, mirrored), target)
                if not Stamp.of(os.fstat(source)).same_content(before):
                    raise BadInput(
                        f"{printable(mirrored.file)}: changed meanwhile; start again when nothing writes to it"
                    )
                self._proof.take(shard, found, self._way)
        return True

    def _hashed(self, source: int, mirrored: Header) -> FileDigests:
        """Return the digests of a file's tensors, hashed by all cores, and the tensors that are not finite."""

        def hashed(info: TensorInfo) -> tuple[str, bool]:
            """Return (digest, finite) of one tensor."""
            look = FiniteCheck(info.dtype)
            return sha256_range(source, info.begin, info.end, look), look.finite

        # The largest first, so that no core is left with a large one at the end.
        infos = sorted(mirrored.tensors, key=lambda info: -info.nbytes)
        found = dict(zip((info.name for info in infos), self._hashers.map(hashed, infos), strict=True))
        not_finite = tuple(name for name, (_, finite) in found.items() if not finite)
        return FileDigests({name: digest for name, (digest, _) in found.items()}, not_finite)


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cloned(source: int, target: Path) -> bool:
    """Make `target` a new file that shares the blocks of `source`; return whether that was possible.

    If not, no file is left.
    """
    target.unlink(missing_ok=True)
    handle = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        if done := clone(source, handle):
            return done
    finally:
        os.close(handle)
    target.unlink()
    return False
