"""A run's sources, opened: documents to train on in shares, and sequences that are held out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surgeon.common.schema import ORIGINAL
from surgeon.data.documents import Corpus
from surgeon.data.encoding import Encoder
from surgeon.data.examples import ExampleEncoder, ExampleStream, example_at, labels_of
from surgeon.data.packing import Mixture, PackedSequence, Packer, SourceStream, held_out, split
from surgeon.data.sources import OpenedSource, open_source
from surgeon.data.specs import SourceSpec
from surgeon.errors import BadInput, printable
from surgeon.models.templates import MARKS, unknown_marks
from surgeon.training.config.loading import LoadedConfig
from surgeon.training.config.settings import Settings
from surgeon.training.places import written_source


def _as_file(source: SourceSpec, memory: Path | None, loaded: LoadedConfig) -> SourceSpec:
    """The source with the path of its text. Raises BadInput where that is not there."""
    if source.generate is None:
        return source
    path = None if memory is None else written_source(memory, source)
    if path is None or not path.is_file():
        raise BadInput(
            f"{printable(str(loaded.source))}: source {source.name}: the text that the first process wrote"
            f" ({printable(str(path))}) is not there for this one; train to a folder that all processes see"
        )
    return source.model_copy(update={"path": str(path.absolute()), "generate": None})


def _read(
    source: SourceSpec, loaded: LoadedConfig, say: Callable[[str], None], encoder: Encoder | ExampleEncoder
) -> OpenedSource:
    if source.repo_id is not None:
        say(f"source {source.name}: fetching {printable(source.path)}, or finding it in the cache")
    write = encoder.of(source).write if isinstance(encoder, Encoder) else None
    return open_source(source, loaded, encoder.tokenizer, write)


def _held(
    documents: Corpus, numbers: list[int], encoder: Encoder, packer: Callable[[int], Packer], most: int, length: int
) -> list[PackedSequence]:
    return held_out(documents, numbers, encoder, packer(length), most=most)


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


@dataclass
class TrainingData:
    """The text to train on, and by source the held-out sequences. `commits` are of sources on the Hub, by name.

    `held` has, by source, what returns so many held-out sequences of such a length.
    """

    mixture: Mixture[Any]
    validation: dict[str, list[Any]]
    documents: list[Corpus]
    held: dict[str, Callable[[int, int], list[PackedSequence]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    commits: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        loaded: LoadedConfig,
        settings: Settings,
        encoder: Encoder,
        say: Callable[[str], None],
        *,
        memory: Path | None = None,
        imagined: Mapping[str, Corpus] | None = None,
    ) -> TrainingData:
        """Open every source of the config.

        Args:
            loaded: the training config.
            settings: the run's numbers.
            encoder: the output's tokenizer.
            say: takes a line for the user.
            memory: the folder of texts that the model wrote, where there are any.
            imagined: by source, texts that the model has yet to write.

        Raises:
            BadInput: a source cannot be read, or holds out too little.
        """
        config = loaded.config
        marks = MARKS[config.chat_template] if config.chat_template else ()
        unknown = [mark for mark in marks if len(encoder.tokenizer.ids(mark, special=False)) > 1]
        streams: list[SourceStream] = []
        found = cls(Mixture([], [], seed=0), {}, [])
        if config.chat_template and unknown:
            found.notes.append(unknown_marks(config.chat_template, unknown))
        for source in config.sources:
            if source.name in (imagined or {}):
                opened = OpenedSource((imagined or {})[source.name])
            else:
                opened = _read(_as_file(source, memory, loaded), loaded, say, encoder)
            kept, aside, numbers = found._parted(source, opened)
            documents = opened.text
            domain = config.domain_of(source)
            packer = partial(Packer, packing=config.packing, domain=domain)
            into = packer(settings.length)
            own = encoder.of(source)
            streams.append(SourceStream(source.name, documents, kept, config.seed, own, into))
            hold = partial(_held, aside, numbers, own, packer)
            sequences = hold(config.validation_sequences, settings.length)
            if sequences:
                found.validation[source.name], found.held[source.name] = sequences, hold
            elif source.validation:
                raise BadInput(
                    f"{printable(str(loaded.source))}: the held-out part of source {source.name} has fewer than two"
                    " tokens; hold out more, or 0"
                )
        found.mixture = Mixture(streams, [source.share for source in config.sources], seed=config.seed)
        return found

    @classmethod
    def open_examples(cls, loaded: LoadedConfig, encoder: ExampleEncoder, say: Callable[[str], None]) -> TrainingData:
        """Open every source of a config whose texts have labels, and look at each label.

        Raises BadInput for a source that cannot be read, a label that the model does not know, and where all are one.
        """
        config = loaded.config
        found = cls(Mixture([], [], seed=0), {}, [])
        streams: list[ExampleStream] = []
        seen: set[int] = set()
        for source in config.sources:
            opened = _read(source, loaded, say, encoder)
            kept, aside, numbers = found._parted(source, opened)
            seen |= {*labels_of(opened.text, kept, encoder, source.name)}
            streams.append(ExampleStream(source.name, opened.text, kept, config.seed, encoder))
            held = numbers[: config.validation_sequences]
            if held:
                found.validation[source.name] = [example_at(aside, number, encoder, source.name) for number in held]
        if len(seen) < 2:
            raise BadInput(
                f"{printable(str(loaded.source))}: every text has the label"
                f" {printable(encoder.labels[min(seen)])!r}; there is nothing to tell apart: add texts with others"
            )
        if unused := [name for number, name in enumerate(encoder.labels) if number not in seen]:
            found.notes.append(f"no text has the label {', '.join(printable(name, 40) for name in unused[:20])}")
        found.mixture = Mixture(streams, [source.share for source in config.sources], seed=config.seed)
        return found

    def _parted(self, source: SourceSpec, opened: OpenedSource) -> tuple[NDArray[np.int64], Corpus, list[int]]:
        """Divide a source's documents into those to train on and those held out, with their numbers."""
        self._note(source, opened)
        share = source.validation if isinstance(source.validation, float) else 0.0
        kept, held = split(opened.text, share, name=source.name)
        if opened.held_out is not None:
            return kept, opened.held_out, list(range(len(opened.held_out)))
        return kept, opened.text, [int(number) for number in held]

    def steps_of(self, loaded: LoadedConfig, settings: Settings, say: Callable[[str], None]) -> int:
        """The steps of the config's `epochs` or `bytes`, of the sources that are not original, or of all.

        Of epochs: epochs · their tokens / (their share · tokens of a step), rounded up; every document is tokenised
        once, and of texts with labels the examples are counted. Of bytes: the first step at which the text that was
        drawn of them has so many; what is drawn is tokenised once.
        """
        config = loaded.config
        unit = "examples" if config.classifies else "tokens"
        drawn = [source for source in config.sources if source.share]
        counted = {source.name for source in drawn if source.role != ORIGINAL} or {source.name for source in drawn}
        if config.bytes is not None:
            return self._steps_of_bytes(config.bytes, counted, settings)
        assert config.epochs is not None
        if not config.classifies:
            say(f"counting the tokens of {', '.join(sorted(counted))}")
        tokens = {stream.name: stream.amount() for stream in self.mixture.streams if stream.name in counted}
        shares = {source.name: source.share for source in drawn}
        whole = math.fsum(shares[name] for name in counted)
        a_step = settings.batch * (1 if config.classifies else settings.length)
        steps: int = max(1, math.ceil(config.epochs * sum(tokens.values()) / (whole * a_step)))
        passes = ", ".join(
            f"{name} {shares[name] * steps * a_step / max(1, number):.2f} times ({number:,} {unit})"
            for name, number in tokens.items()
        )
        self.notes.append(
            f"epochs {config.epochs:g}: {steps:,} steps of {a_step:,} {unit}, which pass through {passes}"
        )
        return steps

    def _steps_of_bytes(self, wanted: int, counted: Collection[str], settings: Settings) -> int:
        """Count the fewest steps whose sequences of the sources `counted` have `wanted` bytes of text.

        A document that a step cuts counts by the part of its tokens.
        """
        a_step = settings.batch * settings.length
        streams = {stream.name: stream for stream in self.mixture.streams}
        shares = {name: share for name, share in zip(streams, self.mixture.shares, strict=True) if name in counted}
        texts = {name: _Drawn(streams[name].lengths()) for name in shares}
        steps, found = 0, 0.0
        while found < wanted:
            steps += 1
            found = math.fsum(text.upto(shares[name] * steps * a_step) for name, text in texts.items())
        self.notes.append(
            f"bytes {wanted:,}: {steps:,} steps of {a_step:,} tokens, of which"
            f" {', '.join(f'{text.tokens_a_byte:.3f} a byte of {name}' for name, text in texts.items())}"
        )
        return steps

    def _note(self, source: SourceSpec, opened: OpenedSource) -> None:
        """Remember what was opened, and what there is to say of it."""
        self.documents += [opened.text] if opened.held_out is None else [opened.text, opened.held_out]
        if opened.commit is not None:
            self.commits[source.name] = opened.commit
            self.notes.append(f"source {source.name}: {printable(source.path)} at commit {opened.commit}")
        self.notes += [f"source {source.name}: {note}" for note in opened.text.rows.notes()]
