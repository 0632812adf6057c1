"""Performance on tasks: what of each source is held out, and how well a model predicts it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.continual.config.loading import LoadedTasks
from surgeon.continual.config.schema import GeneralSource, TaskSource
from surgeon.continual.config.settings import training_of
from surgeon.continual.metrics import Measured
from surgeon.data.documents import Documents
from surgeon.data.encoding import Encoder
from surgeon.data.packing import PackedSequence, Packer, held_out, split
from surgeon.data.scoring import score
from surgeon.errors import BadInput, printable
from surgeon.families.dissect import dissect
from surgeon.models.load import load_model

_MICRO_BATCH = 8


class Measure:
    """What performance is measured on, by task and by general source; every text is opened and checked here."""

    def __init__(self, loaded: LoadedTasks, base: CheckpointFolder) -> None:
        """Raises BadInput for a text that is not as it must be, of whatever task, and for a base without tokenizer."""
        config = loaded.config
        self.notes: list[str] = []
        self._opened: dict[tuple[str, str | None, bool], Documents] = {}
        # Each source by itself: sequences that are scored together are of one length.
        self._held: dict[str, list[list[PackedSequence]]] = {}
        encoder = Encoder(base.path, vocabulary=dissect(base.config, base.tensors, base.own).sizes.vocabulary)
        sources: list[TaskSource | GeneralSource] = [*config.general]
        sources += [source for task in config.tasks for source in task.sources]
        if any(source.kind == "chat" for source in sources):
            encoder.check_chat()
        for number, task in enumerate(config.tasks):
            length = training_of(config, number).length or _context(base)
            for name, source, _ in task.named_sources():
                documents = self._documents(loaded, source, source.path)
                if documents.blank:
                    self.notes.append(f"source {name}: {documents.blank} blank documents are left out")
                if isinstance(source.validation, str):
                    measured = self._documents(loaded, source, source.validation)
                    numbers: Iterable[int] = range(len(measured))
                else:
                    measured = documents
                    numbers = split(documents, source.validation, name=name)[1]
                if source.role == "task":
                    self._hold(loaded, task.name, name, measured, numbers, encoder, length)
        for general in config.general:
            documents = self._documents(loaded, general, general.path)
            length = config.train.length or _context(base)
            self._hold(loaded, general.name, general.name, documents, range(len(documents)), encoder, length)

    def _documents(self, loaded: LoadedTasks, source: TaskSource | GeneralSource, path: str) -> Documents:
        chat = source.kind == "chat"
        key = source.field
        if (path, key, chat) not in self._opened:
            self._opened[path, key, chat] = Documents(loaded.resolve(path), key=key, chat=chat)
        return self._opened[path, key, chat]

    def _hold(
        self,
        loaded: LoadedTasks,
        where: str,
        name: str,
        documents: Documents,
        numbers: Iterable[int],
        encoder: Encoder,
        length: int,
    ) -> None:
        packer = Packer(length, loaded.config.train.packing or "isolated", 0)
        sequences = held_out(documents, list(numbers), encoder, packer, most=loaded.config.validation_sequences)
        if not sequences:
            raise BadInput(
                f"{printable(str(loaded.source))}: the held-out part of source {name} has fewer than two tokens"
            )
        self._held.setdefault(where, []).append(sequences)

    def identity(self) -> list[Any]:
        """Name, size and mtime of every file of every source."""
        return [[path, key, documents.identity()] for (path, key, _), documents in self._opened.items()]

    def of(
        self,
        folder: Path,
        names: Iterable[str],
        *,
        device: str,
        attention: str | None,
        trust_remote_code: bool,
        advance: Callable[[int], None],
    ) -> dict[str, Measured]:
        """The checkpoint's performance on the named tasks and general sources. `advance` counts the sequences done."""
        model = load_model(
            CheckpointFolder.open(folder, trust_remote_code=trust_remote_code), device=device, attention=attention
        )
        found: dict[str, Measured] = {}
        for name in names:
            scores = [score(model, each, micro_batch=_MICRO_BATCH, advance=advance) for each in self._held[name]]
            found[name] = Measured(
                sum(int(each.tokens.sum()) for each in scores),
                sum(int(each.right.sum()) for each in scores),
                sum(float(each.nats.sum()) for each in scores),
            )
        return found

    def sequences(self, names: Iterable[str]) -> int:
        """How many sequences that is, for a progress bar."""
        return sum(len(each) for name in names for each in self._held[name])


def _context(base: CheckpointFolder) -> int:
    context = base.config.get("max_position_embeddings")
    return min(context, 2048) if isinstance(context, int) else 2048
