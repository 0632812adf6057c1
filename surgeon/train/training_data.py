"""A run's sources, opened: documents to train on in shares, and sequences that are held out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from surgeon.data.documents import Corpus
from surgeon.data.encoding import Encoder
from surgeon.data.packing import Mixture, PackedSequence, Packer, SourceStream, held_out, split
from surgeon.data.sources import OpenedSource, open_source
from surgeon.data.specs import ORIGINAL, SourceSpec
from surgeon.errors import BadInput, printable
from surgeon.models.templates import MARKS, unknown_marks
from surgeon.train.config import LoadedConfig, Settings


def written_source(memory: Path, source: SourceSpec) -> Path:
    """The file of a text that the model writes itself."""
    return memory / f"{source.name}.jsonl"


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


def _held(
    documents: Corpus, numbers: list[int], encoder: Encoder, packer: Callable[[int], Packer], most: int, length: int
) -> list[PackedSequence]:
    return held_out(documents, numbers, encoder, packer(length), most=most)


@dataclass
class TrainingData:
    """What to train on, and by source the sequences that are held out. `commits` are of sources on the Hub, by name.

    `held` gives, by source, as many sequences of what is held out as are asked for, and as long.
    """

    mixture: Mixture
    validation: dict[str, list[PackedSequence]]
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
        """Open every source of the config; texts that the model wrote are in the folder `memory`, where there are any.

        `imagined` are texts, by source, that the model has yet to write.
        Raises BadInput for one that cannot be read or that holds out too little.
        """
        config = loaded.config
        if any(source.kind == "chat" for source in config.sources):
            encoder.check_chat()
        marks = MARKS[config.chat_template] if config.chat_template else ()
        unknown = [mark for mark in marks if len(encoder.tokenizer.ids(mark, special=False)) > 1]
        streams: list[SourceStream] = []
        found = cls(Mixture([], [], seed=0), {}, [])
        if config.chat_template and unknown:
            found.notes.append(unknown_marks(config.chat_template, unknown))
        for source in config.sources:
            if source.repo_id is not None:
                say(f"source {source.name}: fetching {printable(source.path)}, or finding it in the cache")
            if source.name in (imagined or {}):
                opened = OpenedSource((imagined or {})[source.name])
            else:
                opened = open_source(_as_file(source, memory, loaded), loaded)
            found._note(source, opened)
            documents = opened.text
            share = source.validation if isinstance(source.validation, float) else 0.0
            kept, held = split(documents, share, name=source.name)
            domain = config.domain_of(source)
            packer = partial(Packer, packing=config.packing, domain=domain)
            into = packer(settings.length)
            streams.append(SourceStream(source.name, documents, kept, encoder, into, seed=config.seed))
            aside, numbers = documents, list(held)
            if opened.held_out is not None:
                aside, numbers = opened.held_out, list(range(len(opened.held_out)))
            hold = partial(_held, aside, numbers, encoder, packer)
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

    def steps_of(self, loaded: LoadedConfig, settings: Settings, say: Callable[[str], None]) -> int:
        """The steps of the config's `epochs`: passes through the sources that are not original, or through all.

        epochs · their tokens / (their share · tokens of a step), rounded up. Every document is tokenised once.
        """
        config = loaded.config
        assert config.epochs is not None
        drawn = [source for source in config.sources if source.share]
        counted = {source.name for source in drawn if source.role != ORIGINAL} or {source.name for source in drawn}
        say(f"counting the tokens of {', '.join(sorted(counted))}")
        tokens = {stream.name: stream.tokens() for stream in self.mixture.streams if stream.name in counted}
        shares = {source.name: source.share for source in drawn}
        whole = math.fsum(shares[name] for name in counted)
        a_step = settings.batch * settings.length
        steps = max(1, math.ceil(config.epochs * sum(tokens.values()) / (whole * a_step)))
        passes = ", ".join(
            f"{name} {shares[name] * steps * a_step / max(1, number):.2f} times ({number:,} tokens)"
            for name, number in tokens.items()
        )
        self.notes.append(
            f"epochs {config.epochs:g}: {steps:,} steps of {a_step:,} tokens, which pass through {passes}"
        )
        return steps

    def _note(self, source: SourceSpec, opened: OpenedSource) -> None:
        """Remember what was opened, and what there is to say of it."""
        self.documents += [opened.text] if opened.held_out is None else [opened.text, opened.held_out]
        if opened.commit is not None:
            self.commits[source.name] = opened.commit
            self.notes.append(f"source {source.name}: {printable(source.path)} at commit {opened.commit}")
        if opened.text.blank:
            self.notes.append(f"source {source.name}: {opened.text.blank} blank documents are left out")
