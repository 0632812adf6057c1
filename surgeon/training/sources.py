"""A source of the config, opened: files, a folder that `datasets` saved, or a dataset of the Hub."""

from __future__ import annotations

from dataclasses import dataclass

from surgeon.errors import BadInput, printable
from surgeon.training.config import LoadedConfig, SourceSpec
from surgeon.training.documents import Corpus, Documents
from surgeon.training.tables import HubDataset, is_saved, saved_table


@dataclass(frozen=True)
class OpenedSource:
    """What trains, what is held out where that is no share of it, and the commit where it came from the Hub."""

    training: Corpus
    held_out: Corpus | None = None
    commit: str | None = None


def open_source(source: SourceSpec, loaded: LoadedConfig) -> OpenedSource:
    """Open and look through a source of `loaded`. Raises BadInput."""
    key, chat = source.key, source.kind == "chat"
    aside = source.validation_split
    held_out: Corpus | None = None
    if isinstance(source.validation, str) and aside is None:
        held_out = Documents(loaded.resolve(source.validation), key=key, chat=chat)
    if source.repo_id is not None:
        dataset = HubDataset(source.repo_id, config=source.config, revision=source.revision)
        training: Corpus = dataset.table(source.split, key=key, chat=chat)
        if aside is not None:
            held_out = dataset.table(aside, key=key, chat=chat)
        return OpenedSource(training, held_out, dataset.commit)
    path = loaded.resolve(source.path)
    if is_saved(path):
        training = saved_table(path, source.split, key=key, chat=chat)
        if aside is not None:
            held_out = saved_table(path, aside, key=key, chat=chat)
        return OpenedSource(training, held_out)
    if source.split is not None or aside is not None:
        named = "split" if source.split is not None else "validation: split:…"
        raise BadInput(
            f"{printable(str(loaded.source))}: source {source.name}: `{named}` is for datasets of the Hub and folders"
            f" that `datasets` saved, and {printable(str(path))} is neither; leave it out"
        )
    return OpenedSource(Documents(path, key=key, chat=chat), held_out)
