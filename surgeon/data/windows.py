"""Documents as sequences to score: whole where they fit, else in windows; one document never sees another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surgeon.data.documents import Document
from surgeon.data.encoding import Encoder
from surgeon.data.packing import IGNORED_LABEL, PackedSequence
from surgeon.data.sources import HeldOut
from surgeon.errors import BadInput, printable
from surgeon.models.load import quiet_transformers


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


def windows_of(held: HeldOut, encoder: Encoder, length: int) -> Windows:
    """Cut each document into windows of at most `length` tokens, each beginning with the last token of the one before.

    So every token but a document's first is predicted exactly once, from the tokens of its window alone.
    Documents are not packed together: attention implementations that cannot keep them apart, and routers that average
    over a sequence, would score a document by its neighbours. Raises BadInput where no token counts.
    """
    pieces: list[tuple[PackedSequence, NDArray[np.int64]]] = []
    nbytes = np.zeros(len(held.numbers), dtype=np.int64)
    cut = counted_tokens = 0
    for place, number in enumerate(held.numbers):
        document = held.documents.read(int(number))
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
        raise BadInput(f"source {printable(held.name)}: none of its tokens counts; its documents are too short")
    pieces.sort(key=lambda piece: -len(piece[0].ids))
    return Windows([sequence for sequence, _ in pieces], [units for _, units in pieces], nbytes, cut)


def _bytes(document: Document, ids: list[int], encoder: Encoder) -> int:
    """Bytes of the predicted text: a chat's assistant words; a text, without its first token where no BOS is there."""
    if not isinstance(document, str):
        return sum(len(message.content.encode()) for message in document if message.role == "assistant")
    tokenizer = encoder.tokenizer
    whole = len(document.encode())
    if not ids or ids[0] in tokenizer.all_special_ids:
        return whole
    with quiet_transformers():
        if tokenizer.is_fast:
            offsets = tokenizer(document, return_offsets_mapping=True, verbose=False)["offset_mapping"]
            first = document[: offsets[0][1]] if offsets else ""
        else:
            first = tokenizer.decode(ids[:1])
    return max(0, whole - len(first.encode()))
