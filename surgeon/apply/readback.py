"""Reading back what was written, while more is being written: the static proof and the digests of the manifest.

Copied tensors are compared with the base's bytes and hashed in the same pass, computed ones hashed; shards are
flushed to disk meanwhile, and journalled once both are done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Self

from surgeon.apply.finite import FiniteCheck
from surgeon.apply.parts import parts_in_order, pieces_in_order
from surgeon.blueprint.recipes import PerLayer
from surgeon.blueprint.shards import Shard, is_hole
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import Header, TensorInfo, read_header
from surgeon.checkpoint.known_digests import FileDigests
from surgeon.checkpoint.ranges import (
    compare_beginning,
    compare_pieces,
    compare_ranges,
    equal_ranges,
    sha256_pieces,
    sha256_range,
    zeros_sha256,
)
from surgeon.checkpoint.source import Source
from surgeon.checkpoint.staging import Staging
from surgeon.checkpoint.working import sync
from surgeon.errors import PromiseBroken, printable

# One for each core that copying leaves free, and one more for when copying is done.
_READERS = 2

# How a shard came to be: written, or without moving a byte.
Way = Literal["copy", "reflink", "link"]


@dataclass(frozen=True)
class Origin:
    """Where the bytes of a copied tensor lie: as `tensor` in an opened checkpoint, delta or work folder.

    With `parts` it is copied part by part, in their order. With `pieces` its bytes are theirs, one after the other.
    With `begins` the output begins with all of `tensor`, and has more rows behind it.
    """

    source: Source
    tensor: TensorInfo
    parts: PerLayer | None = None
    pieces: tuple[TensorInfo, ...] = ()
    begins: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is all of `tensor`, byte for byte."""
        return self.parts is None and not self.pieces and not self.begins

    @property
    def key(self) -> tuple[int, str, str]:
        """What distinguishes it from the others: its source, and its file and name there.

        What a run keeps of the base lies in files of their own, by the names that the weights have.
        """
        return id(self.source), self.tensor.file, self.tensor.name


class OpenShards:
    """Shards that are read from, opened at first need and closed together."""

    def __init__(self) -> None:
        self._opened: dict[tuple[int, str], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._opened.values():
            os.close(descriptor)

    def of(self, origin: Origin) -> int:
        """The descriptor of the shard that holds it; BadInput where the shard was changed since it was opened."""
        return self.opened(origin.source, origin.tensor.file)

    def opened(self, source: Source, file: str) -> int:
        """The descriptor of a shard. Raises BadInput where it was changed since it was opened."""
        shard = id(source), file
        if shard not in self._opened:
            self._opened[shard] = source.open_shard(file)
        return self._opened[shard]

    def read(self, origin: Origin) -> Iterator[memoryview]:
        """The bytes of what is copied in parts or pieces. Raises BadInput where a shard ends early."""
        if origin.parts is not None:
            return parts_in_order(self.of(origin), origin.tensor.begin, origin.parts)
        return pieces_in_order(origin.pieces, lambda file: self.opened(origin.source, file))


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
                if (origin := self._origins.get(name)) is not None and origin.whole:
                    self._originals[origin.key] = digest

    def settle(self) -> None:
        """Wait until every shard is proved, flushed and journalled."""
        for pending in self._pending:
            pending.result()

    def digests_of(self, folder: CheckpointFolder) -> dict[str, str]:
        """Digests of all tensors of a checkpoint that the job reads; those that the output has no copy of are read."""
        found: dict[str, str] = {}
        with OpenShards() as shards:
            for name, info in folder.tensors.items():
                origin = Origin(folder.source, info)
                digest = self._originals.get(origin.key)
                found[name] = digest or sha256_range(shards.of(origin), info.begin, info.end)
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
                    if origin is not None and origin.begins and self._compare:
                        beginning, digests[output.name] = _compared_beginning(written, info, shards, origin)
                        with self._lock:
                            self._originals[origin.key] = beginning
                    elif origin is not None and not origin.begins:
                        look = FiniteCheck(info.dtype)
                        digests[output.name] = self._digest(written, info, shards, origin, look)
                        if not look.finite:
                            not_finite.append(origin.tensor.name)
                    elif is_hole(output):
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
        if not origin.whole:
            if not self._compare:
                return sha256_pieces(shards.read(origin), look)
            return _agreed(compare_pieces(shards.read(origin), written, info.begin, look), info, origin)
        original, known = origin.tensor, self._originals.get(origin.key)
        if not self._compare:
            digest = known or sha256_range(shards.of(origin), original.begin, original.end, look)
        elif known is None:
            found = compare_ranges(shards.of(origin), original.begin, written, info.begin, original.nbytes, look)
            digest = _agreed(found, info, origin)
        elif equal_ranges(shards.of(origin), original.begin, written, info.begin, original.nbytes):
            digest = known
        else:
            raise _other_bytes(info, origin)
        with self._lock:
            self._originals[origin.key] = digest
        return digest


def _compared_beginning(written: int, info: TensorInfo, shards: OpenShards, origin: Origin) -> tuple[str, str]:
    """The digests of the original and of the output that begins with it."""
    original = origin.tensor
    found = compare_beginning(shards.of(origin), original.begin, written, info.begin, original.nbytes, info.end)
    if found is None:
        raise _other_bytes(info, origin)
    return found


def _other_bytes(info: TensorInfo, origin: Origin) -> PromiseBroken:
    return PromiseBroken(
        f"{printable(info.name)} ({info.file}): what was read back is not what {printable(origin.tensor.name)}"
        " holds; disk failing, or the base changed meanwhile?"
    )


def _agreed(digest: str | None, info: TensorInfo, origin: Origin) -> str:
    if digest is None:
        raise _other_bytes(info, origin)
    return digest
