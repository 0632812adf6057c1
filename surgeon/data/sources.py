"""A source of a config, opened: files, a folder that `datasets` saved, or a dataset of the Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from surgeon.data.documents import Corpus, Documents
from surgeon.data.specs import SourceSpec, TextSpec
from surgeon.data.tables import HubDataset, is_saved, saved_table
from surgeon.errors import BadInput, printable


class Naming(Protocol):
    """A config that names sources: `source` is its file, `resolve` turns a path in it into one to open."""

    @property
    def source(self) -> Path:
        """The file, for errors."""

    def resolve(self, path: str) -> Path:
        """The path to open for one that the file names."""


@dataclass(frozen=True)
class OpenedSource:
    """The text; the held-out text where it is not a share of the text; the commit where it came from the Hub."""

    text: Corpus
    held_out: Corpus | None = None
    commit: str | None = None


def open_source(source: TextSpec, named_by: Naming) -> OpenedSource:
    """Open a source of `named_by` and read it through. Raises BadInput where it cannot be read or is empty."""
    key, chat = source.key, source.kind == "chat"
    aside: str | None = None
    held_out: Corpus | None = None
    if isinstance(source, SourceSpec):
        aside = source.validation_split
        if isinstance(source.validation, str) and aside is None:
            held_out = Documents(named_by.resolve(source.validation), key=key, chat=chat)
    if source.repo_id is not None:
        dataset = HubDataset(source.repo_id, config=source.config, revision=source.revision)
        text: Corpus = dataset.table(source.split, key=key, chat=chat)
        if aside is not None:
            held_out = dataset.table(aside, key=key, chat=chat)
        return OpenedSource(text, held_out, dataset.commit)
    path = named_by.resolve(source.path)
    if is_saved(path):
        text = saved_table(path, source.split, key=key, chat=chat)
        if aside is not None:
            held_out = saved_table(path, aside, key=key, chat=chat)
        return OpenedSource(text, held_out)
    if source.split is not None or aside is not None:
        named = "split" if source.split is not None else "validation: split:…"
        raise BadInput(
            f"{printable(str(named_by.source))}: source {source.name}: `{named}` is for datasets of the Hub and folders"
            f" that `datasets` saved, and {printable(str(path))} is neither; leave it out"
        )
    return OpenedSource(Documents(path, key=key, chat=chat), held_out)


@dataclass(frozen=True)
class HeldOut:
    """The documents of one source that are scored, by their numbers."""

    name: str
    documents: Corpus
    numbers: NDArray[np.int64]
