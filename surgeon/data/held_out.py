"""The documents of a source on which losses are measured: a whole text, or the part that training holds out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from surgeon.data.documents import Corpus
from surgeon.data.packing import generator, split
from surgeon.data.sources import Naming, open_source
from surgeon.data.specs import SourceSpec, TextSpec


@dataclass(frozen=True)
class HeldOut:
    """The scored documents of one source, by their numbers.

    `template` is the chat template for a model that has none; None: such a model is refused.
    """

    name: str
    documents: Corpus
    numbers: NDArray[np.int64]
    template: str | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def sample(self, most: int) -> HeldOut:
        """Return a fixed random choice of at most `most` documents, in their original order."""
        drawn = generator(0, "evaluated", 0).permutation(len(self))[:most]
        return replace(self, numbers=self.numbers[np.sort(drawn)])


def held_out_text(
    source: TextSpec,
    named_by: Naming,
    *,
    template: str | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> HeldOut | None:
    """Open a source and return the documents on which losses are measured.

    Args:
        source: A text, which is measured whole, or a training source, of which `train` holds out the same documents for
            every seed.
        named_by: The file that names the source; relative paths start there.
        template: The chat template for a model that has none.
        say: Receives a line about blank documents, or one on why there is nothing to measure.

    Returns:
        The documents, or None where a training source holds none out, or where the model will write its text.

    Raises:
        BadInput: The text cannot be read.
    """
    numbers = None
    if isinstance(source, SourceSpec):
        why_not = "the training config holds none of it out" if not source.validation else ""
        if source.validation and source.generate is not None:
            why_not = "the model writes it itself; `surgeon recall` makes a file of it"
        if why_not:
            say(f"source {source.name}: skipped, because {why_not}")
            return None
    opened = open_source(source, named_by)
    documents = opened.held_out or opened.text
    for note in documents.rows.notes():
        say(f"source {source.name}: {note}")
    if isinstance(source, SourceSpec) and isinstance(source.validation, float):
        _, numbers = split(documents, source.validation, name=source.name)
    return HeldOut(source.name, documents, np.arange(len(documents)) if numbers is None else numbers, template)
