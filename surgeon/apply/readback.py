"""Reading back what was written, while more is being written: the static proof and the digests of the manifest.

Copied tensors are compared with the base's bytes and hashed in the same pass, computed ones hashed; shards are
flushed to disk meanwhile, and journalled once both are done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from surgeon.blueprint.draft import Output
from surgeon.blueprint.recipes import Copy
from surgeon.blueprint.shards import Shard, is_hole
from surgeon.checkpoint.digest import compare_ranges, sha256_range, zeros_sha256
from surgeon.checkpoint.durable import sync
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import TensorInfo, read_header
from surgeon.checkpoint.staging import Staging
from surgeon.errors import PromiseBroken, printable

# One for each core that copying leaves free, and one more for when copying is done.
_READERS = 2


class Sources:
    """Base shards, opened at first need and closed together."""

    def __init__(self, base: CheckpointFolder) -> None:
        self.base = base
        self.opened: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self.opened.values():
            os.close(source)

    def __getitem__(self, file: str) -> int:
        if file not in self.opened:
            self.opened[file] = self.base.open_shard(file)
        return self.opened[file]


class ReadBack:
    """Proves shards in threads of its own. A failure comes out at the next `add`, or in `settle`.

    `digests` (of computed and constant tensors) and `base_digests` (of base tensors) fill as shards are done;
    `maps` are the reports of transport maps that were handed in with them. Without `compare` copies are taken on
    trust: the base is hashed, the output not read again.
    """

    def __init__(self, base: CheckpointFolder, staging: Staging, *, compare: bool = True) -> None:
        self.digests: dict[str, str] = {}
        self.base_digests: dict[str, str] = {}
        self.maps: dict[str, dict[str, Any]] = {}
        self._base = base
        self._staging = staging
        self._compare = compare
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="read-back")
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._pending: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in (self._readers, self._flusher):
            pool.shutdown(wait=True, cancel_futures=kind is not None)

    def add(self, shard: Shard, maps: Mapping[str, dict[str, Any]]) -> None:
        """Take over a shard that is written."""
        for done in [pending for pending in self._pending if pending.done()]:
            done.result()
        flushed = self._flusher.submit(sync, self._staging.folder / shard.file)
        self._pending.append(self._readers.submit(self._prove, shard, dict(maps), flushed))

    def remember(self, record: Mapping[str, Any]) -> None:
        """Take over what an earlier run's journal says of a shard."""
        with self._lock:
            self.digests.update(record["digests"])
            self.base_digests.update(record["base_digests"])
            self.maps.update(record["maps"])

    def settle(self) -> None:
        """Wait until every shard is proved, flushed and journalled."""
        for pending in self._pending:
            pending.result()

    def digest_the_rest(self) -> None:
        """Hash the base tensors that the output has no copy of, so that the manifest names the whole base."""
        with Sources(self._base) as sources:
            for name, info in self._base.tensors.items():
                if name not in self.base_digests:
                    self.base_digests[name] = sha256_range(sources[info.file], info.begin, info.end)

    def digest_of(self, output: Output) -> str:
        """The digest of an output tensor; a copy's is its original's, which it was found equal to."""
        if isinstance(output.recipe, Copy):
            return self.base_digests[output.recipe.source]
        return self.digests[output.name]

    def _prove(self, shard: Shard, maps: dict[str, dict[str, Any]], flushed: Future[None]) -> None:
        digests: dict[str, str] = {}
        base_digests: dict[str, str] = {}
        written = os.open(self._staging.folder / shard.file, os.O_RDONLY)
        try:
            infos = {info.name: info for info in read_header(written, file=shard.file).tensors}
            with Sources(self._base) as sources:
                for output in shard.outputs:
                    info = infos[output.name]
                    if isinstance(output.recipe, Copy):
                        original = self._base.tensors[output.recipe.source]
                        base_digests[original.name] = (
                            _compared(written, info, sources[original.file], original)
                            if self._compare
                            else self._digest(sources[original.file], original)
                        )
                    elif is_hole(output):
                        digests[output.name] = zeros_sha256(info.nbytes)
                    else:
                        digests[output.name] = sha256_range(written, info.begin, info.end)
        finally:
            os.close(written)
        record = {"digests": digests, "base_digests": base_digests, "maps": maps}
        self.remember(record)
        flushed.result()
        with self._lock:
            self._staging.done(shard.file, record)

    def _digest(self, source: int, original: TensorInfo) -> str:
        """A base tensor's digest; a layer's copy finds it known where its original's shard is done."""
        return self.base_digests.get(original.name) or sha256_range(source, original.begin, original.end)


def _compared(written: int, info: TensorInfo, source: int, original: TensorInfo) -> str:
    digest = compare_ranges(source, original.begin, written, info.begin, original.nbytes)
    if digest is None:
        raise PromiseBroken(
            f"{printable(info.name)} ({info.file}): what was read back is not what {printable(original.name)}"
            " holds; disk failing, or the base changed meanwhile?"
        )
    return digest
