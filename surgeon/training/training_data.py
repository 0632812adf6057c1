"""The opened sources of a run: a mixture of documents to train on, by shares, and held-out sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surgeon.common.schema import ORIGINAL
from surgeon.data.documents import Corpus
from surgeon.data.encoding import Encoder
from surgeon.data.packing import Mixture, Stream, split
from surgeon.data.sources import OpenedSource, open_source
from surgeon.data.specs import SourceSpec
from surgeon.errors import BadInput, printable
from surgeon.models.templates import MARKS, unknown_marks
from surgeon.training.config.settings import Settings
from surgeon.training.places import memory_folder, written_source
from surgeon.training.run import Prepared, TrainingData

# The most held-out sequences of a source that are evaluated where the config does not say how many.
MOST_HELD = 64


@dataclass
class _Drawn:
    """A count of the tokens and bytes drawn from a source; `lengths` yields each document's tokens and bytes."""

    lengths: Iterator[tuple[int, int]]
    tokens: int = 0
    nbytes: int = 0
    last: tuple[int, int] = (1, 0)

    def upto(self, tokens: float) -> float:
        """Return the bytes of the first `tokens` tokens; calls must not ask for fewer tokens than before."""
        while self.tokens < tokens:
            count, nbytes = next(self.lengths)
            self.last = max(1, count), nbytes
            self.tokens, self.nbytes = self.tokens + self.last[0], self.nbytes + self.last[1]
        return self.nbytes - self.last[1] * (self.tokens - tokens) / self.last[0]

    @property
    def tokens_a_byte(self) -> float:
        """The mean tokens per byte of the documents that were drawn."""
        return self.tokens / max(1, self.nbytes)


def open_data(prepared: Prepared, say: Callable[[str], None], imagined: Mapping[str, Corpus]) -> TrainingData:
    """Open every source of the config.

    Args:
        prepared: the run.
        say: receives lines for the user.
        imagined: by source, stand-ins for texts that the model has yet to write.

    Raises:
        BadInput: a source cannot be read, holds out too little, or has nothing to learn.
    """
    loaded, objective = prepared.loaded, prepared.objective
    config, where = loaded.config, printable(str(loaded.source))
    encoder = Encoder(prepared.out.path, vocabulary=prepared.anatomy.sizes.vocabulary, template=loaded.template)
    streams: list[Stream[Any]] = []
    found = TrainingData(Mixture([], [], seed=0), {}, [])
    if template := config.chat_template:
        unknown = [mark for mark in MARKS[template] if len(encoder.tokenizer.ids(mark, special=False)) > 1]
        found.notes += [unknown_marks(template, unknown)] if unknown else []
    for source in config.sources:
        if source.name in imagined:
            opened = OpenedSource(imagined[source.name])
        else:
            opened = _read(source, prepared, say, encoder)
        kept, aside, numbers = _parted(found, source, opened)
        streams.append(objective.stream(source, opened.text, kept, prepared, encoder))
        hold = partial(objective.held_out, streams[-1], aside, numbers)
        sequences = hold(config.validation_sequences or MOST_HELD, prepared.settings.length)
        if sequences:
            found.validation[source.name], found.held[source.name] = sequences, hold
        elif source.validation:
            raise BadInput(
                f"{where}: the held-out part of source {source.name} has fewer than two tokens; hold out more, or 0"
            )
    found.mixture = Mixture(streams, [source.share for source in config.sources], seed=config.seed)
    objective.check_data(found, where)
    return found


def _read(source: SourceSpec, prepared: Prepared, say: Callable[[str], None], encoder: Encoder) -> OpenedSource:
    """Read a whole source. Raises BadInput where it cannot be read, or the text that the model wrote is missing."""
    loaded = prepared.loaded
    if source.generate is not None:
        path = written_source(memory_folder(prepared.to), source)
        if not path.is_file():
            raise BadInput(
                f"{printable(str(loaded.source))}: source {source.name}: the text that the first process wrote"
                f" ({printable(str(path))}) is not there for this one; train to a folder that all processes see"
            )
        source = source.model_copy(update={"path": str(path.absolute()), "generate": None})
    if source.repo_id is not None:
        say(f"source {source.name}: fetching {printable(source.path)}, or finding it in the cache")
    return open_source(source, loaded, encoder.tokenizer, encoder.of(source).write)


def _parted(
    data: TrainingData, source: SourceSpec, opened: OpenedSource
) -> tuple[NDArray[np.int64], Corpus, list[int]]:
    """Note in `data` what was opened, and split the source into documents to train on and held-out ones.

    Return the numbers of the documents to train on, the corpus of the held-out documents, and their numbers in it.
    """
    data.documents += [opened.text] if opened.held_out is None else [opened.text, opened.held_out]
    if opened.commit is not None:
        data.commits[source.name] = opened.commit
        data.notes.append(f"source {source.name}: {printable(source.path)} at commit {opened.commit}")
    data.notes += [f"source {source.name}: {note}" for note in opened.text.rows.notes()]
    share = source.validation if isinstance(source.validation, float) else 0.0
    kept, held = split(opened.text, share, name=source.name)
    if opened.held_out is not None:
        return kept, opened.held_out, list(range(len(opened.held_out)))
    return kept, opened.text, [int(number) for number in held]


def steps_of(data: TrainingData, prepared: Prepared, say: Callable[[str], None]) -> int:
    """Return the number of steps by the config's `epochs` or `bytes`, which count the sources that are not original.

    Where all sources are original, all count. By epochs the steps are epochs · tokens of these sources / (their share ·
    tokens per step), rounded up; for that every document is tokenised once (with labels, examples are counted instead).
    By bytes it is the first step at which the text drawn from these sources has that many bytes; only that text is
    tokenised.
    """
    config, objective, settings = prepared.loaded.config, prepared.objective, prepared.settings
    drawn = [source for source in config.sources if source.share]
    counted = {source.name for source in drawn if source.role != ORIGINAL} or {source.name for source in drawn}
    if config.bytes is not None:
        return _steps_of_bytes(data, config.bytes, counted, settings)
    assert config.epochs is not None
    if objective.packs:
        say(f"counting the tokens of {', '.join(sorted(counted))}")
    tokens = {stream.name: stream.amount() for stream in data.mixture.streams if stream.name in counted}
    shares = {source.name: source.share for source in drawn}
    whole = math.fsum(shares[name] for name in counted)
    a_step, unit = objective.step_units(settings), objective.unit
    steps: int = max(1, math.ceil(config.epochs * sum(tokens.values()) / (whole * a_step)))
    passes = ", ".join(
        f"{name} {shares[name] * steps * a_step / max(1, number):.2f} times ({number:,} {unit})"
        for name, number in tokens.items()
    )
    data.notes.append(f"epochs {config.epochs:g}: {steps:,} steps of {a_step:,} {unit}, which pass through {passes}")
    return steps


def _steps_of_bytes(data: TrainingData, wanted: int, counted: Collection[str], settings: Settings) -> int:
    """Return the fewest steps whose sequences from the sources `counted` have `wanted` bytes of text.

    A document that the last step cuts counts by the fraction of its tokens.
    """
    a_step = settings.batch * settings.length
    streams = {stream.name: stream for stream in data.mixture.streams}
    shares = {name: share for name, share in zip(streams, data.mixture.shares, strict=True) if name in counted}
    texts = {name: _Drawn(streams[name].lengths()) for name in shares}
    steps, found = 0, 0.0
    while found < wanted:
        steps += 1
        found = math.fsum(text.upto(shares[name] * steps * a_step) for name, text in texts.items())
    data.notes.append(
        f"bytes {wanted:,}: {steps:,} steps of {a_step:,} tokens, of which"
        f" {', '.join(f'{text.tokens_a_byte:.3f} a byte of {name}' for name, text in texts.items())}"
    )
    return steps
