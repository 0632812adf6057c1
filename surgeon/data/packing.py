"""Packing of documents into sequences of one length: deterministic for a seed, resumable at every sequence.

A source is drawn in windows of one sequence, in random order, so that a run shorter than a pass sees many documents and
no step is filled by one. Whole windows are sequences of their own; short documents and the ends of long ones share
sequences. A source's position is the pass, the place in its order, the tokens used there, and which documents wait in a
sequence that is not full. So a checkpoint of the data is a few hundred bytes.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from surgeon.common.distributed import Ranks
from surgeon.data.documents import Corpus
from surgeon.errors import BadInput, printable

if TYPE_CHECKING:
    from torch import Tensor

    from surgeon.data.encoding import Encoded, Encoder

IGNORED_LABEL = -100
# In a batch: the numbers of its sequences among all that the run draws.
NUMBERS = "sequence_numbers"
# In a batch: whether the base alone teaches on a sequence, so that cross-entropy does not count it.
ALONE = "taught_alone"
Packing = Literal["isolated", "joined"]


@dataclass(frozen=True)
class PackedSequence:
    """Token ids, labels and positions (lists of the same length), and the number of their source's domain.

    `alone`: the base alone teaches on it, and cross-entropy does not count it.
    """

    ids: list[int]
    labels: list[int]
    positions: list[int]
    domain: int
    alone: bool = False

    @property
    def teaches(self) -> bool:
        """Whether it has a label that counts (the first token's never does)."""
        return any(label != IGNORED_LABEL for label in self.labels[1:])


class Packer:
    """A packer that cuts a run of documents into sequences of `length` tokens.

    A document that does not fit continues in the next sequence. `isolated`: positions begin at 0 with every document,
    which lets attention keep documents apart, and the first token of a document is not predicted from the document
    before. `joined`: documents follow each other as one text. `sequence` is the one that is not full yet.
    """

    def __init__(self, length: int, packing: Packing, domain: int, *, alone: bool = False) -> None:
        self.length = length
        self.packing = packing
        self.domain = domain
        self.alone = alone
        self.sequence = PackedSequence([], [], [], domain, alone)

    def another(self) -> Packer:
        """Return an empty packer of the same kind."""
        return Packer(self.length, self.packing, self.domain, alone=self.alone)

    @property
    def room(self) -> int:
        """The number of tokens that the current sequence can still take."""
        return self.length - len(self.sequence.ids)

    def add(self, encoded: Encoded, begin: int) -> int:
        """Add a document's tokens from token `begin` on, as many as fit; return how many."""
        ids, counted = (part[begin : begin + self.room] for part in encoded)
        labels = [token if count else IGNORED_LABEL for token, count in zip(ids, counted, strict=True)]
        first = len(self.sequence.ids)
        if self.packing == "isolated" and labels:
            first, labels[0] = 0, IGNORED_LABEL
        self.sequence.positions.extend(range(first, first + len(ids)))
        self.sequence.ids.extend(ids)
        self.sequence.labels.extend(labels)
        return len(ids)

    def filled(self, encoded: Encoded) -> Iterator[PackedSequence]:
        """Add a whole document; yield the sequences that it fills."""
        used = 0
        while used < len(encoded[0]):
            used += self.add(encoded, used)
            if not self.room:
                yield self.take()

    def take(self) -> PackedSequence:
        """Return the current sequence and begin the next one."""
        taken, self.sequence = self.sequence, PackedSequence([], [], [], self.domain, self.alone)
        return taken


_T = TypeVar("_T")


@dataclass(eq=False)
class Stream(ABC, Generic[_T]):
    """The endless sequences or examples of one source; every pass has a new random order.

    Resumable between any two items: the position is `epoch` (the pass), `position` (a place in the pass's order) and
    `used`. `used` counts tokens: for sequences the tokens taken at this place, for examples the tokens of all examples
    so far, without padding.
    """

    name: str
    documents: Corpus
    numbers: NDArray[np.int64]
    seed: int
    epoch: int = field(default=0, init=False)
    position: int = field(default=0, init=False)
    used: int = field(default=0, init=False)
    _order: NDArray[np.int64] | None = field(default=None, init=False)

    @abstractmethod
    def next(self) -> _T:
        """Return the next sequence or example."""

    @abstractmethod
    def amount(self) -> int:
        """Count the tokens, or examples, of one pass."""

    @abstractmethod
    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return what pass `epoch` draws, in its order: one row for each draw, documents by number."""

    def state(self) -> list[int]:
        """Return the position between two items."""
        return [self.epoch, self.position, self.used]

    def restore(self, state: Sequence[int]) -> None:
        """Go back to the position `state`, as `state()` returned it."""
        self.epoch, self.position, self.used = state[:3]
        self._order = None

    def _drawn(self) -> Any:
        """Return the row of the order at the position."""
        if self._order is None:
            self._order = self.order(self.epoch)
        return self._order[self.position]

    def _step(self) -> bool:
        """Advance to the next draw; return whether it is the first of a new pass."""
        assert self._order is not None, "`_drawn` comes first"
        self.position += 1
        if self.position < len(self._order):
            return False
        self.epoch, self.position, self._order = self.epoch + 1, 0, None
        return True


# A document is drawn in as many parts as it would have windows at this many bytes a token. Most tokenizers make fewer
# tokens, so most parts are one window or none.
_BYTES_A_TOKEN = 2
# Windows are shuffled among documents of about this many bytes, whose tokens are kept: so each document is tokenised
# once a pass, and the tokens kept take a few dozen MB.
_SHUFFLED_BYTES = 2**25


@dataclass(eq=False)
class SourceStream(Stream[PackedSequence]):
    """The endless sequences of one source.

    A draw is a part of a document: a window of the sequences' length, the document's shorter end, both, or nothing.
    """

    encoder: Encoder
    packer: Packer
    # The documents in the sequence that is not full: for each its number and the first of its tokens there.
    _waiting: list[int] = field(default_factory=list, init=False)
    # Tokens, and which count, of documents among which windows are shuffled; and the number of this group.
    _kept: dict[int, tuple[NDArray[np.int32], NDArray[np.bool_]]] = field(default_factory=dict, init=False)
    _group: int = field(default=0, init=False)

    def next(self) -> PackedSequence:
        """Return the next sequence with a label that counts. Raises BadInput where two passes have none."""
        passes = 0
        while True:
            number, begin, end = self._part(self._drawn())
            begin += self.used
            # A whole window is a sequence of its own, so that its context is not cut.
            packer = self.packer.another() if end - begin >= self.packer.length else self.packer
            if begin < end:
                if packer is self.packer:
                    self._waiting += [number, begin]
                taken = packer.add(self._tokens(number, begin, end), 0)
                self.used, begin = self.used + taken, begin + taken
            if begin >= end:
                self.used = 0
                passes += self._step()
            if not packer.room:
                sequence = packer.take()
                if packer is self.packer:
                    self._waiting.clear()
                if sequence.teaches:
                    return sequence
            if passes > 1 and not self.packer.sequence.teaches:
                raise BadInput(f"source {printable(self.name)}: the loss counts none of its tokens; look at its texts")

    def amount(self) -> int:
        """Count the tokens of one pass; every document is tokenised."""
        return sum(len(self.encoder.encode(self.documents.read(int(number)))[0]) for number in self.numbers)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the draws of pass `epoch`, (draws, 4): a document's number, which part of it, of how many, its group.

        Documents in random order form groups of about `_SHUFFLED_BYTES`; within a group the parts are in random order.
        """
        drawn = generator(self.seed, self.name, epoch)
        numbers = drawn.permutation(self.numbers)
        sizes = np.asarray(self.documents.rows.sizes, dtype=np.int64)[numbers]
        parts = np.maximum(1, -(-sizes // (_BYTES_A_TOKEN * self.packer.length)))
        groups = (np.cumsum(sizes) - sizes) // _SHUFFLED_BYTES
        which = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        draws = np.column_stack([np.repeat(column, parts) for column in (numbers, parts, parts, groups)])
        draws[:, 1] = which
        found: NDArray[np.int64] = draws[np.lexsort((drawn.random(len(draws)), draws[:, 3]))]
        return found

    def lengths(self) -> Iterator[tuple[int, float]]:
        """Yield the tokens and UTF-8 bytes of what is drawn, draw after draw and pass after pass."""
        for epoch in itertools.count():
            for draw in self.order(epoch):
                number, begin, end = self._part(draw)
                if begin < end:
                    share = (end - begin) / len(self._encoded(number)[0])
                    yield end - begin, share * self.documents.rows.sizes[number]

    def state(self) -> list[int]:
        """Return the position between two sequences, with the documents that wait in one that is not full."""
        return [*super().state(), *self._waiting]

    def restore(self, state: Sequence[int]) -> None:
        """Go back to the position `state`, as `state()` returned it."""
        super().restore(state)
        self.packer, self._waiting = self.packer.another(), list(state[3:])
        for number, begin in zip(self._waiting[::2], self._waiting[1::2], strict=True):
            self.packer.add(self._tokens(number, begin, None), 0)

    def _part(self, draw: Sequence[int]) -> tuple[int, int, int]:
        """Return the document's number, and begin and end (exclusive) in tokens of the part that `draw` names."""
        number, which, parts, group = (int(each) for each in draw)
        if group != self._group:
            self._kept.clear()
            self._group = group
        count = len(self._encoded(number)[0])
        windows = -(-count // self.packer.length)
        begin, end = (windows * nth // parts * self.packer.length for nth in (which, which + 1))
        return number, begin, min(end, count)

    def _encoded(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return a document's tokens, and which of them count; both are kept."""
        if number not in self._kept:
            ids, counted = self.encoder.encode(self.documents.read(number))
            self._kept[number] = np.array(ids, dtype=np.int32), np.array(counted, dtype=np.bool_)
        return self._kept[number]

    def _tokens(self, number: int, begin: int, end: int | None) -> Encoded:
        """Return a document's tokens from `begin` to `end` (exclusive; None: its end), and which of them count."""
        ids, counted = self._encoded(number)
        return ids[begin:end].tolist(), counted[begin:end].tolist()


def one_pass(stream: SourceStream, count: int) -> Iterator[PackedSequence]:
    """Yield a source's sequences: at most `count`, and at most those of one pass over its documents."""
    epoch = stream.epoch
    for _ in range(count):
        yield stream.next()
        if stream.epoch > epoch:
            return


class Mixture(Generic[_T]):
    """A mixture of several sources by their shares: the next item comes from the source furthest behind its share.

    `credits` are, by source, how far it is behind its share, in items. `taken` counts the items taken from each.
    """

    def __init__(self, streams: Sequence[Stream[_T]], shares: Sequence[float], *, seed: int) -> None:
        # Typed as Any because some callers with text mixtures access the streams' packers.
        self.streams: list[Any] = list(streams)
        total = sum(shares)
        self.shares = [share / total for share in shares]
        # The seed also determines the first source, so that runs with other seeds differ in it.
        self.credits = [float(credit) for credit in generator(seed, "mixture", 0).random(len(self.streams))]
        self.taken = [0] * len(self.streams)

    def next(self) -> _T:
        """Return the next sequence."""
        self.credits = [credit + share for credit, share in zip(self.credits, self.shares, strict=True)]
        owed = max((index for index, share in enumerate(self.shares) if share), key=lambda index: self.credits[index])
        self.credits[owed] -= 1
        self.taken[owed] += 1
        taken: _T = self.streams[owed].next()
        return taken

    def state(self) -> dict[str, Any]:
        """Return the position, as JSON data."""
        return {
            "credits": self.credits,
            "taken": self.taken,
            "sources": {stream.name: stream.state() for stream in self.streams},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to the position `state`, as `state()` returned it."""
        self.credits, self.taken = list(state["credits"]), list(state["taken"])
        for stream in self.streams:
            stream.restore(state["sources"][stream.name])


def batches(
    mixture: Mixture[_T],
    make: Callable[[Sequence[_T]], dict[str, Tensor]],
    *,
    micro_batch: int,
    ranks: Ranks,
) -> Iterator[dict[str, Tensor]]:
    """Yield a process's micro-batches, without end: its part of every `micro_batch` · `ranks.size` sequences.

    The key NUMBERS of a batch contains its sequences' numbers among all sequences that the mixture gave. Nothing is
    prefetched, so after a step the mixture's position is exactly behind that step's sequences.

    Args:
        mixture: gives the sequences.
        make: makes a batch of sequences.
        micro_batch: sequences of a batch.
        ranks: this process and the others.
    """
    import torch

    begin = ranks.rank * micro_batch
    while True:
        first = sum(mixture.taken) + begin
        taken = [mixture.next() for _ in range(micro_batch * ranks.size)]
        yield make(taken[begin : begin + micro_batch]) | {NUMBERS: torch.arange(first, first + micro_batch)}


def batch_of(sequences: Sequence[PackedSequence], *, domains: bool = True) -> dict[str, Tensor]:
    """Return a batch of int64 tensors: `input_ids`, `labels` and `position_ids`, of the shape (sequences, length).

    If `domains` is set, also `domain_ids` and ALONE (bool), of the shape (sequences).
    """
    import torch

    batch = {
        "input_ids": torch.tensor([sequence.ids for sequence in sequences]),
        "labels": torch.tensor([sequence.labels for sequence in sequences]),
        "position_ids": torch.tensor([sequence.positions for sequence in sequences]),
    }
    if domains:
        batch["domain_ids"] = torch.tensor([sequence.domain for sequence in sequences])
        batch[ALONE] = torch.tensor([sequence.alone for sequence in sequences])
    return batch


def held_out(
    documents: Corpus, numbers: Sequence[int], encoder: Encoder, packer: Packer, *, most: int
) -> list[PackedSequence]:
    """Return at most `most` full sequences from the documents `numbers`, in order; if none is full, a shorter one."""
    found: list[PackedSequence] = []
    for number in numbers:
        for full in packer.filled(encoder.encode(documents.read(int(number)))):
            if full.teaches:
                found.append(full)
            if len(found) == most:
                return found
    if not found and packer.sequence.teaches:
        found.append(packer.take())
    return found


def split(documents: Corpus, share: float, *, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (numbers to train on, numbers to hold out); the choice does not depend on the run's seed.

    With a `share` of 0 none is held out. Else at least one is held out and at least one is left. Raises BadInput for a
    single document.
    """
    count = len(documents)
    if not share:
        return np.arange(count), np.arange(0)
    if count < 2:
        raise BadInput(
            f"source {printable(name)} ({printable(documents.shown)}) has one document, so none can be held out;"
            " give `validation:` a file, or 0"
        )
    aside = min(count - 1, max(1, round(share * count)))
    order = generator(0, "held out", 0).permutation(count)
    return np.sort(order[aside:]), order[:aside]


def generator(seed: int, name: str, number: int) -> np.random.Generator:
    """Return a random generator for one purpose, derived from the run's seed, a name and a number."""
    digest = hashlib.sha256(f"{seed}/{name}/{number}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "little"))
