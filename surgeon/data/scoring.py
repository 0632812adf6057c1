"""Held-out documents as sequences, and a causal language model's scores on them: nats, right guesses, intervals.

A document is whole where it fits, else cut into windows, and never sees another.
A mean over tokens is a ratio of two sums over units (documents, or packed sequences), which are sampled; tokens of one
unit are not independent, so the interval comes from the spread between units.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from surgeon.common.distributed import is_sharded
from surgeon.data.encoding import Encoder
from surgeon.data.layouts import Document, Labelled
from surgeon.data.packing import IGNORED_LABEL, PackedSequence, batch_of
from surgeon.data.sources import HeldOut
from surgeon.errors import BadInput, printable
from surgeon.models.load import running

# Confidence level of all intervals.
CONFIDENCE = 0.95

# Most bytes of one batch's logits.
_LOGITS_BYTES = 2**30


@dataclass(frozen=True)
class Windows:
    """A source's sequences, longest first, and for each token its document's number (a unit of `scores`).

    `nbytes` (documents,) are the UTF-8 bytes of the counted tokens of a document; `cut` counts documents
    that are longer than a window.
    """

    sequences: list[PackedSequence]
    units: list[NDArray[np.int64]]
    nbytes: NDArray[np.int64]
    cut: int

    def same_tokens(self, other: Windows) -> bool:
        """Whether both are the same tokens of the same documents."""
        return self.sequences == other.sequences


def windows_of(source: HeldOut, encoder: Encoder, length: int) -> Windows:
    """Cut each document into windows of at most `length` tokens, each beginning with the last token of the one before.

    So every token but a document's first is predicted exactly once, from the tokens of its window alone.
    Documents are not packed together: attention implementations that cannot keep them apart, and routers that average
    over a sequence, would score a document by its neighbours. Raises BadInput where no token counts.
    """
    pieces: list[tuple[PackedSequence, NDArray[np.int64]]] = []
    nbytes = np.zeros(len(source.numbers), dtype=np.int64)
    cut = counted_tokens = 0
    for place, number in enumerate(source.numbers):
        document = source.documents.read(int(number))
        ids, counted = encoder.encode(document)
        nbytes[place] = _bytes(document, ids, encoder)
        counted_tokens += sum(counted[1:])
        cut += len(ids) > length
        labels = [token if count else IGNORED_LABEL for token, count in zip(ids, counted, strict=True)]
        for begin in range(0, len(ids) - 1, length - 1):
            end = min(begin + length, len(ids))
            window = PackedSequence(ids[begin:end], labels[begin:end], list(range(end - begin)), 0)
            pieces.append((window, np.full(end - begin, place)))
    if not counted_tokens:
        raise BadInput(f"source {printable(source.name)}: none of its tokens counts; its documents are too short")
    pieces.sort(key=lambda piece: -len(piece[0].ids))
    return Windows([sequence for sequence, _ in pieces], [units for _, units in pieces], nbytes, cut)


def _bytes(document: Document, ids: list[int], encoder: Encoder) -> int:
    """Count the bytes of the predicted text: a chat's assistant words; a text, less its first token without a BOS."""
    assert not isinstance(document, Labelled), "a classifier's scores are classification_metrics'"
    if not isinstance(document, str):
        return sum(len(message.content.encode()) for message in document.messages if message.answers)
    tokenizer = encoder.tokenizer
    whole = len(document.encode())
    if not ids or ids[0] in tokenizer.all_special_ids:
        return whole
    if tokenizer.is_fast:
        _, offsets = tokenizer.offsets(document)
        first = document[: offsets[0][1]] if offsets else ""
    else:
        first = tokenizer.decode(ids[:1])
    return max(0, whole - len(first.encode()))


@dataclass(frozen=True)
class Ratio:
    """A mean over tokens (or bytes) and its 95 % confidence interval; None where there is only one unit."""

    value: float
    interval: tuple[float, float] | None

    def map(self, function: Callable[[float], float]) -> Ratio:
        """Apply an increasing function to the value and to both ends of its interval."""
        ends = None if self.interval is None else (function(self.interval[0]), function(self.interval[1]))
        return Ratio(function(self.value), ends)


@dataclass(frozen=True)
class Scores:
    """Sums of each unit of one source: `nats` of the tokens counted, how many these are, how many were guessed right.

    A token is guessed right where its logit is the largest (greedy decoding's choice). All of shape (units,).
    """

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]
    right: NDArray[np.int64]

    @property
    def loss(self) -> float:
        """Mean cross-entropy, nats a token."""
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def loss_ratio(self) -> Ratio:
        """The same with its interval."""
        return ratio(self.nats, self.tokens)

    @property
    def perplexity(self) -> Ratio:
        """exp of the mean loss (infinite where a float cannot hold it)."""
        return self.loss_ratio.map(exp)

    @property
    def accuracy(self) -> Ratio:
        """Share of the tokens that were guessed right."""
        return ratio(self.right, self.tokens)


@torch.no_grad()
def score(
    model: nn.Module,
    sequences: Sequence[PackedSequence],
    *,
    micro_batch: int,
    units: Sequence[NDArray[np.int64]] | None = None,
    unit_count: int = 0,
    process: int = 0,
    processes: int = 1,
    advance: Callable[[int], None] = lambda _sequences: None,
) -> Scores:
    """Run `model`, in eval mode, over `sequences`: `micro_batch` of the longest at a time, of shorter ones more.

    Fewer go at a time where their logits would take more than 1 GiB.

    Only neighbours of equal length share a batch, so nothing is padded. `units` says to which of `unit_count` units
    each token of a sequence belongs, (length,) each; None: every sequence is a unit of its own. Cross-entropy is of the
    labels that count, in float32 over the model's logits, summed in float64, without auxiliary losses. With
    `processes`, each runs its share and all return the same scores. `advance` receives how many sequences are done.
    """
    sums = np.zeros((3, len(sequences) if units is None else unit_count))
    training = model.training
    model.eval()
    weight = next(model.parameters())
    device, lengths = weight.device, [len(sequence.ids) for sequence in sequences]
    vocabulary = int(getattr(model.config, "vocab_size", 1))
    most = _LOGITS_BYTES // max(1, max(lengths, default=1) * vocabulary * weight.element_size())
    for whole in _batches(lengths, max(1, min(micro_batch, most)), processes):
        mine = whole[process::processes]
        if mine:
            losses, right, counted = _by_token(model, [sequences[number] for number in mine], device)
            for row, number in enumerate(mine):
                where = np.full(counted.shape[1], number) if units is None else units[number][1:]
                counts = counted[row]
                for total, values in zip(sums, (losses[row], counts, right[row]), strict=True):
                    np.add.at(total, where[counts], values[counts])
        elif is_sharded(model):
            # The others' forward needs this process's shares.
            _by_token(model, [sequences[whole[0]]], device)
        advance(len(whole))
    if processes > 1:
        # A unit may lie in several processes' sequences; its sums are the sums over processes.
        together = torch.from_numpy(sums).to(device if device.type == "cuda" else "cpu")
        torch.distributed.all_reduce(together)
        sums = together.cpu().numpy()
    model.train(training)
    return Scores(sums[0], sums[1].astype(np.int64), sums[2].astype(np.int64))


def _batches(lengths: Sequence[int], micro_batch: int, processes: int) -> Iterator[range]:
    """Yield the sequences that all processes run together."""
    room = micro_batch * max(lengths, default=0)
    begin = 0
    for length, group in itertools.groupby(lengths):
        end = begin + len(list(group))
        step = room // length * processes
        for first in range(begin, end, step):
            yield range(first, min(first + step, end))
        begin = end


def _by_token(
    model: nn.Module, sequences: Sequence[PackedSequence], device: torch.device
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return for every token but a sequence's first its loss, whether it was guessed right, whether it counts."""
    batch = batch_of(sequences, domains=False)
    expected = batch.pop("labels")[:, 1:].to(device)
    with running(model):
        logits = model(**{key: value.to(device) for key, value in batch.items()}, use_cache=False).logits
    losses: list[Tensor] = []
    right: list[Tensor] = []
    # One sequence after the other: float32 logits of a large vocabulary take the most memory.
    for row, labels in zip(logits[:, :-1], expected, strict=True):
        losses.append(F.cross_entropy(row.float(), labels, ignore_index=IGNORED_LABEL, reduction="none"))
        right.append(row.argmax(dim=-1) == labels)
    return _array(torch.stack(losses).double()), _array(torch.stack(right)), _array(expected != IGNORED_LABEL)


def _array(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.cpu().numpy()
    return array


def ratio(sums: NDArray[Any], counts: NDArray[Any]) -> Ratio:
    """Return Σ sums / Σ counts over units, with the interval of the ratio estimator (Cochran, Sampling Techniques 6.3).

    With R the ratio and rᵢ = sumᵢ − R · countᵢ, se² = n / (n − 1) · Σ rᵢ² / (Σ counts)², and the interval is R ± t · se
    with Student's t of n − 1 degrees of freedom. Preferred to a bootstrap over units, whose first-order approximation
    it is, because it needs no random draws, costs nothing, and for few units is less too narrow than percentiles.
    """
    value = _mean(sums, counts)
    return Ratio(value, _interval(value, _influence(sums, counts)))


def difference(sums: NDArray[Any], counts: NDArray[Any], others: NDArray[Any], other_counts: NDArray[Any]) -> Ratio:
    """How much the ratio of `sums` to `counts` lies above that of the others, on the same units, paired.

    What makes a unit hard for both models cancels: the interval is that of the differences of the units' influences.
    """
    value = _mean(sums, counts) - _mean(others, other_counts)
    return Ratio(value, _interval(value, _influence(sums, counts) - _influence(others, other_counts)))


def _mean(sums: NDArray[Any], counts: NDArray[Any]) -> float:
    return float(sums.sum()) / total if (total := float(counts.sum())) else math.nan


def _influence(sums: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.float64]:
    # Losses may be infinite or NaN; then the intervals are too.
    with np.errstate(invalid="ignore"):
        found: NDArray[np.float64] = (sums - _mean(sums, counts) * counts) / max(counts.sum(), 1)
    return found


def _interval(value: float, influence: NDArray[np.float64]) -> tuple[float, float] | None:
    units = len(influence)
    if units < 2:
        return None
    from scipy.special import stdtrit

    error = math.sqrt(units / (units - 1) * float((influence**2).sum()))
    reach = float(stdtrit(units - 1, (1 + CONFIDENCE) / 2)) * error
    return float(value - reach), float(value + reach)


def exp(value: float) -> float:
    """Return e to the power of `value`; infinite where a float cannot hold that."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
