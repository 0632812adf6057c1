"""What a study has found so far, run by run, in its work folder; what belongs to another study is refused.

A run of which the work folder has no record may have one in RESULTS/runs.jsonl.gz (packed.py).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from surgeon.common.signed import UNSIGNED, check_own, read_signed, write_signed
from surgeon.common.work_folders import LOCK_FILE, parse_record, read_own, record_of, write_durably
from surgeon.compare.packed import RUNS_FILE, Packed, packed, read_packed
from surgeon.errors import BadInput, printable

STUDY_FILE = "study.json"
RECORDS = "records"
BASE = "base"


@dataclass(frozen=True)
class SourceLoss:
    """One held-out text: documents, tokens and UTF-8 bytes that were predicted, loss in nats a token, bits a byte."""

    documents: int
    tokens: int
    nbytes: int
    loss: float
    bits_per_byte: float


@dataclass(frozen=True)
class Record:
    """What a finished run ended with: its losses by text (None: its loss was no number any more), and its size.

    `steps` are those that it made; 0 of the base, of a run that diverged, and in records of earlier versions.
    """

    measured: dict[str, SourceLoss] | None
    trained: int = 0
    diverged: str = ""
    steps: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        measured = None
        if self.measured is not None:
            measured = {name: vars(source) for name, source in self.measured.items()}
        return {"measured": measured, "trained": self.trained, "diverged": self.diverged, "steps": self.steps}

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Record:
        """From plain data. Raises KeyError, TypeError."""
        measured = data["measured"]
        if measured is not None:
            measured = {name: SourceLoss(**source) for name, source in measured.items()}
        return cls(measured, data["trained"], data["diverged"], data.get("steps", 0))


@dataclass
class Records:
    """The records of a study: each a file of the work folder, or else one of those that are packed beside it.

    The study's own file is signed and has the digests of all that were written here. With `take_over` others count too,
    which is said.
    """

    work: Path
    take_over: bool
    say: Callable[[str], None]
    found: dict[str, Record] = field(default_factory=dict)
    fingerprint: str = ""
    written: dict[str, str] = field(default_factory=dict)
    packed: Packed | None = None

    @property
    def folder(self) -> Path:
        """Where they lie."""
        return self.work / RECORDS

    @property
    def packed_file(self) -> Path:
        """The file of all of them, beside the work folder."""
        return self.work.parent / RUNS_FILE

    def check_study(self, fingerprint: str) -> None:
        """Note what the records are of. Raises BadInput where those that are there are of something else."""
        file = self.work / STUDY_FILE
        self.packed = read_packed(self.packed_file)
        finished = len(self._names())
        try:
            signed = read_signed(file)
            begun = signed is not None
            if signed is None and self.packed is not None:
                signed = replace(UNSIGNED, data={"fingerprint": self.packed.study})
            study = {} if signed is None else signed.data
            other = signed is not None and study.get("fingerprint") != fingerprint
            other = other or (self.packed is not None and self.packed.study != fingerprint)
            written = {str(key): str(digest) for key, digest in study.get("written", {}).items()}
        except (ValueError, AttributeError) as error:
            raise _damaged(file, str(error)) from None
        if other and finished:
            raise BadInput(
                f"{printable(str(self.work.parent))}: holds runs of another study (the base, its texts, steps or"
                " settings differ, or surgeon's version); undo the change, or choose another folder for RESULTS"
            )
        if other:
            self._clear()
            signed, written, self.packed = None, {}, None
        holds = f"this study, {finished} losses measured" if finished else "the beginning of this study"
        place = self.work if begun else self.packed_file
        check_own(signed, place, holds, take_over=self.take_over, say=self.say)
        self.fingerprint, self.written = fingerprint, written
        if signed is None or not signed.here:
            self._write_study()
        self.folder.mkdir(exist_ok=True)

    def _write_study(self) -> None:
        write_signed(self.work / STUDY_FILE, {"fingerprint": self.fingerprint, "written": self.written})

    def _clear(self) -> None:
        """Remove what a study left of which nothing was finished: what the base wrote, what was under way."""
        for entry in self.work.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name not in (LOCK_FILE, STUDY_FILE):
                entry.unlink()

    def get(self, key: str, fingerprint: str) -> Record | None:
        """The record of a run that is finished. Raises BadInput where one of this name was made otherwise."""
        if key in self.found:
            return self.found[key]
        file, content = self._content(key)
        if content is None:
            return None
        data = _parsed(file, content)
        if data.get("fingerprint") != fingerprint:
            raise BadInput(
                f"{printable(str(file))}: a run of another method of this name (its plan, remedy or training differs);"
                " give the method another `name:`, or choose another folder for RESULTS"
            )
        try:
            record = Record.parse(data["record"])
        except (KeyError, TypeError, AttributeError) as error:
            raise _damaged(file, str(error)) from None
        if self.written.get(key) != hashlib.sha256(content).hexdigest():
            check_own(UNSIGNED, file, "losses", take_over=self.take_over, say=self.say, again="measure them again")
            self._note(key, content)
        self.found[key] = record
        return record

    def add(self, key: str, fingerprint: str, record: Record) -> None:
        """Keep a record, on disk before it counts as done."""
        content = record_of({"fingerprint": fingerprint, "record": record.to_json()})
        # First: a record that a kill leaves without its digest would be nobody's.
        self._note(key, content)
        write_durably(self.folder / f"{key}.json", content)
        self.found[key] = record

    def pack(self) -> None:
        """Write all records into the one file beside the work folder; what is damaged is left out."""
        contents = ((name, self._content(name)[1]) for name in self._names())
        found = {name: content for name, content in contents if content is not None and _is_whole(content)}
        write_durably(self.packed_file, packed(self.fingerprint, found))

    def _names(self) -> set[str]:
        """Names of the runs that there are records of, in the work folder or packed."""
        return {file.stem for file in self.folder.glob("*.json")} | {*(self.packed.records if self.packed else ())}

    def _content(self, name: str) -> tuple[Path, bytes | None]:
        """A record's file with its content, or where there is none the packed file with what it has of this run."""
        file = self.folder / f"{name}.json"
        content = read_own(file)
        if content is None and self.packed is not None and name in self.packed.records:
            return self.packed_file, self.packed.records[name]
        return file, content

    def _note(self, key: str, content: bytes) -> None:
        self.written[key] = hashlib.sha256(content).hexdigest()
        self._write_study()


def _parsed(file: Path, content: bytes) -> dict[str, Any]:
    try:
        data = parse_record(content)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, str(error)) from None
    if not isinstance(data, dict):
        raise _damaged(file, "no record")
    return data


def _is_whole(content: bytes) -> bool:
    try:
        return isinstance(parse_record(content), dict)
    except (ValueError, RecursionError):
        return False


def _damaged(file: Path, why: str) -> BadInput:
    return BadInput(
        f"{printable(str(file))}: damaged or edited ({printable(why)}); remove it, and its run is made again"
    )


def digest(content: Any) -> str:
    """Return the digest of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def losses_of(record: Record, names: tuple[list[str], list[str]], *, by_byte: bool) -> tuple[float, float]:
    """Mean loss over the new texts and over the original ones; infinite of a run that diverged."""
    if record.measured is None:
        return float("inf"), float("inf")
    key = "bits_per_byte" if by_byte else "loss"
    new, original = (sum(getattr(record.measured[name], key) for name in group) / len(group) for group in names)
    return new, original
