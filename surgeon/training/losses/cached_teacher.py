"""The base's predictions on the text on which it teaches, recorded before the first step next to the checkpoints.

A run draws its sequences in one order, whatever its micro-batches and processes are, so all of them are known in
advance. They are drawn twice: first for the base, which before the first step is the model itself, so no second model
is in memory later. The first process writes. What a killed call recorded in part is recorded anew.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surgeon.common.disk_space import writing
from surgeon.common.distributed import Ranks, is_sharded, waiting
from surgeon.common.formatting import size
from surgeon.common.listener import Listener
from surgeon.common.work_folders import read_own
from surgeon.data.packing import Mixture, PackedSequence, batch_of
from surgeon.errors import BadInput, SurgeonError, printable
from surgeon.training.losses.preserving import Preserving
from surgeon.training.losses.top_k import TopK
from surgeon.training.processes.sharding import let_go
from surgeon.training.saved.checkpoints import RunRecord

# Files of a work folder: the base's predictions, one record per token that counts; and for every sequence that the run
# draws the number of its records and two checksums. They are complete where the run's record has the digest of the
# second one.
SAID_FILE, INDEX_FILE = "teacher.bin", "teacher.index"

_ENTRY = np.dtype([("tokens", "<u4"), ("ids", "<u4"), ("said", "<u4")])


@dataclass
class CachedTeacher:
    """The base's `k` likeliest next tokens at every token that counts, in a run of `sequences` sequences.

    A sequence has `length` tokens. `on` names the sequences on which the base teaches, as in configs: original, or
    all. The files are in `work`.
    """

    work: Path
    k: int
    on: str
    mixture: Mixture[PackedSequence]
    sequences: int
    length: int

    def __post_init__(self) -> None:
        """Set the dtype of a token's record, and an empty index, which `_open` replaces."""
        self._record = np.dtype([("ids", "<i4", (self.k,)), ("log_probs", "<f4", (self.k,)), ("rest", "<f4")])
        self._index = np.zeros(0, _ENTRY)
        self._ends = np.zeros(1, np.int64)

    def taught(self, sequence: PackedSequence) -> bool:
        """Return whether the base teaches on a sequence."""
        return self.on == "all" or sequence.domain == 0

    @property
    def most_sequences(self) -> int:
        """The largest number of sequences on which the base may teach.

        A mixture draws from a source less than two sequences more than its share.
        """
        if self.on == "all":
            return self.sequences
        known = [
            share
            for stream, share in zip(self.mixture.streams, self.mixture.shares, strict=True)
            if share and stream.packer.domain == 0
        ]
        return min(self.sequences, math.ceil(sum(share * self.sequences + 2 for share in known)))

    @property
    def most_bytes(self) -> int:
        """The largest size of the files in bytes, which they have where every token counts."""
        # The last token of a sequence has no next one.
        tokens = self.most_sequences * (self.length - 1)
        return tokens * self._record.itemsize + self.sequences * _ENTRY.itemsize

    @property
    def summary(self) -> str:
        """A sentence that says what is kept, and its size."""
        tokens = self.most_sequences * (self.length - 1)
        return (
            f"the base's {self.k} likeliest tokens at each of at most {tokens:,} tokens of text: at most"
            f" {size(self.most_bytes)} on disk (ids in int32, log-probabilities in float32)"
        )

    def needed_bytes(self) -> int:
        """Return the size of the files in bytes where they are complete, else their largest size."""
        if not self._is_recorded():
            return self.most_bytes
        return sum((self.work / name).lstat().st_size for name in (SAID_FILE, INDEX_FILE))

    def record(
        self, preserving: Preserving, *, micro_batch: int, device: torch.device, ranks: Ranks, listener: Listener
    ) -> None:
        """Record the base's predictions unless the files are complete; afterwards the mixture is in the same state.

        All processes call this, before anything trains.

        Args:
            preserving: the term, whose model contains the base.
            micro_batch: sequences that run together in one process.
            device: where the model runs.
            ranks: this process and the others.
            listener: receives progress.

        Raises:
            BadInput: a process does not see the folder.
        """
        begun = copy.deepcopy(self.mixture.state())
        with waiting(ranks) if ranks.size > 1 else contextlib.nullcontext(ranks) as ranks:
            if ranks.leads:
                with ranks.leading():
                    recorded = self._is_recorded()
                ranks.send(recorded)
            else:
                ranks.receive()
                recorded = ranks.receive()
            if not recorded:
                listener.begin("asking the base", self.sequences, "sequences")
                with contextlib.ExitStack() as files:
                    names = (SAID_FILE, INDEX_FILE) if ranks.leads else ()
                    written = [files.enter_context((self.work / name).open("wb")) for name in names]
                    for count, places, sequences in self._groups(micro_batch * ranks.size):
                        own = sequences[ranks.rank * micro_batch : (ranks.rank + 1) * micro_batch]
                        # All processes must take part in gathering sharded weights, so one without sequences runs one.
                        runs = own or (sequences[:1] if is_sharded(preserving.model) else [])
                        said = self._recorded(preserving, runs, device) if runs else []
                        found = _gathered(said if own else [], ranks)
                        if not ranks.leads:
                            ranks.receive()
                            continue
                        with ranks.leading(), writing(self.work):
                            _write(written[0], written[1], count, places, sequences, found)
                        listener.advance(count)
                    if ranks.leads:
                        with ranks.leading(), writing(self.work):
                            for file in written:
                                file.flush()
                                os.fsync(file.fileno())
                            record = RunRecord.read(self.work)
                            assert record is not None
                            record.keep(self.work, INDEX_FILE)
                    else:
                        ranks.receive()
                self.mixture.restore(begun)
                let_go(preserving.model)
        self._open()
        preserving.said = self.said

    def said(self, numbers: Tensor, ids: Tensor, counts: Tensor) -> TopK:
        """Read the base's recorded predictions for the sequences `numbers` (B), at the tokens that count.

        `ids` are the sequences' tokens (B T); `counts` marks the tokens that count (B T, bool). Raises SurgeonError
        where a sequence is not the recorded one, and BadInput where the file is not as it was written.
        """
        parts = []
        with (self.work / SAID_FILE).open("rb") as file:
            for number, tokens, here in zip(numbers.tolist(), ids.cpu(), counts.sum(dim=1).tolist(), strict=True):
                entry = self._index[number]
                if (int(entry["tokens"]), int(entry["ids"])) != (here, _sum_of(tokens)):
                    raise SurgeonError(
                        f"sequence {number} of this run is another than the base was asked about before the first"
                        " step; leave `teacher` out"
                    )
                file.seek(int(self._ends[number]) * self._record.itemsize)
                content = file.read(here * self._record.itemsize)
                if zlib.crc32(content) != entry["said"]:
                    raise BadInput(
                        f"{printable(str(self.work / SAID_FILE))}: not what was written, so the disk or somebody"
                        " changed it; remove it, and run the same command again: the base predicts again"
                    )
                parts.append(np.frombuffer(content, self._record))
        every = np.concatenate(parts)
        found = (torch.from_numpy(every[name].copy()) for name in ("ids", "log_probs", "rest"))
        return TopK(*found).to(ids.device)

    def _is_recorded(self) -> bool:
        """Return whether the files are complete, by the run's record."""
        record = RunRecord.read(self.work)
        return record is not None and record.has_kept(self.work, INDEX_FILE)

    def _groups(self, size: int) -> Iterator[tuple[int, list[int], list[PackedSequence]]]:
        """Draw the sequences, and yield them in groups with `size` sequences that are taught.

        The base teaches on some sequences only. A group is (number of sequences drawn, places
        of the taught sequences among them, the taught sequences).
        """
        count, places, kept = 0, list[int](), list[PackedSequence]()
        for _ in range(self.sequences):
            sequence = self.mixture.next()
            if self.taught(sequence):
                places.append(count)
                kept.append(sequence)
            count += 1
            if len(kept) == size:
                yield count, places, kept
                count, places, kept = 0, [], []
        if count:
            yield count, places, kept

    def _recorded(
        self, preserving: Preserving, sequences: Sequence[PackedSequence], device: torch.device
    ) -> list[NDArray[Any]]:
        """Run the base on `sequences`; return for each sequence the records of its tokens that count."""
        batch = {name: tensor.to(device) for name, tensor in batch_of(sequences).items()}
        found = preserving.top(batch, self.k)
        records = np.empty(len(found), self._record)
        for name, tensor in vars(found).items():
            records[name] = tensor.cpu().numpy()
        tokens = preserving.counted(batch).sum(dim=1).cumsum(dim=0)[:-1].tolist()
        return np.split(records, tokens)

    def _open(self) -> None:
        """Read the index of the files. Raises BadInput where they are not complete."""
        if not self._is_recorded():
            raise BadInput(
                f"{printable(str(self.work / SAID_FILE))}: what the base said, as the first process wrote it, is not"
                " there for this one; train to a folder that all processes see"
            )
        self._index = np.frombuffer(read_own(self.work / INDEX_FILE) or b"", _ENTRY)
        self._ends = np.concatenate([[0], self._index["tokens"].astype(np.int64).cumsum()])


def _write(
    said: BinaryIO,
    index: BinaryIO,
    count: int,
    places: Sequence[int],
    sequences: Sequence[PackedSequence],
    found: Sequence[NDArray[Any]],
) -> None:
    """Append one group of sequences to both files.

    Args:
        said: the file of predictions.
        index: the file of entries.
        count: how many sequences the group has.
        places: the places in the group of the sequences on which the base teaches.
        sequences: these sequences.
        found: their records.
    """
    entries = np.zeros(count, _ENTRY)
    for place, sequence, records in zip(places, sequences, found, strict=True):
        content = records.tobytes()
        entries[place] = len(records), _sum_of(torch.tensor(sequence.ids)), zlib.crc32(content)
        said.write(content)
    index.write(entries.tobytes())


def _gathered(own: list[NDArray[Any]], ranks: Ranks) -> list[NDArray[Any]]:
    """Return the records of all processes, in the order of their ranks; empty on every process but the first."""
    if ranks.size == 1:
        return own
    every: list[Any] | None = [None] * ranks.size if ranks.leads else None
    torch.distributed.gather_object(own, every, dst=0, group=ranks.group)
    return [records for each in every or () for records in each]


def _sum_of(ids: Tensor) -> int:
    """Return a checksum of a sequence's tokens."""
    return zlib.crc32(ids.to(torch.int64).numpy().astype("<i8").tobytes())
