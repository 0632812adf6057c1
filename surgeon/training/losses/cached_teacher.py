"""The base's predictions on the text on which it teaches, recorded before the first step next to the checkpoints.

A run draws its sequences in one order, whatever its micro-batches and processes are, so all of them are known in
advance. They are drawn twice: first for the base, which before the first step is the model itself, so no second model
is in memory later. The first process writes. After a kill the same command continues after the last sequences that
are safe on the disk.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surgeon.common.disk_space import writing
from surgeon.common.distributed import Ranks, is_sharded, waiting
from surgeon.common.formatting import size
from surgeon.common.listener import Listener
from surgeon.common.signed import read_signed, write_signed
from surgeon.common.work_folders import read_own
from surgeon.data.packing import Mixture, PackedSequence, batch_of
from surgeon.errors import BadInput, SurgeonError, printable
from surgeon.training.losses.preserving import Preserving
from surgeon.training.losses.top_k import TopK
from surgeon.training.processes.sharding import let_go

# Files of a work folder: the base's predictions, one record per token that counts; for every sequence that the run
# draws the number of its records and two checksums; and how far both files are written, with the data's state there.
SAID_FILE, INDEX_FILE, STATE_FILE = "teacher.bin", "teacher.index", "teacher.json"

_ENTRY = np.dtype([("tokens", "<u4"), ("ids", "<u4"), ("said", "<u4")])
# Seconds between two saved states from which a killed run continues.
_SAVE_SECONDS = 30.0


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
        if not self._state().get("done"):
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
                    state = self._resumed()
                ranks.send(state)
            else:
                ranks.receive()
                state = ranks.receive()
            if not state["done"]:
                if state["mixture"] is not None:
                    self.mixture.restore(state["mixture"])
                listener.begin("asking the base", self.sequences, "sequences")
                listener.advance(int(state["sequences"]))
                with contextlib.ExitStack() as files:
                    writer = _Writer(self, state, files) if ranks.leads else None
                    for count, places, sequences in self._groups(int(state["sequences"]), micro_batch * ranks.size):
                        # Groups are the same in a resumed run.
                        own = sequences[ranks.rank * micro_batch : (ranks.rank + 1) * micro_batch]
                        # All processes must take part in gathering sharded weights, so one without sequences runs one.
                        runs = own or (sequences[:1] if is_sharded(preserving.model) else [])
                        said = self._recorded(preserving, runs, device) if runs else []
                        found = _gathered(said if own else [], ranks)
                        if writer is None:
                            ranks.receive()
                            continue
                        with ranks.leading(), writing(self.work):
                            writer.add(count, places, sequences, found)
                        listener.advance(count)
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

    def _state(self, *, own: bool = False) -> dict[str, Any]:
        """Return the saved state of the files; empty where there is none, or the files do not match it.

        With `own` it is also empty where another user wrote it, or in another place. Only the first process checks
        this: other processes may run on machines where this user has another key.
        """
        try:
            found = read_signed(self.work / STATE_FILE)
            state: dict[str, Any] = {} if found is None or (own and not found.here) else found.data
            index = read_own(self.work / INDEX_FILE) or b""
            size = (self.work / SAID_FILE).lstat().st_size if state else 0
        except (OSError, ValueError):
            return {}
        kept = index[: state.get("sequences", 0) * _ENTRY.itemsize]
        whole = size >= state.get("tokens", 0) * self._record.itemsize
        return state if state and whole and hashlib.sha256(kept).hexdigest() == state["index"] else {}

    def _resumed(self) -> dict[str, Any]:
        """Return the state from which to continue, after cutting the files to it."""
        state = self._state(own=True)
        if not state:
            state = {"done": False, "sequences": 0, "tokens": 0, "mixture": None}
            (self.work / STATE_FILE).unlink(missing_ok=True)
        if not state["done"]:
            sizes = state["tokens"] * self._record.itemsize, state["sequences"] * _ENTRY.itemsize
            for name, size in zip((SAID_FILE, INDEX_FILE), sizes, strict=True):
                with (self.work / name).open("ab") as file:
                    file.truncate(size)
        return state

    def _groups(self, done: int, size: int) -> Iterator[tuple[int, list[int], list[PackedSequence]]]:
        """Draw the sequences after the first `done`, and yield them in groups with `size` sequences that are taught.

        The base teaches on some sequences only. A group is (number of sequences drawn, places
        of the taught sequences among them, the taught sequences).
        """
        count, places, kept = 0, list[int](), list[PackedSequence]()
        for _ in range(done, self.sequences):
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
        state = self._state()
        if not state.get("done"):
            raise BadInput(
                f"{printable(str(self.work / SAID_FILE))}: what the base said, as the first process wrote it, is not"
                " there for this one; train to a folder that all processes see"
            )
        self._index = np.frombuffer(read_own(self.work / INDEX_FILE) or b"", _ENTRY)
        self._ends = np.concatenate([[0], self._index["tokens"].astype(np.int64).cumsum()])


class _Writer:
    """A writer that appends to a teacher's files from `state` on, and saves from time to time how far they are safe.

    `files` closes them.
    """

    def __init__(self, teacher: CachedTeacher, state: Mapping[str, Any], files: contextlib.ExitStack) -> None:
        """Open both files to append; `state` has the counts of sequences and tokens that are already written."""
        self.teacher = teacher
        self.sequences, self.tokens = int(state["sequences"]), int(state["tokens"])
        self.saved = time.monotonic()
        self.digest = hashlib.sha256((read_own(teacher.work / INDEX_FILE) or b"")[: self.sequences * _ENTRY.itemsize])
        self.said, self.index = (
            files.enter_context((teacher.work / name).open("ab")) for name in (SAID_FILE, INDEX_FILE)
        )

    def add(
        self, count: int, places: Sequence[int], sequences: Sequence[PackedSequence], found: Sequence[NDArray[Any]]
    ) -> None:
        """Append one group of sequences.

        Args:
            count: how many sequences the group has.
            places: the places in the group of the sequences on which the base teaches.
            sequences: these sequences.
            found: their records.
        """
        entries = np.zeros(count, _ENTRY)
        for place, sequence, records in zip(places, sequences, found, strict=True):
            content = records.tobytes()
            entries[place] = len(records), _sum_of(torch.tensor(sequence.ids)), zlib.crc32(content)
            self.said.write(content)
            self.tokens += len(records)
        self.index.write(entries.tobytes())
        self.digest.update(entries.tobytes())
        self.sequences += count
        done = self.sequences == self.teacher.sequences
        if done or time.monotonic() - self.saved >= _SAVE_SECONDS:
            self._save(done)

    def _save(self, done: bool) -> None:
        """Flush both files to the disk, and save the state to continue from; `done`: every sequence is written."""
        for file in (self.said, self.index):
            file.flush()
            os.fsync(file.fileno())
        state = {
            "done": done,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "index": self.digest.hexdigest(),
            "mixture": self.teacher.mixture.state(),
        }
        write_signed(self.teacher.work / STATE_FILE, state)
        self.saved = time.monotonic()


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
