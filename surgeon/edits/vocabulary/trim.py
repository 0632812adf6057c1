"""Trimming a tokenizer: which tokens stay, and how texts are tokenised afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.strict_json import json_object, shaped
from surgeon.edits.vocabulary.grow import opened_files, tokenizer_json
from surgeon.edits.vocabulary.growing import Old, check_ids
from surgeon.edits.vocabulary.texts import counted_tokens, measured_text, named
from surgeon.edits.vocabulary.trimmed import Closure, byte_characters, ids_in, ids_of_file, trimmed_files
from surgeon.errors import BadInput, printable
from surgeon.models.templates import TEMPLATE_FILE
from surgeon.models.tokenizer import Tokenizer
from surgeon.operations.prepare import TextCounts

_LARGEST = 0x110000
# Chats in the form that templates expect; where a template refuses one, the others are used.
_CHATS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}),
    ({"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
)
_CODE = re.compile(r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}", re.DOTALL)
_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


@dataclass(frozen=True)
class Wanted:
    """The tokens that stay: tokens that texts use often enough, the tokens of listed words, and the tokens of scripts.

    `least` is how often the texts must use a token, `most` how many of these tokens stay at most (None: all).
    """

    texts: tuple[Path, ...] = ()
    least: int = 1
    most: int | None = None
    words: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trimmed:
    """A trimmed vocabulary: the ids that stay (`kept`, in order), and why each group stays (`how`).

    `files` are the changed files by name; None: the file is left out. `measured` is the effect on texts.
    """

    kind: str
    how: str
    kept: tuple[int, ...]
    files: Mapping[str, bytes | None]
    measured: tuple[TextCounts, ...]


@dataclass
class _Staying:
    """The ids that stay so far, with the ids that must stay with them."""

    closure: Closure
    rows: int
    ids: set[int] = field(default_factory=set)

    def add(self, numbers: Iterable[int]) -> int:
        """Keep these ids too, with the ids they need; return how many ids were added."""
        before = len(self.ids)
        for number in numbers:
            if number not in self.ids and 0 <= number < self.rows:
                self.ids |= self.closure.of(number)
        return len(self.ids) - before

    def fill(self, room: int, order: Sequence[int]) -> None:
        """Keep `room` more ids: the first in `order` whose needed ids fit into the room."""
        while room:
            before = room
            for number in order:
                more = self.closure.of(number) - self.ids
                if more and len(more) <= room:
                    self.ids |= more
                    room -= len(more)
            if room == before:
                break
        # No tokens are left to add: keep rows that no token uses.
        rest = (number for number in range(self.rows) if number not in self.ids)
        self.ids.update(number for number, _ in zip(rest, range(room), strict=False))


def trim(base: CheckpointFolder, wanted: Wanted, *, rows: int, multiple: int, measure: Sequence[Path] = ()) -> Trimmed:
    """Find the tokens of `base` that stay, and make the files without the others.

    Args:
        base: the checkpoint.
        wanted: the tokens of the plan.
        rows: the model's rows of embeddings.
        multiple: the number of rows that stay is a multiple of this.
        measure: texts on which the change is measured, in addition to the texts of `wanted`.

    Raises:
        BadInput: the base has no tokenizer.json, or one of a kind that cannot be trimmed; or no row would go.
    """
    files, read = tokenizer_json(base)
    old = Old(read, base.source.shown, rows)
    closure = Closure(read)
    closure.check()
    staying = _Staying(closure, rows)
    with opened_files(files, base) as tokenizer:
        old.ask(tokenizer)
        counts = counted_tokens(tokenizer, wanted.texts)
        said = _keep_wanted(staying, wanted, old, tokenizer, counts)
        said.append(_keep_needed(staying, base, files, tokenizer))
        count = len(staying.ids)
        tokens = sorted(set(old.taken.values()) - staying.ids, key=lambda number: (-counts[number], number))
        staying.fill(-count % multiple, tokens)
        if len(staying.ids) > count:
            said.append(f"{len(staying.ids) - count} more up to a multiple of {multiple}")
        kept = tuple(sorted(staying.ids))
        if len(kept) >= rows:
            raise BadInput(
                f"{base.source.shown}: all {rows} rows would stay, so there is nothing to trim; keep fewer tokens"
                f" (`least`, `most`), or lower `pad_to_multiple_of` ({multiple})"
            )
        made = trimmed_files(files, kept)
        there = {name: content for name, content in (files | made).items() if content is not None}
        with opened_files(there, base) as after:
            new = {number: nth for nth, number in enumerate(kept)}
            wanted_ids = {content: new[number] for content, number in old.taken.items() if number in new}
            check_ids(old, wanted_ids, after.vocabulary())
            texts = [("kept", wanted.texts), ("measured", tuple(measure))]
            measured = tuple(measured_text(use, paths, tokenizer, after, kept) for use, paths in texts if paths)
    return Trimmed(read.shown, ", ".join(said), kept, made, measured)


def _keep_wanted(
    staying: _Staying, wanted: Wanted, old: Old, tokenizer: Tokenizer, counts: Mapping[int, int]
) -> list[str]:
    """Keep what the plan names; return words on each part."""
    said: list[str] = []
    named_ids: set[int] = set()
    if wanted.texts:
        used = sorted((n for n, count in counts.items() if count >= wanted.least), key=lambda n: (-counts[n], n))
        if not used:
            raise BadInput(
                f"{named(wanted.texts)}: none of its {len(counts)} tokens occurs `least: {wanted.least}` times, so none"
                " would stay; give more text, or lower `least`"
            )
        chosen = used[: wanted.most]
        named_ids |= {*chosen}
        often = "" if wanted.least == 1 else f", each {wanted.least} times or more"
        said.append(f"{len(chosen):,} of {len(counts):,} tokens of {named(wanted.texts)}{often}")
    if wanted.words:
        found = {number for ids in tokenizer.many(wanted.words) for number in ids}
        named_ids |= found
        said.append(f"{len(found):,} tokens of {len(wanted.words):,} listed words")
    if wanted.scripts:
        found = _of_scripts(old, wanted.scripts)
        named_ids |= found
        said.append(f"{len(found):,} tokens of {', '.join(wanted.scripts)}")
    if more := staying.add(named_ids) - len(named_ids):
        said.append(f"{more:,} more that they are merged from")
    return said


def _keep_needed(staying: _Staying, base: CheckpointFolder, files: Mapping[str, bytes], tokenizer: Tokenizer) -> str:
    """Keep what every text may need and what the base's files name; return words on how many ids that added."""
    added = staying.add(staying.closure.always())
    added += staying.add(tokenizer.all_special_ids)
    added += staying.add(tokenizer.ids(""))
    added += staying.add(ids_in(base.config, "config.json"))
    for name, content in files.items():
        with shaped(name):
            added += staying.add(ids_of_file(name, content))
    for text in _of_templates(files, tokenizer):
        added += staying.add(tokenizer.ids(text, special=False))
    return f"{added:,} more that special tokens, bytes and the chat template need"


def _of_templates(files: Mapping[str, bytes], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts that chat templates can write: their literal parts, and small chats."""
    templates = [*_templates(files)]
    for template in templates:
        code = _CODE.findall(template)
        quoted = [one or other for part in code for one, other in _QUOTED.findall(part)]
        literals = [re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), each) for each in quoted]
        for text in (*_CODE.split(template), *literals):
            yield from dict.fromkeys((text, text.strip()))
    for template in dict.fromkeys([*templates, *([tokenizer.chat_template] if tokenizer.chat_template else [])]):
        for turns in _CHATS:
            for prompt in (False, True):
                try:
                    yield tokenizer.render(turns, template=template, prompt=prompt)
                except BadInput:
                    # The template refuses such a chat, or is no chat template.
                    continue


def _templates(files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield every chat template of a folder."""
    for name, content in files.items():
        if name == TEMPLATE_FILE or name.endswith(".jinja"):
            yield content.decode("utf-8", "replace")
        elif name in ("chat_template.json", "tokenizer_config.json", "processor_config.json"):
            found = json_object(content).get("chat_template")
            for each in found if isinstance(found, list) else [found]:
                text = each.get("template") if isinstance(each, dict) else each
                if isinstance(text, str):
                    yield text


def script_pattern(names: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern for characters of these scripts, or common to scripts. Raises BadInput for an unknown script."""
    import regex  # type: ignore[import-untyped]

    for name in names:
        try:
            if not name.replace("_", "").replace(" ", "").isalnum():
                raise regex.error("no name")
            regex.compile(rf"\p{{Script={re.escape(name)}}}")
        except regex.error:
            raise BadInput(
                f"scripts: there is no script {printable(name, 40)} in Unicode; write its name, as Latin or Cyrillic"
            ) from None
    every = "".join(rf"\p{{Script={re.escape(name)}}}" for name in (*names, "Common", "Inherited"))
    found: re.Pattern[str] = regex.compile(f"[{every}]")
    return found


def _of_scripts(old: Old, names: Sequence[str]) -> set[int]:
    """Return the tokens that consist only of characters of these scripts, or of parts of their bytes."""
    pattern = script_pattern(names)
    characters = set(pattern.findall("".join(map(chr, (n for n in range(_LARGEST) if not 0xD800 <= n < 0xE000)))))
    if not old.read.byte_level:
        return {number for content, number in old.read.vocabulary.items() if characters.issuperset(content)}
    encoded = (character.encode() for character in characters)
    parts = {e[i:j] for e in encoded if len(e) > 1 for i in range(len(e)) for j in range(i + 1, len(e) + 1)}
    bytes_of = {character: byte for byte, character in byte_characters().items()}
    found: set[int] = set()
    for content, number in old.read.vocabulary.items():
        if all(each in bytes_of for each in content):
            raw = bytes(bytes_of[each] for each in content)
            if all(part in parts or part.decode(errors="replace") in characters for part in _characters(raw)):
                found.add(number)
    return found


def _characters(raw: bytes) -> Iterator[bytes]:
    """Yield the characters of UTF-8 bytes, including incomplete ones at both ends."""
    at = 0
    while at < len(raw):
        end = at + 1
        while end < len(raw) and raw[end] & 0xC0 == 0x80:
            end += 1
        yield raw[at:end]
        at = end
