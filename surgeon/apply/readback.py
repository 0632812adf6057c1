"""Reading back what was written, while more is being written: the static proof and the digests of the manifest.

Copied tensors are compared with the base's bytes and hashed in the same pass, computed ones hashed; shards are
flushed to disk meanwhile, and journalled once both are done.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Self

from surgeon.apply.finiteness import FiniteCheck
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import Header, TensorInfo, read_header
from surgeon.checkpoint.known_digests import FileDigests
from surgeon.checkpoint.pieces import Gap, Pieces, Span, read_in_order
from surgeon.checkpoint.ranges import (
    compare_ranges,
    equal_ranges,
    fill,
    pieces_of,
    sha256_pieces,
    sha256_range,
    zeros_sha256,
)
from surgeon.checkpoint.source import OpenShards, Source
from surgeon.checkpoint.staging import Staging
from surgeon.checkpoint.work_folders import sync
from surgeon.errors import PromiseBroken, printable

# One for each core that copying leaves free, and one more for when copying is done.
_READERS = 2
_BUFFER = 8 * 1024 * 1024

# How a shard came to be: written, or without moving a byte.
Way = Literal["copy", "reflink", "link"]


@dataclass(frozen=True)
class Origin:
    """Where the bytes of an output lie: `pieces` of `tensors` of an opened checkpoint, delta or work folder."""

    source: Source
    tensors: Mapping[str, TensorInfo]
    pieces: Pieces

    @classmethod
    def of(cls, source: Source, info: TensorInfo) -> Origin:
        """All of a tensor."""
        return cls(source, {info.name: info}, Pieces.whole(info.name, info.nbytes))

    @property
    def first(self) -> TensorInfo:
        """The tensor whose bytes come first."""
        return self.tensors[self.pieces.spans[0].tensor]

    @property
    def whole(self) -> TensorInfo | None:
        """The tensor that it is, byte for byte; None where it is made of parts."""
        return self.first if self.pieces.is_all_of(self.first) else None

    def read(self, shards: OpenShards) -> Iterator[memoryview | Gap]:
        """The bytes in order, and gaps where the output has its own. Raises BadInput where a shard ends early."""
        return read_in_order(self.pieces, self.tensors, shards.of(self.source))

    def key(self, tensor: TensorInfo) -> tuple[int, str, str]:
        """What distinguishes a tensor from the others that are read: its source, and its file and name there.

        What a run keeps of the base lies in files of their own, by the names that the weights have.
        """
        return id(self.source), tensor.file, tensor.name


class ReadBack:
    """Proves shards in threads of its own. A failure comes out at the next `add`, or in `settle`.

    `files` are the digests of the small files that were written, by their names. `digests` (of every output; a copy's
    is its original's, which it was found equal to) fill as shards are done, and so do `maps`, the reports of transport
    maps and networks that were handed in with them, and `not_finite`, the originals that hold NaN or infinity (what is
    computed never does). `ways` says of each shard how its bytes came there, `origins` where the bytes of copies lie.
    Without `compare` copies are taken on trust: originals are hashed, the output is not read again.
    """

    def __init__(self, origins: Mapping[str, Origin], staging: Staging, *, compare: bool = True) -> None:
        self.digests: dict[str, str] = {}
        self.maps: dict[str, dict[str, Any]] = {}
        self.not_finite: set[str] = set()
        self.files: dict[str, str] = {}
        self.ways: dict[str, Way] = {}
        self._origins = origins
        self._originals: dict[tuple[int, str, str], str] = {}
        self._staging = staging
        self._compare = compare
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="read-back")
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._pending: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for pool in (self._readers, self._flusher):
            pool.shutdown(wait=True, cancel_futures=kind is not None)

    def add(self, shard: Shard, maps: Mapping[str, dict[str, Any]]) -> None:
        """Take over a shard that is written."""
        for done in [pending for pending in self._pending if pending.done()]:
            done.result()
        flushed = self._flusher.submit(sync, self._staging.folder / shard.file)
        self._pending.append(self._readers.submit(self._prove, shard, dict(maps), flushed))

    def take(self, shard: Shard, found: FileDigests, way: Way) -> None:
        """Take over a shard that is another file whole, by `way`; what that file holds is known."""
        self._done(shard, dict(found.digests), {}, list(found.not_finite), way)

    def known(self, header: Header) -> FileDigests | None:
        """What is known of a file of which every tensor was copied as it is; None where one was not."""
        with self._lock:
            digests = {info.name: self.digests.get(info.name) for info in header.tensors}
        found = {name: digest for name, digest in digests.items() if digest is not None}
        return FileDigests(found, tuple(sorted(self.not_finite & found.keys()))) if len(found) == len(digests) else None

    def remember(self, file: str, record: Mapping[str, Any]) -> None:
        """Take over what an earlier run's journal says of a shard."""
        with self._lock:
            self.ways[file] = record.get("way", "copy")
            self.digests.update(record["digests"])
            self.maps.update(record["maps"])
            self.not_finite.update(record.get("not_finite", ()))
            for name, digest in record["digests"].items():
                if (origin := self._origins.get(name)) is not None and (whole := origin.whole) is not None:
                    self._originals[origin.key(whole)] = digest

    def settle(self) -> None:
        """Wait until every shard is proved, flushed and journalled."""
        for pending in self._pending:
            pending.result()

    def digests_of(self, folder: CheckpointFolder) -> dict[str, str]:
        """Digests of all tensors of a checkpoint that the job reads; those that the output has no copy of are read."""
        found: dict[str, str] = {}
        with OpenShards() as shards:
            for name, info in folder.tensors.items():
                digest = self._originals.get(Origin.of(folder.source, info).key(info))
                opened = shards.opened(folder.source, info.file)
                found[name] = digest or sha256_range(opened, info.begin, info.end)
        return found

    def _prove(self, shard: Shard, maps: dict[str, dict[str, Any]], flushed: Future[None]) -> None:
        digests: dict[str, str] = {}
        not_finite: list[str] = []
        written = os.open(self._staging.folder / shard.file, os.O_RDONLY)
        try:
            infos = {info.name: info for info in read_header(written, file=shard.file).tensors}
            with OpenShards() as shards:
                for output in shard.outputs:
                    info = infos[output.name]
                    origin = self._origins.get(output.name)
                    if origin is not None:
                        look = FiniteCheck(info.dtype)
                        digests[output.name] = self._digest(written, info, shards, origin, look)
                        if not look.finite:
                            not_finite.append(origin.first.name)
                    elif output.is_hole:
                        digests[output.name] = zeros_sha256(info.nbytes)
                    else:
                        digests[output.name] = sha256_range(written, info.begin, info.end)
        finally:
            os.close(written)
        flushed.result()
        self._done(shard, digests, maps, not_finite, "copy")

    def _done(
        self, shard: Shard, digests: dict[str, str], maps: dict[str, dict[str, Any]], not_finite: list[str], way: Way
    ) -> None:
        record = {"digests": digests, "maps": maps, "not_finite": not_finite, "way": way}
        self.remember(shard.file, record)
        with self._lock:
            self._staging.done(shard.file, record)

    def _digest(self, written: int, info: TensorInfo, shards: OpenShards, origin: Origin, look: FiniteCheck) -> str:
        """A copy's digest, which is its original's; each original is hashed and looked at once, however many copies.

        Copies are compared all the same. Raises PromiseBroken where one has other bytes.
        """
        original = origin.whole
        if original is None:
            return self._digest_of_parts(written, info, shards, origin, look)
        key, opened = origin.key(original), shards.opened(origin.source, original.file)
        known = self._originals.get(key)
        if not self._compare:
            digest = known or sha256_range(opened, original.begin, original.end, look)
        elif known is None:
            found = compare_ranges(opened, original.begin, written, info.begin, original.nbytes, look)
            if found is None:
                raise _other_bytes(info, origin)
            digest = found
        elif equal_ranges(opened, original.begin, written, info.begin, original.nbytes):
            digest = known
        else:
            raise _other_bytes(info, origin)
        with self._lock:
            self._originals[key] = digest
        return digest

    def _digest_of_parts(
        self, written: int, info: TensorInfo, shards: OpenShards, origin: Origin, look: FiniteCheck
    ) -> str:
        """The digest of what is made of parts, each compared with its original; what lies between them is hashed.

        Without `compare` what is all parts is taken on trust. Where a tensor begins with all of another, as one with
        more rows does, that one's digest is kept too.
        """
        if not self._compare and origin.pieces.covered:
            return sha256_pieces((piece for piece in origin.read(shards) if not isinstance(piece, Gap)), look)
        whole, original, first = hashlib.sha256(), hashlib.sha256(), origin.first
        begin = info.begin
        for piece in origin.read(shards):
            if isinstance(piece, Gap):
                for made in pieces_of(written, begin, begin + piece.length, _BUFFER):
                    whole.update(made)
                begin += piece.length
                continue
            theirs = bytearray(len(piece))
            fill(written, theirs, begin)
            if theirs != piece:
                raise _other_bytes(info, origin)
            begin += len(piece)
            if begin <= info.begin + first.nbytes:
                original.update(piece)
            whole.update(piece)
            look(piece)
        if origin.pieces.spans[0] == Span(first.name, 0, first.nbytes):
            with self._lock:
                self._originals[origin.key(first)] = original.hexdigest()
        return whole.hexdigest()


def _other_bytes(info: TensorInfo, origin: Origin) -> PromiseBroken:
    return PromiseBroken(
        f"{printable(info.name)} ({info.file}): what was read back is not what {printable(origin.first.name)}"
        " holds; disk failing, or the base changed meanwhile?"
    )
