"""Measure performance on tasks: how well a model predicts the held-out part of each source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from surgeon import (
    Checkpoint,
    SourceSpec,
    TextSpec,
    Windows,
    held_out_text,
    open_checkpoint,
    open_source,
    pack,
    score,
    text_files,
)
from surgeon.common.files import file_digests
from surgeon.common.schema import ORIGINAL
from surgeon.errors import BadInput, printable
from surgeon.lab.courses.config.loading import LoadedTasks, every_text, own_sources, texts_of, training_of
from surgeon.lab.courses.metrics import Measured

_MICRO_BATCH = 8
# The largest length of sequences where no length is given.
_LONGEST = 2048


class Measure:
    """The held-out texts of a continual run, by task and by general source; all texts are opened and checked here."""

    def __init__(self, loaded: LoadedTasks, base: Checkpoint) -> None:
        """Open all texts of all tasks. Raises BadInput for an invalid text, and for a base without tokenizer."""
        config = loaded.config
        self.notes: list[str] = []
        self._loaded, self._base = loaded, base
        self._held: dict[str, list[Windows]] = {}
        longest = min(base.context or _LONGEST, _LONGEST)
        for number, task in enumerate(config.tasks):
            length = training_of(config, number).length or longest
            for source in own_sources(config, number):
                if source.role == ORIGINAL:
                    open_source(source, loaded)
                else:
                    self._hold(task.name, source, length)
        for general in texts_of(config.general):
            self._hold(general.name, general, config.train.length or longest)
        for memory in texts_of(config.memory):
            open_source(memory, loaded)

    def _hold(self, name: str, source: TextSpec, length: int) -> None:
        """Keep the held-out part of a source, in sequences of `length` tokens, for the task or general source `name`.

        Raises BadInput for a text that is not valid, or has fewer than two tokens.
        """
        text = held_out_text(source, self._loaded, say=self.notes.append)
        if text is None:
            return
        config = self._loaded.config
        packing, most = config.train.packing or "isolated", config.validation_sequences
        (windows,) = pack([text], self._base, length=length, packing=packing, most=most).values()
        if not len(windows):
            raise BadInput(
                f"{printable(str(self._loaded.source))}: the held-out part of source {source.name} has fewer"
                " than two tokens"
            )
        self._held.setdefault(name, []).append(windows)

    def identity(self) -> list[Any]:
        """Return the content of every source, and how it is read."""
        found = []
        for _, text in every_text(self._loaded.config):
            # A task's source may have a held-out file of its own instead of a share.
            held_out = text.validation if isinstance(text, SourceSpec) else None
            files = [self._content(path) for path in (text.path, held_out) if isinstance(path, str)]
            found.append([text.reading, files])
        return found

    def _content(self, path: str) -> str | list[str]:
        """Return the digests of a text's files; for a dataset on the Hub its name."""
        if path.startswith(("dataset:", "split:")):
            return path
        return file_digests(text_files(self._loaded.resolve(path)))

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
        """Return the checkpoint's performance on the named tasks and general sources.

        Args:
            folder: The checkpoint.
            names: Tasks and general sources.
            device: A torch device.
            attention: The attention implementation; None: transformers' choice.
            trust_remote_code: Whether the checkpoint's own code may run.
            advance: Receives how many sequences are done.

        Returns:
            Sums over tokens, by name.

        Raises:
            BadInput: The checkpoint cannot be loaded.
        """
        model = open_checkpoint(folder, trust_remote_code=trust_remote_code).load(device=device, attention=attention)
        found: dict[str, Measured] = {}
        for name in names:
            scores = [score(model, each, batch=_MICRO_BATCH, advance=advance) for each in self._held[name]]
            found[name] = Measured(
                sum(int(each.tokens.sum()) for each in scores),
                sum(int(each.right.sum()) for each in scores),
                sum(float(each.nats.sum()) for each in scores),
            )
        return found

    def sequences(self, names: Iterable[str]) -> int:
        """Return how many sequences measuring these names takes, for a progress bar."""
        return sum(len(each) for name in names for each in self._held[name])
