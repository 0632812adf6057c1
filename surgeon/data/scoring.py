"""Held-out documents as sequences, and a causal language model's scores on them: nats, right guesses, intervals.

Also a classification model's scores on examples: loss, accuracy, F1 and Matthews' correlation.

A document is one sequence where it fits, else it is cut into windows; it never sees another document. A mean over
tokens is a ratio of two sums over units (documents, or packed sequences), which are the sample. Tokens of one unit are
not independent, so the interval comes from the spread between units.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from surgeon.common.distributed import Ranks, is_sharded, summed
from surgeon.data.chats import Chat
from surgeon.data.encoding import Encoder
from surgeon.data.examples import Example, batch_of_examples
from surgeon.data.held_out import HeldOut
from surgeon.data.layouts import Document, Labelled, said_in
from surgeon.data.packing import IGNORED_LABEL, PackedSequence, batch_of
from surgeon.data.scores import Judged, Scores, Windows
from surgeon.errors import BadInput, printable
from surgeon.models.load import running

# Most bytes of one batch's logits.
_LOGITS_BYTES = 2**30
_ONE_PROCESS = Ranks()


def windows_of(source: HeldOut, encoder: Encoder, length: int) -> Windows:
    """Cut each document into windows of at most `length` tokens; windows overlap by one token.

    So every token but a document's first is predicted exactly once, only from the tokens of its window. Documents are
    not packed together: attention implementations that cannot keep them apart, and routers that average over a
    sequence, would let neighbours influence a document's score. Raises BadInput where no token counts.
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
    return Windows.of(pieces, nbytes, cut)


def _bytes(document: Document, ids: list[int], encoder: Encoder) -> int:
    """Count the bytes of the predicted text: of a chat's answers, or of a text without its first token.

    The first token is never predicted. If it is special (BOS), it has no bytes of the text.
    """
    assert not isinstance(document, Labelled), "a classifier's scores are `judge_examples`'"
    if isinstance(document, Chat):
        return sum(len(message.content.encode()) for message in document.messages if message.answers)
    tokenizer, (text,) = encoder.tokenizer, said_in(document)
    whole = len(text.encode())
    if not ids or ids[0] in tokenizer.all_special_ids:
        return whole
    if tokenizer.is_fast and not tokenizer.control_tokens(text):
        _, offsets = tokenizer.offsets(text)
        first = text[: offsets[0][1]] if offsets else ""
    else:
        first = tokenizer.decode(ids[:1])
    return max(0, whole - len(first.encode()))


@torch.no_grad()
def score_sequences(
    model: nn.Module,
    sequences: Sequence[PackedSequence],
    *,
    micro_batch: int,
    units: Sequence[NDArray[np.int64]] | None = None,
    unit_count: int = 0,
    beside: nn.Module | None = None,
    ranks: Ranks = _ONE_PROCESS,
    advance: Callable[[int], None] = lambda _sequences: None,
) -> Scores:
    """Run `model`, in eval mode, over `sequences`: `micro_batch` of the longest at a time, more of shorter ones.

    Fewer are run at a time where their logits would take more than 1 GiB. Only neighbours of equal length share a
    batch, so there is no padding. `units` gives for each sequence the unit of each token, (length,), out of
    `unit_count` units; None:
    every sequence is a unit. Cross-entropy is computed for the labels other than IGNORED_LABEL, in float32 over the
    model's logits, summed in float64, without auxiliary losses. With a model `beside`, KL(beside ‖ model) replaces
    cross-entropy, and a guess is right where both models guess the same token. Of several processes (`ranks`), each
    runs its share and all return the same scores. `advance` receives the number of sequences just completed.
    """
    sums = np.zeros((3, len(sequences) if units is None else unit_count))
    training = model.training
    model.eval()
    weight = next(model.parameters())
    device, lengths = weight.device, [len(sequence.ids) for sequence in sequences]
    vocabulary = int(getattr(model.config, "vocab_size", 1))
    most = _LOGITS_BYTES // max(1, max(lengths, default=1) * vocabulary * weight.element_size())
    for whole in _batches(lengths, max(1, min(micro_batch, most)), ranks.size):
        mine = whole[ranks.rank :: ranks.size]
        if mine:
            losses, right, counted = _by_token(model, [sequences[number] for number in mine], device, beside)
            for row, number in enumerate(mine):
                where = np.full(counted.shape[1], number) if units is None else units[number][1:]
                counts = counted[row]
                for total, values in zip(sums, (losses[row], counts, right[row]), strict=True):
                    np.add.at(total, where[counts], values[counts])
        elif is_sharded(model):
            # The other processes' forward pass needs this process's parameter shards.
            _by_token(model, [sequences[whole[0]]], device)
        advance(len(whole))
    # A unit's sequences may belong to several processes, so its sums are added over processes.
    sums = summed(sums, ranks.size, device)
    model.train(training)
    return Scores(sums[0], sums[1].astype(np.int64), sums[2].astype(np.int64))


def _batches(lengths: Sequence[int], micro_batch: int, processes: int) -> Iterator[range]:
    """Yield the ranges of sequences that all processes run together."""
    room = micro_batch * max(lengths, default=0)
    begin = 0
    for length, group in itertools.groupby(lengths):
        end = begin + len(list(group))
        step = room // length * processes
        for first in range(begin, end, step):
            yield range(first, min(first + step, end))
        begin = end


def _by_token(
    model: nn.Module, sequences: Sequence[PackedSequence], device: torch.device, beside: nn.Module | None = None
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return, for every token but a sequence's first, its loss, whether it was guessed right, and whether it counts."""
    batch = batch_of(sequences, domains=False)
    expected = batch.pop("labels")[:, 1:].to(device)
    given = {key: value.to(device) for key, value in batch.items()}
    counts = expected != IGNORED_LABEL
    # Logits of a large vocabulary take most of the time where few tokens count, as in a chat.
    columns = counts.any(dim=0).nonzero().flatten()
    logits = _logits(model, given, columns)
    others = expected[:, columns] if beside is None else _logits(beside, given, columns)
    losses = torch.zeros(counts.shape, dtype=torch.float64, device=device)
    right = torch.zeros_like(counts)
    # One sequence at a time, because float32 logits of a large vocabulary take the most memory.
    for number, (row, other) in enumerate(zip(logits, others, strict=True)):
        found = _nats(row, other) if beside is None else _apart(row, other)
        losses[number, columns], right[number, columns] = found
    return losses.cpu().numpy(), right.cpu().numpy(), counts.cpu().numpy()


def _logits(model: Any, given: Mapping[str, Tensor], columns: Tensor) -> Tensor:
    """Return the logits at some columns of a batch; most columns, or a model without `logits_to_keep`, take all."""
    with running(model):
        few = 2 * len(columns) < given["input_ids"].shape[1]
        if few and "logits_to_keep" in inspect.signature(model.forward).parameters:
            kept: Tensor = model(**given, use_cache=False, logits_to_keep=columns).logits
            return kept
        whole: Tensor = model(**given, use_cache=False).logits
        return whole[:, columns]


def _nats(logits: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each expected token of a sequence, and whether it was guessed right."""
    losses = F.cross_entropy(logits.float(), expected, ignore_index=IGNORED_LABEL, reduction="none")
    return losses.double(), logits.argmax(dim=-1) == expected


def _apart(logits: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(others ‖ logits) of each token of a sequence, and whether both models guess alike.

    Only the tokens in both vocabularies count.
    """
    words = min(logits.shape[-1], others.shape[-1])
    logits, others = logits[..., :words], others[..., :words]
    q, p = F.log_softmax(logits.float(), dim=-1), F.log_softmax(others.float(), dim=-1)
    apart = F.kl_div(q, p, reduction="none", log_target=True).sum(dim=-1)
    return apart.double(), logits.argmax(dim=-1) == others.argmax(dim=-1)


@torch.no_grad()
def judge_examples(
    model: nn.Module,
    examples: Sequence[Example],
    *,
    micro_batch: int,
    pad: int,
    ranks: Ranks = _ONE_PROCESS,
    advance: Callable[[int], None] = lambda _examples: None,
) -> Judged:
    """Run `model`, in eval mode, over `examples`, `micro_batch` of similar length at a time.

    Returns the results in the examples' order. Cross-entropy is in float32 over the model's logits, without auxiliary
    losses. Shorter examples are padded with the token id `pad`. Of several processes (`ranks`), each runs its share
    and all return the same result. `advance` receives the number of examples just completed.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    order = sorted(range(len(examples)), key=lambda number: len(examples[number].ids))
    sums = np.zeros((2, len(examples)))
    for begin in range(0, len(order), micro_batch * ranks.size):
        whole = order[begin : begin + micro_batch * ranks.size]
        mine = whole[ranks.rank :: ranks.size]
        # For a sharded model, the other processes' forward pass needs this process's parameter shards.
        if mine or is_sharded(model):
            batch = batch_of_examples([examples[number] for number in mine or whole[:1]], pad=pad)
            expected = batch.pop("labels").to(device)
            with running(model):
                logits = model(**{key: value.to(device) for key, value in batch.items()}).logits
            if mine:
                sums[0, mine] = F.cross_entropy(logits.float(), expected, reduction="none").double().cpu().numpy()
                sums[1, mine] = logits.argmax(dim=-1).cpu().numpy()
        advance(len(whole))
    sums = summed(sums, ranks.size, device)
    model.train(training)
    labels: Any = model.config.num_labels  # type: ignore[union-attr]
    return Judged(sums[0], sums[1].astype(np.int64), np.array([example.label for example in examples]), int(labels))
