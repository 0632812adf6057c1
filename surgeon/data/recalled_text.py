"""The text that a recall has written so far: stored durably and recorded from time to time, with its filters."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surgeon.common.schema import TEMPLATE
from surgeon.common.signed import check_own, read_signed, write_signed
from surgeon.common.work_folders import WorkFolder, read_own
from surgeon.data.layouts import CUT
from surgeon.errors import BadInput, printable

RECORD, _PART = "run.json", "part.jsonl"


def record_of(text: Path) -> Path:
    """Return the path of the record of a recalled text; where it exists, a model wrote the text."""
    return text.with_name(f"{text.name}.recall")


# The recall fails where, after this many times the documents at a time, a smaller share than this was kept.
_LEAST_KEPT, _JUDGED = 0.05, 4


@dataclass(frozen=True)
class Written:
    """One document as a line of JSON; the number of `tokens` written, and whether the model `ended` it by itself."""

    entry: dict[str, Any]
    tokens: int
    ended: bool
    loops: bool
    empty: bool


class NearlyNothing(BadInput):
    """Raised where almost no text of a model can be kept, or the model has nothing to start from."""

    @classmethod
    def of(cls, counts: Counts, settings: dict[str, Any]) -> NearlyNothing:
        """Return the error that reports what was filtered, why, and which setting may help."""
        temperature = settings["temperature"]
        if counts.empty > counts.loops + counts.duplicates:
            # Temperature has no influence on empty documents.
            begin = (
                "`prompts: begin` (plain text, without the chat template) or "
                if settings["prompts"] == TEMPLATE
                else ""
            )
            return cls(
                f"{counts.filtered}: the model ends at once; give {begin}`prompts`, a file with a beginning a line"
            )
        other = "a higher one, 1 say" if temperature < 1 else "a lower one, 0.8 say"
        advice = f"temperature is {temperature:g}: try {other}, or give `prompts`, a file with a beginning a line"
        return cls(f"{counts.filtered}; {advice}")


@dataclass(frozen=True)
class Counts:
    """The counts of a model's documents: written, kept and filtered; `tokens` counts the kept documents' tokens.

    `cut`: the kept documents that reached the longest length before the model ended them.
    """

    written: int = 0
    kept: int = 0
    tokens: int = 0
    cut: int = 0
    loops: int = 0
    duplicates: int = 0
    empty: int = 0

    @property
    def filtered(self) -> str:
        """The number of filtered documents and the reasons, in words."""
        lost = self.written - self.kept
        return (
            f"{lost} of {self.written} documents ({lost / self.written:.0%}) were filtered: {self.loops} loop,"
            f" {self.duplicates} are duplicates, {self.empty} are empty"
        )


class TextSoFar:
    """The text written so far, and a record of it that `save` updates.

    `digest` is a running sha256 of the text. `seen` are the keys of its documents, by which duplicates are found.
    """

    def __init__(self, path: Path, fingerprint: str, counts: Counts, written: bytes) -> None:
        """Store the counts of the text `written` so far."""
        self.path = path
        self.fingerprint = fingerprint
        self.counts = counts
        self.digest = hashlib.sha256(written)
        self.seen = {_key(line) for line in written.splitlines()}

    @classmethod
    def open(
        cls,
        work: WorkFolder,
        fingerprint: str,
        shorter: tuple[Path, Counts] | None = None,
        *,
        take_over: bool,
        say: Callable[[str], None],
    ) -> TextSoFar:
        """Return the text in the work folder, without an unfinished end; or `shorter`, which is moved there.

        `shorter` are a complete text of the same model and settings, and its counts. Raises BadInput where the folder
        has text of another run or is damaged, or, without `take_over`, was written elsewhere.
        """
        path, file = work.path / _PART, work.path / RECORD
        try:
            found = read_signed(file)
        except ValueError as error:
            raise _damaged(file, printable(str(error))) from None
        if found is None:
            check_own(None, work.path, "", take_over=take_over, say=say)
            return cls._begun(path, fingerprint, shorter)
        try:
            record = found.data
            counts = Counts(**record["counts"])
            if not all(type(number) is int for number in (record["bytes"], *asdict(counts).values())):
                raise TypeError("it is no record of a recall")
        except (ValueError, TypeError, KeyError) as error:
            raise _damaged(file, printable(str(error))) from None
        if record["fingerprint"] != fingerprint:
            if not counts.tokens:
                # The other recall has no text yet, so nothing is lost.
                path.unlink(missing_ok=True)
                return cls._begun(path, fingerprint, shorter)
            raise BadInput(
                f"{printable(str(work.path))}: holds text of another recall (model or settings differ); remove it, or"
                " choose another name"
            )
        holds = f"what a model wrote so far, {counts.tokens:,} tokens"
        check_own(found, work.path, holds, take_over=take_over, say=say)
        if shorter is not None:
            # The call that moved it was interrupted before, or the one that ended it was interrupted behind.
            return cls._begun(path, fingerprint, shorter)
        written = (read_own(path) or b"")[: record["bytes"]]
        if hashlib.sha256(written).hexdigest() != record["sha256"]:
            raise _damaged(path, "it is not what was written")
        part = cls(path, fingerprint, counts, written)
        with path.open("ab") as open_file:
            open_file.truncate(len(written))
        if not found.here:
            part.save(b"")
        return part

    @classmethod
    def _begun(cls, path: Path, fingerprint: str, shorter: tuple[Path, Counts] | None) -> TextSoFar:
        """Return an empty text, or `shorter` moved to `path`, and record it."""
        written = b"" if shorter is None else read_own(shorter[0]) or b""
        counts = Counts() if shorter is None else shorter[1]
        part = cls(path, fingerprint, counts, written)
        # Written before any text: if the disk became full in between, text without a record would belong to no run.
        part._record(len(written))
        if shorter is not None:
            shorter[0].rename(path)
        return part

    @classmethod
    def in_memory(cls) -> TextSoFar:
        """Return an empty text that `keep` can count into, without any file."""
        return cls(Path(), "", Counts(), b"")

    def keep(self, document: Written) -> bytes:
        """Count a document; return its line, which says whether it was cut, or nothing where it is filtered."""
        line = json.dumps(document.entry | {CUT: not document.ended}, ensure_ascii=False).encode() + b"\n"
        key = _key(line)
        found = asdict(self.counts)
        found["written"] += 1
        why = "empty" if document.empty else "loops" if document.loops else "duplicates" if key in self.seen else None
        if why is None:
            self.seen.add(key)
            found["kept"] += 1
            found["tokens"] += document.tokens
            found["cut"] += not document.ended
        else:
            found[why] += 1
        self.counts = Counts(**found)
        return b"" if why else line

    def save(self, lines: bytes) -> None:
        """Append lines, durably, and record them."""
        with self.path.open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        self.digest.update(lines)
        self._record(size)

    def _record(self, size: int) -> None:
        """Record that `size` bytes of text are stored."""
        record = {"fingerprint": self.fingerprint, "counts": asdict(self.counts), "bytes": size}
        write_signed(self.path.with_name(RECORD), record | {"sha256": self.digest.hexdigest()})


def _damaged(file: Path, why: str) -> BadInput:
    """Return the error for a damaged or edited file of a recall."""
    return BadInput(
        f"{printable(str(file))}: damaged or edited ({why}); remove its folder, and the recall starts again"
    )


def _key(line: bytes) -> bytes:
    """Return a key that equal documents share: a digest of the words, ignoring case and white space."""
    return hashlib.sha256(" ".join(line.decode().split()).casefold().encode()).digest()


def judge(counts: Counts, settings: dict[str, Any]) -> None:
    """Raise NearlyNothing where, after `_JUDGED` times the documents at a time, too few were kept (`_LEAST_KEPT`)."""
    if counts.written >= _JUDGED * settings["batch"] and counts.kept < _LEAST_KEPT * counts.written:
        raise NearlyNothing.of(counts, settings)
