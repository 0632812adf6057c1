"""A run's sources, opened: documents to train on in shares, and sequences that are held out."""

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


@dataclass
class _Drawn:
    """Documents as they are drawn, by `lengths` (tokens and bytes of each), and what was drawn so far."""

    lengths: Iterator[tuple[int, int]]
    tokens: int = 0
    nbytes: int = 0
    last: tuple[int, int] = (1, 0)

    def upto(self, tokens: float) -> float:
        """Bytes of the first so many tokens; never fewer than the time before."""
        while self.tokens < tokens:
            count, nbytes = next(self.lengths)
            self.last = max(1, count), nbytes
            self.tokens, self.nbytes = self.tokens + self.last[0], self.nbytes + self.last[1]
        return self.nbytes - self.last[1] * (self.tokens - tokens) / self.last[0]

    @property
    def tokens_a_byte(self) -> float:
        """The rate in the documents that were drawn."""
        return self.tokens / max(1, self.nbytes)


def open_data(prepared: Prepared, say: Callable[[str], None], imagined: Mapping[str, Corpus]) -> TrainingData:
    """Open every source of the config.

    Args:
        prepared: the run.
        say: takes a line for the user.
        imagined: by source, texts that the model has yet to write.

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
        sequences = hold(config.validation_sequences, prepared.settings.length)
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
    """Read a source through. Raises BadInput where it cannot be read, or the model's text is not there."""
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
    """Note what was opened, and divide it into the documents to train on and those held out, with their numbers."""
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
    """The steps of the config's `epochs` or `bytes`, of the sources that are not original, or of all.

    Of epochs: epochs · their tokens / (their share · tokens of a step), rounded up; every document is tokenised
    once, or examples are counted. Of bytes: the first step at which the text that was drawn of them has so many;
    what is drawn is tokenised once.
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
    """Count the fewest steps whose sequences of the sources `counted` have `wanted` bytes of text.

    A document that a step cuts counts by the part of its tokens.
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
