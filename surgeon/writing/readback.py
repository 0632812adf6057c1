"""Reading back written shards while others are being written: the static proof, and the manifest's digests.

Copied tensors are compared with the base's bytes and hashed in the same pass; computed ones are hashed. Shards are
flushed to disk meanwhile, and journalled once both are done.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from surgeon.blueprint.blueprint import Output
from surgeon.blueprint.shards import Shard
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import Header, TensorInfo, read_header
from surgeon.checkpoint.piece_bytes import Gap, OtherBytes, compared, places_of, read_in_order
from surgeon.checkpoint.pieces import Pieces, Span
from surgeon.checkpoint.ranges import sha256_range, zeros_sha256
from surgeon.checkpoint.source import OpenShards, Source
from surgeon.checkpoint.staging import Staging
from surgeon.common.work_folders import sync
from surgeon.errors import PromiseBroken, printable
from surgeon.writing.finiteness import FiniteCheck

# One for each core that copying leaves free, and one more for when copying is done.
_READERS = 2

# How a shard got into the output: written, or without moving a byte.
Way = Literal["copy", "reflink", "link"]


@dataclass(frozen=True)
class FileDigests:
    """The sha256 (hex) of every tensor of a file, in the order of their bytes; `not_finite` names those with NaN or
    infinity.
    """

    digests: dict[str, str]
    not_finite: tuple[str, ...]


class ReadBack:
    """A checker that proves shards in its own threads. A failure is raised by the next `add`, or by `settle`.

    `files` are the digests of the written small files, by name. As shards are done, these fill: `digests` of every
    output (a copy has its original's digest, after a comparison); `maps`, the reports of transport maps and networks
    that came with the shards; `not_finite`, the originals that hold NaN or infinity (computed tensors never do); and
    `ways`, how the bytes of each shard got there. `places` gives the bytes of files of the `sources` that outputs copy
    (`Job`). Without `compare` copies are trusted: originals are hashed, the output is not read again.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        places: Mapping[str, Pieces],
        staging: Staging,
        *,
        compare: bool = True,
    ) -> None:
        """Start the threads."""
        self.digests: dict[str, str] = {}
        self.maps: dict[str, dict[str, Any]] = {}
        self.not_finite: set[str] = set()
        self.files: dict[str, str] = {}
        self.ways: dict[str, Way] = {}
        self._sources = sources
        self._places = places
        # Digests of byte ranges of source files that an output equals, or begins with.
        self._originals: dict[Span, str] = {}
        self._staging = staging
        self._compare = compare
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="read-back")
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._pending: list[Future[None]] = []

    def __enter__(self) -> Self:
        """Return the checker itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the threads; after an error, cancel what has not begun."""
        for pool in (self._readers, self._flusher):
            pool.shutdown(wait=True, cancel_futures=kind is not None)

    @property
    def folder(self) -> Path:
        """The staged folder, in which the shards and small files are."""
        return self._staging.folder

    def add(self, shard: Shard, maps: Mapping[str, dict[str, Any]]) -> None:
        """Start to prove a written shard in another thread; raise the failure of an earlier shard, if any.

        `maps` are the reports of maps and networks that were made for the shard.
        """
        for done in [pending for pending in self._pending if pending.done()]:
            done.result()
        flushed = self._flusher.submit(sync, self._staging.folder / shard.file)
        self._pending.append(self._readers.submit(self._prove, shard, dict(maps), flushed))

    def take(self, shard: Shard, found: FileDigests, way: Way) -> None:
        """Record a shard that is a whole other file, brought by `way`; `found` are that file's digests."""
        self._done(shard, dict(found.digests), {}, list(found.not_finite), way)

    def known(self, place: str, header: Header) -> FileDigests | None:
        """Return the digests of the file at `place` (`OpenShards`); None where some tensors were not read yet."""
        spans = {info.name: Span(place, info.begin, info.nbytes) for info in header.tensors}
        with self._lock:
            found = {name: self._originals[span] for name, span in spans.items() if span in self._originals}
        return FileDigests(found, tuple(sorted(self.not_finite & found.keys()))) if len(found) == len(spans) else None

    def remember(self, file: str, record: Mapping[str, Any]) -> None:
        """Record a shard from its entry in an earlier run's journal."""
        with self._lock:
            self.ways[file] = record.get("way", "copy")
            self.digests.update(record["digests"])
            self.maps.update(record["maps"])
            self.not_finite.update(record.get("not_finite", ()))
            for name, digest in record["digests"].items():
                if (place := self._places.get(name)) is not None and place.spans[0].length == place.nbytes:
                    self._originals[place.spans[0]] = digest

    def settle(self) -> None:
        """Wait until every shard is proved, flushed and journalled; raise the failure of any."""
        for pending in self._pending:
            pending.result()

    def digests_of(self, folder: CheckpointFolder) -> dict[str, str]:
        """Return digests of all tensors of `folder`, the job's first checkpoint.

        Tensors that the output does not copy are read here.
        """
        found: dict[str, str] = {}
        with OpenShards(self._sources) as shards:
            for name, place in places_of(folder.tensors).items():
                (span,) = place.spans
                if span not in self._originals:
                    look, end = FiniteCheck(folder.tensors[name].dtype), span.offset + span.length
                    self._originals[span] = sha256_range(shards.opened(span.tensor), span.offset, end, look)
                    if not look.finite:
                        self.not_finite.add(name)
                found[name] = self._originals[span]
        return found

    def _prove(self, shard: Shard, maps: dict[str, dict[str, Any]], flushed: Future[None]) -> None:
        """Read a written shard back, compare its copies and hash its tensors; journal it once it is flushed to disk.

        Raises PromiseBroken where bytes differ.
        """
        digests: dict[str, str] = {}
        not_finite: list[str] = []
        written = os.open(self._staging.folder / shard.file, os.O_RDONLY)
        try:
            infos = {info.name: info for info in read_header(written, file=shard.file).tensors}
            with OpenShards(self._sources) as shards:
                for output in shard.outputs:
                    info = infos[output.name]
                    if output.name in self._places:
                        look = FiniteCheck(info.dtype)
                        digests[output.name] = self._digest(written, info, shards, output, look)
                        if not look.finite:
                            not_finite.append(output.pieces.tensors[0])
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
        """Record a proved shard here and in the journal."""
        record = {"digests": digests, "maps": maps, "not_finite": not_finite, "way": way}
        self.remember(shard.file, record)
        with self._lock:
            self._staging.done(shard.file, record)

    def _digest(self, written: int, info: TensorInfo, shards: OpenShards, output: Output, look: FiniteCheck) -> str:
        """Return the digest of a tensor that holds source bytes, after comparing them; `look` gets these bytes.

        Each original is hashed and checked once, however many copies there are; every copy is compared. Where a tensor
        begins with all of another one (as with added rows), that one's digest is kept too. Without `compare` a tensor
        that consists of source bytes is trusted. Raises PromiseBroken where bytes differ.
        """
        place = self._places[output.name]
        first = place.spans[0]
        known = self._originals.get(first) if first.length == place.nbytes else None
        digest, at, of_first = hashlib.sha256(), 0, None
        try:
            for piece, copied in self._compared(written, info, shards, place, trusted=known):
                if known is None:
                    digest.update(piece)
                    if copied:
                        look(piece)
                at += len(piece)
                if at == first.length:
                    of_first = known or digest.hexdigest()
        except OtherBytes:
            raise PromiseBroken(
                f"{printable(info.name)} ({info.file}): what was read back is not what"
                f" {printable(output.pieces.tensors[0])} holds;"
                " disk failing, or the base changed meanwhile?"
            ) from None
        if of_first is not None and (first.at, first.count) == (0, 1):
            with self._lock:
                self._originals[first] = of_first
        return known or digest.hexdigest()

    def _compared(
        self, written: int, info: TensorInfo, shards: OpenShards, place: Pieces, *, trusted: str | None
    ) -> Iterator[tuple[bytearray | memoryview, bool]]:
        """Yield (piece, copied) for the written pieces in order; `copied` is whether the piece holds source bytes.

        With `compare`, or where the tensor has new bytes, pieces are read from the output, and copies are compared.
        Otherwise they are read from the source, and not at all where the digest `trusted` is known.
        """
        if self._compare or not place.covered:
            yield from compared(place, shards.opened, written, info.begin)
        elif trusted is None:
            for piece in read_in_order(place, shards.opened):
                assert not isinstance(piece, Gap), place
                yield piece, True
