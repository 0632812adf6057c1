"""What a domain gate must stay closed for, whatever the sources are: passages of many kinds of text and languages.

One source of original text shows a gate one kind of it. The passages are in `kinds_of_text.jsonl`, whose first line
has their licence; beside them stands what the base itself wrote (`self_generated`). Kinds of which the new text itself
is are left out, by its characters alone: by how much likelier their trigrams are in the new text than in the original
one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Self

from surgeon.data.encoding import Encoded, Encoder
from surgeon.data.layouts import Document, said_in
from surgeon.data.packing import PackedSequence, Packer, Packing, SourceStream

# What they are called among sources, of which none can have such a name: kinds of text, other languages, what the
# base wrote. Each counts as one source, for a gate may do well on one and not on the other.
KINDS, LANGUAGES, RECALLED = "(kinds)", "(languages)", "(recalled)"
NAMES = (KINDS, LANGUAGES, RECALLED)
# What stands in texts of every kind, and so is no kind of its own, however often it stands in the new text.
_EVERYWHERE = {"addresses", "names", "rules", "numbers", "labels", "paths"}
# A language is called by its code alone.
_CODE = 2
# Of the base's own documents each so manieth chooses the threshold.
_HELD = 4
# Characters of either domain that are read; the new text's last tenth is what kinds are measured by.
_CHARACTERS = 2**18
# A kind whose trigrams are by this share as telling of new text as its own are is left out.
_OWN = 1 / 3
# What a trigram counts that was not seen, of so many characters that may follow two others.
_UNSEEN, _FOLLOWING = 0.1, 256


@dataclass(frozen=True)
class Negatives:
    """Sequences to fit on and to choose the threshold by, each of other passages, by their name among sources.

    `left_out` are the kinds that are not among them, and why.
    """

    fitted: dict[str, list[PackedSequence]]
    held: dict[str, list[PackedSequence]]
    left_out: dict[str, str]

    @classmethod
    def beside(
        cls, streams: Sequence[SourceStream], length: int, held_length: int, recalled: Sequence[Document] = ()
    ) -> Self:
        """Encode the passages that are neither of the kind of the new sources among `streams`, nor unreadable.

        Args:
            streams: all sources.
            length: tokens of a sequence to fit on, in which documents stand apart.
            held_length: tokens of the others, in which one passage follows the other as one document.
            recalled: what the base wrote.
        """
        encoder = streams[0].encoder
        domains = [
            _characters(stream for stream in streams if (stream.packer.domain > 0) is new) for new in (False, True)
        ]
        passages = kinds_of_text()
        left_out = dict.fromkeys(_like_new(passages, *domains), "of the new text's own kind")
        held_how: dict[str, Packing] = {RECALLED: "isolated"}
        packed = {
            name: (_Packed.of(length, "isolated"), _Packed.of(held_length, held_how.get(name, "joined")))
            for name in NAMES
        }
        for nth, document in enumerate(recalled):
            packed[RECALLED][nth % _HELD == _HELD - 1].add(encoder.encode(document))
        for kind, texts in passages.items():
            if kind in left_out:
                continue
            encoded = [encoder.encode(text) for text in texts]
            if _unknown(encoder, [token for ids, _ in encoded for token in ids]):
                left_out[kind] = "not in the vocabulary"
                continue
            for nth, each in enumerate(encoded):
                packed[LANGUAGES if len(kind) == _CODE else KINDS][nth % 2].add(each)
        fitted, held = (
            {name: sequences for name, of_name in packed.items() if (sequences := of_name[nth].whole())}
            for nth in range(2)
        )
        return cls(fitted, held, left_out)


@dataclass(frozen=True)
class _Packed:
    """Passages one after the other, in sequences of one length."""

    packer: Packer
    sequences: list[PackedSequence]

    @classmethod
    def of(cls, length: int, how: Packing) -> Self:
        """Nothing yet."""
        return cls(Packer(length, how, 0), [])

    def add(self, encoded: Encoded) -> None:
        """Take a passage."""
        used = 0
        while used < len(encoded[0]):
            used += self.packer.add(encoded, used)
            if not self.packer.room:
                self.sequences.append(self.packer.take())

    def whole(self) -> list[PackedSequence]:
        """All sequences, the last one padded."""
        if self.packer.room < self.packer.length:
            self.sequences.append(self.packer.take())
        return self.sequences


def kinds_of_text() -> dict[str, list[str]]:
    """Return the passages by their kind: `en-news`, `code-c`, or a language."""
    lines = (files("surgeon.training") / "kinds_of_text.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[str, list[str]] = {}
    for line in lines[1:]:
        entry = json.loads(line)
        found.setdefault(entry["kind"], []).append(entry["text"])
    return found


def _unknown(encoder: Encoder, ids: Sequence[int]) -> bool:
    """Whether half of the tokens, or more, say only that there was something."""
    unknown = encoder.tokenizer.unk_token_id
    return unknown is not None and 2 * ids.count(unknown) >= len(ids)


def _characters(streams: Iterable[SourceStream]) -> str:
    """The beginnings of sources, as much of each."""
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
    """Return the kinds that the new text is of, by its trigrams beside those of original text."""
    last = len(new) * 9 // 10
    of_new, of_original = _Trigrams.of(new[:last]), _Trigrams.of(original)
    own = of_new.mean(new[last:]) - of_original.mean(new[last:])
    if own <= 0:
        return []
    texts = {kind: "\n".join(texts) for kind, texts in passages.items() if kind not in _EVERYWHERE}
    return [kind for kind, text in texts.items() if of_new.mean(text) - of_original.mean(text) > _OWN * own]


@dataclass(frozen=True)
class _Trigrams:
    """How often three characters follow each other in a text, and its pairs."""

    threes: Counter[str]
    twos: Counter[str]

    @classmethod
    def of(cls, text: str) -> Self:
        """Count a text's."""
        places = range(len(text) - 2)
        return cls(Counter(text[at : at + 3] for at in places), Counter(text[at : at + 2] for at in places))

    def mean(self, text: str) -> float:
        """The mean log-likelihood of a character of `text` by the two before it."""
        places = range(len(text) - 2)
        every = (
            (self.threes[text[at : at + 3]] + _UNSEEN) / (self.twos[text[at : at + 2]] + _UNSEEN * _FOLLOWING)
            for at in places
        )
        return sum(map(math.log, every)) / max(1, len(places))
