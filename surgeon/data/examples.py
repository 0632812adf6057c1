"""Labelled texts as classification examples: tokens, and the label's number. Each text is one sequence.

Their streams are those of `packing`, so a mixture of them is resumable at every example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from surgeon.checkpoint.labels import label_names
from surgeon.data.documents import Corpus
from surgeon.data.layouts import Labelled
from surgeon.data.packing import Stream, generator
from surgeon.errors import BadInput, printable
from surgeon.models.tokenizer import Tokenizer
from surgeon.models.tokens import check_ids

if TYPE_CHECKING:
    from torch import Tensor

# Two words for which any tokenizer has tokens.
_FIRST, _SECOND = "one", "two"
_MOST_NAMED = 20


@dataclass(frozen=True)
class Example:
    """Token ids, for each the number of its text (0 or 1; None: the model does not use it), and the label's number."""

    ids: list[int]
    types: list[int] | None
    label: int


class ExampleEncoder:
    """An encoder of examples with at most `length` tokens, by a checkpoint's tokenizer and its head's labels."""

    def __init__(self, tokenizer: Tokenizer, config: Mapping[str, Any], *, length: int, vocabulary: int) -> None:
        """Store the settings: `config` is the checkpoint's config.json; token ids beyond `vocabulary` are refused."""
        self.tokenizer = tokenizer
        self.length = length
        self.vocabulary = vocabulary
        self.labels = label_names(config)
        pad = config.get("pad_token_id")
        # Where config.json names no padding token, only the mask marks padding.
        self.pad = pad if type(pad) is int and pad >= 0 else 0
        types = config.get("type_vocab_size")
        self.types = type(types) is int and types > 1
        self._joins: bool | None = None

    def encode(self, document: Labelled, name: str) -> Example:
        """Encode one document of the source `name`. Raises BadInput for an unknown label or an unusable text pair."""
        number = self.number_of(document, name)
        ids, types = self.tokenizer.example(document.text, document.pair, self.length)
        check_ids(ids, self.tokenizer, rows=self.vocabulary)
        if not ids:
            raise BadInput(
                f"source {printable(name)}: the tokenizer makes no token of the text"
                f" {printable(repr(document.text), 40)}; remove it"
            )
        return Example(ids, types if self.types else None, number)

    def number_of(self, document: Labelled, name: str) -> int:
        """Return the number of a document's label: a name's position among the head's labels, or the number itself.

        Raises BadInput for a label that the head lacks, and for a pair that the tokenizer cannot join.
        """
        if document.pair is not None:
            self._check_pairs(name)
        label = document.label
        if isinstance(label, str) and label in self.labels:
            return self.labels.index(label)
        if isinstance(label, int) and 0 <= label < len(self.labels):
            return label
        known = ", ".join(printable(each, 40) for each in self.labels[:_MOST_NAMED])
        raise BadInput(
            f"source {printable(name)}: the label {printable(repr(label), 40)} is none of the model's ({known});"
            " correct it, or give the base a head for the labels of your data"
        )

    def _check_pairs(self, name: str) -> None:
        """Raise BadInput where the tokenizer puts no separator between two texts: no model could tell them apart."""
        if self._joins is None:
            ids, types = self.tokenizer.example(_FIRST, _SECOND, 2**16)
            alone = {token for text in (_FIRST, _SECOND) for token in self.tokenizer.ids(text, special=False)}
            special = set(self.tokenizer.all_special_ids) - alone
            words = [place for place, token in enumerate(ids) if token not in special]
            between = words and any(ids[place] in special for place in range(words[0], words[-1]))
            self._joins = bool(between) or (self.types and len(set(types)) > 1)
        if not self._joins:
            raise BadInput(
                f"source {printable(name)}: has a `text_pair`, and the tokenizer of"
                f" {printable(str(self.tokenizer.folder))} puts nothing between two texts; join them yourself in"
                " `text`, or use a base whose tokenizer takes pairs"
            )


@dataclass(eq=False)
class ExampleStream(Stream[Example]):
    """The endless examples of one source; `labels` counts its documents with each label, by the label's number."""

    encoder: ExampleEncoder
    labels: Counter[int] = field(init=False)

    def __post_init__(self) -> None:
        """Look at each label. Raises BadInput for an unknown one, and for a pair that the tokenizer cannot join."""
        documents = (labelled(self.documents, int(number)) for number in self.numbers)
        self.labels = Counter(self.encoder.number_of(document, self.name) for document in documents)

    def next(self) -> Example:
        """Return the next example."""
        found = example_at(self.documents, int(self._drawn()), self.encoder, self.name)
        self.used += len(found.ids)
        self._step()
        return found

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of the documents in the order of pass `epoch`."""
        found: NDArray[np.int64] = generator(self.seed, self.name, epoch).permutation(self.numbers)
        return found

    def amount(self) -> int:
        """Count the examples of one pass."""
        return len(self.numbers)


def example_at(documents: Corpus, number: int, encoder: ExampleEncoder, name: str) -> Example:
    """Make an example of one document of the source `name`. Raises BadInput as `ExampleEncoder.encode` does."""
    return encoder.encode(labelled(documents, number), name)


def labelled(documents: Corpus, number: int) -> Labelled:
    """Return document `number` of a source of labelled texts."""
    document = documents.read(number)
    assert isinstance(document, Labelled)
    return document


def batch_of_examples(examples: Sequence[Example], *, pad: int) -> dict[str, Tensor]:
    """Return a batch of int64 tensors: `input_ids`, `attention_mask`, `token_type_ids` if used, and `labels`.

    `labels` has the shape (examples), the others (examples, longest). Shorter examples are padded at the end.
    """
    import torch

    longest = max(len(example.ids) for example in examples)

    def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
        """Return rows as a tensor (examples, longest), filled up with `value` at the end."""
        return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])

    batch = {
        "input_ids": padded([example.ids for example in examples], pad),
        "attention_mask": padded([[1] * len(example.ids) for example in examples], 0),
        "labels": torch.tensor([example.label for example in examples]),
    }
    types = [example.types for example in examples if example.types is not None]
    if types:
        batch["token_type_ids"] = padded(types, 0)
    return batch
