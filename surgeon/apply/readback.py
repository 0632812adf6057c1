"""Reading back what was written, while more is being written: the static proof and the digests of the manifest.

Copied tensors are compared with the base's bytes and hashed in the same pass, computed ones hashed; shards are
flushed to disk meanwhile, and journalled once both are done.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

from surgeon.apply.finiteness import FiniteCheck
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import Header, TensorInfo, read_header
from surgeon.checkpoint.known_digests import FileDigests
from surgeon.checkpoint.piece_bytes import Gap, OtherBytes, compared, copy_pieces, read_in_order
from surgeon.checkpoint.pieces import Pieces
from surgeon.checkpoint.ranges import sha256_range, zeros_sha256
from surgeon.checkpoint.source import OpenShards, Source
from surgeon.checkpoint.staging import Staging
from surgeon.common.work_folders import sync
from surgeon.errors import PromiseBroken, printable

# One for each core that copying leaves free, and one more for when copying is done.
_READERS = 2

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

    @cached_property
    def whole(self) -> TensorInfo | None:
        """The tensor that it is, byte for byte; None where it is made of parts."""
        return self.first if self.pieces.is_all_of(self.first) else None

    @property
    def begins_with_first(self) -> bool:
        """Whether the bytes of that tensor, all of them, come first."""
        span = self.pieces.spans[0]
        return (span.offset, span.at, span.length, span.count) == (0, 0, self.first.nbytes, 1)

    def copy(self, shards: OpenShards, target: int, begin: int, progress: Callable[[int], None]) -> None:
        """Lay the bytes at `begin` of the open file `target`. Raises BadInput where a shard ends early."""
        opened = shards.of(self.source)
        copy_pieces(self.pieces, self.tensors, opened, target=target, begin=begin, progress=progress)

    def key(self, tensor: TensorInfo) -> tuple[int, str, str]:
        """What distinguishes a tensor from the others that are read."""
        return _key(self.source, tensor)


def _key(source: Source, tensor: TensorInfo) -> tuple[int, str, str]:
    """What distinguishes a tensor from the others that are read: its source, and its file and name there.

    What a run keeps of the base lies in files of their own, by the names that the weights have.
    """
    return id(source), tensor.file, tensor.name


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
            opened = {file: shards.opened(folder.source, file) for file in folder.shards}
            for name, info in folder.tensors.items():
                digest = self._originals.get(_key(folder.source, info))
                found[name] = digest or sha256_range(opened[info.file], info.begin, info.end)
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
        """The digest of a tensor that holds bytes of others, which are compared with theirs; `look` gets those.

        Each original is hashed and looked at once, however many copies there are; copies are compared all the same.
        Where a tensor begins with all of another, as one with more rows does, that one's digest is kept too. Without
        `compare` what is all of others is taken on trust. Raises PromiseBroken where one has other bytes.
        """
        first, original = origin.first, origin.whole
        known = None if original is None else self._originals.get(origin.key(original))
        digest, at, of_first = hashlib.sha256(), 0, None
        try:
            for piece, copied in self._compared(written, info, shards, origin, trusted=known):
                if known is None:
                    digest.update(piece)
                    if copied:
                        look(piece)
                at += len(piece)
                if at == first.nbytes:
                    of_first = known or digest.hexdigest()
        except OtherBytes:
            raise PromiseBroken(
                f"{printable(info.name)} ({info.file}): what was read back is not what {printable(first.name)} holds;"
                " disk failing, or the base changed meanwhile?"
            ) from None
        if of_first is not None and origin.begins_with_first:
            with self._lock:
                self._originals[origin.key(first)] = of_first
        return known or digest.hexdigest()

    def _compared(
        self, written: int, info: TensorInfo, shards: OpenShards, origin: Origin, *, trusted: str | None
    ) -> Iterator[tuple[bytearray | memoryview, bool]]:
        """What was written, in order, with whether others hold it; nothing where it is taken on trust and `trusted`."""
        if self._compare or not origin.pieces.covered:
            yield from compared(origin.pieces, origin.tensors, shards.of(origin.source), written, info.begin)
        elif trusted is None:
            for piece in read_in_order(origin.pieces, origin.tensors, shards.of(origin.source)):
                assert not isinstance(piece, Gap), origin
                yield piece, True
