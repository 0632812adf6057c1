"""Text on which a domain gate must stay closed, whatever the sources are: passages of many kinds of text and languages.

A source of original text usually shows the gate only one kind. The passages are in `kinds_of_text.jsonl`, whose first
line has their licence. Text that the base itself wrote (`self_generated`) is added. A kind that is like the new text is
left out; this is decided by characters only, by how much likelier the kind's trigrams are under the new text than under
the original text. Of languages only those count that the original sources or the base's own text have, unless the user
names others: each language more makes the gate open later.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Self

from surgeon.data.encoding import Encoded, Encoder
from surgeon.data.layouts import Document, said_in
from surgeon.data.packing import PackedSequence, Packer, SourceStream

# The names of the negatives among sources, which no source of a config can have: kinds of text, other languages, and
# the base's own text. Each counts as one source, because a gate may do well on one and badly on another.
KINDS, LANGUAGES, RECALLED = "(kinds)", "(languages)", "(recalled)"
NAMES = (KINDS, LANGUAGES, RECALLED)
# Kinds that occur within all kinds of text: they are never left out, however frequent they are in the new text.
_EVERYWHERE = {"addresses", "names", "rules", "numbers", "labels", "paths"}
# The length of a kind that is a language: its code.
_CODE = 2
# The original text has a language where at least this share of its pieces, of so many characters, is likeliest in it.
_HAS, _PIECE, _PIECES = 0.05, 256, 128
# Characters of each language by which pieces are judged.
_SAMPLE = 1200
# Every fourth of the base's own documents serves to choose the threshold, the others to fit.
_HELD = 4
# Characters of each domain that are read; the last tenth of the new text gives the score that kinds are compared with.
_CHARACTERS = 2**18
# A kind is left out where its score is above this fraction of the new text's own score (`_like_new`).
_OWN = 1 / 3
# Smoothing: what is added to every trigram's count, and the assumed number of characters that can follow any two.
_UNSEEN, _FOLLOWING = 0.1, 256


@dataclass(frozen=True)
class Negatives:
    """Sequences to fit on and sequences to choose the threshold by, of different passages, by their source's name.

    `left_out` has the kinds that are in neither, each with the reason.
    """

    fitted: dict[str, list[PackedSequence]]
    held: dict[str, list[PackedSequence]]
    left_out: dict[str, str]

    @classmethod
    def beside(
        cls,
        streams: Sequence[SourceStream],
        length: int,
        held_length: int,
        recalled: Sequence[Document] = (),
        keep: Sequence[str] | None = None,
    ) -> Self:
        """Encode and pack the passages, without kinds that are like the new text or that the vocabulary cannot encode.

        Args:
            streams: all sources.
            length: tokens of a sequence to fit on; its documents are isolated.
            held_length: tokens of a sequence to choose the threshold by; its passages are joined to one document, but
                the base's documents are isolated.
            recalled: documents that the base wrote.
            keep: codes of the languages to include; None: those of the original sources and of the base's own text.
        """
        encoder = streams[0].encoder
        domains = [
            _characters(stream for stream in streams if (stream.packer.domain > 0) is new) for new in (False, True)
        ]
        passages = kinds_of_text()
        known = "\n".join([domains[0], *itertools.chain.from_iterable(map(said_in, recalled))])
        kept = _languages_of(passages, known) if keep is None else keep
        left_out = dict.fromkeys(_like_new(passages, *domains), "of the new text's own kind")
        why = "neither in the original sources nor in the base's own text" if keep is None else "not in `keep_for_gate`"
        for kind in passages:
            if len(kind) == _CODE and kind not in kept:
                left_out.setdefault(kind, why)
        # By name, the texts to fit on, and the texts to choose the threshold by.
        chosen: dict[str, tuple[list[Encoded], list[Encoded]]] = {name: ([], []) for name in NAMES}
        for nth, document in enumerate(recalled):
            chosen[RECALLED][nth % _HELD == _HELD - 1].append(encoder.encode(document))
        for kind, texts in passages.items():
            if kind in left_out:
                continue
            encoded = [encoder.encode(text) for text in texts]
            if _unknown(encoder, [token for ids, _ in encoded for token in ids]):
                left_out[kind] = "not in the vocabulary"
                continue
            for nth, each in enumerate(encoded):
                chosen[LANGUAGES if len(kind) == _CODE else KINDS][nth % 2].append(each)
        made = cls({}, {}, left_out)
        for name, (to_fit, to_hold) in chosen.items():
            if to_fit:
                made.fitted[name] = _packed(to_fit, Packer(length, "isolated", 0))
            if to_hold:
                made.held[name] = _packed(to_hold, Packer(held_length, "isolated" if name == RECALLED else "joined", 0))
        return made


def _packed(texts: Iterable[Encoded], packer: Packer) -> list[PackedSequence]:
    """Return texts that are packed one after another into sequences, of which the last may be shorter."""
    found = [full for text in texts for full in packer.filled(text)]
    return [*found, packer.take()] if packer.sequence.ids else found


def kinds_of_text() -> dict[str, list[str]]:
    """Return the passages by their kind: `en-news`, `code-c`, or a language."""
    lines = (files("surgeon.training") / "kinds_of_text.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[str, list[str]] = {}
    for line in lines[1:]:
        entry = json.loads(line)
        found.setdefault(entry["kind"], []).append(entry["text"])
    return found


def languages() -> list[str]:
    """Return the codes of the languages of which the package has passages."""
    return [kind for kind in kinds_of_text() if len(kind) == _CODE]


def _unknown(encoder: Encoder, ids: Sequence[int]) -> bool:
    """Return whether at least half of the tokens are the tokenizer's unknown token."""
    unknown = encoder.tokenizer.unk_token_id
    return unknown is not None and 2 * ids.count(unknown) >= len(ids)


def _characters(streams: Iterable[SourceStream]) -> str:
    """Return `_CHARACTERS` characters from the beginnings of sources, equally many of each."""
    every = list(streams)
    found: list[str] = []
    for stream in every:
        count = 0
        for number in stream.numbers:
            found.append("\n".join(said_in(stream.documents.read(int(number))))[: _CHARACTERS // len(every) - count])
            count += len(found[-1])
            if count >= _CHARACTERS // len(every):
                break
    return "\n".join(found)


def _like_new(passages: dict[str, list[str]], original: str, new: str) -> list[str]:
    """Return the kinds of passages that are like the new text.

    The score of a text is its mean log-likelihood by the new text's trigrams, minus the one by the original text's. A
    kind is like the new text where its score is above `_OWN` times the score of the new text's last tenth.
    """
    last = len(new) * 9 // 10
    of_new, of_original = _Trigrams.of(new[:last]), _Trigrams.of(original)
    own = of_new.mean(new[last:]) - of_original.mean(new[last:])
    if own <= 0:
        return []
    texts = {kind: "\n".join(texts) for kind, texts in passages.items() if kind not in _EVERYWHERE}
    return [kind for kind, text in texts.items() if of_new.mean(text) - of_original.mean(text) > _OWN * own]


def _languages_of(passages: dict[str, list[str]], text: str) -> list[str]:
    """Return the languages among the kinds of passages that a text has, by the likeliest kind of its pieces."""
    # All kinds of English are one language. A model of more text would be the likelier one of any text.
    english = [passage for kind, texts in passages.items() if kind.startswith("en-") for passage in texts]
    others = {kind: texts for kind, texts in passages.items() if not kind.startswith("en-")}
    together = others | {"en": [passage[: _SAMPLE // len(english)] for passage in english]}
    models = {name: _Trigrams.of("\n".join(texts)[:_SAMPLE]) for name, texts in together.items()}
    every = [text[begin : begin + _PIECE] for begin in range(0, len(text), _PIECE)]
    pieces = every[:: max(1, len(every) // _PIECES)]
    found = Counter(max(models, key=lambda name: models[name].mean(piece)) for piece in pieces)
    return [name for name, count in found.items() if len(name) == _CODE and count >= _HAS * len(pieces)]


@dataclass(frozen=True)
class _Trigrams:
    """The counts of a text's character trigrams, and of their first two characters."""

    threes: Counter[str]
    twos: Counter[str]

    @classmethod
    def of(cls, text: str) -> Self:
        """Count the trigrams of a text."""
        places = range(len(text) - 2)
        return cls(Counter(text[at : at + 3] for at in places), Counter(text[at : at + 2] for at in places))

    def mean(self, text: str) -> float:
        """Return the mean log-likelihood of a character of `text`, given the two characters before it."""
        places = range(len(text) - 2)
        every = (
            (self.threes[text[at : at + 3]] + _UNSEEN) / (self.twos[text[at : at + 2]] + _UNSEEN * _FOLLOWING)
            for at in places
        )
        return sum(map(math.log, every)) / max(1, len(places))
