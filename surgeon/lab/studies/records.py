"""What a study has found so far, run by run, in its work folder; what belongs to another study is refused.

RESULTS/runs.jsonl.gz has all records in one file, which is what to keep, to commit or to give away. Its first line
names the study by its fingerprint; each further line is one record: the run's name, the fingerprint of its method, and
what it found. A study goes on from this file where its work folder has no record of a run.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from surgeon.common.signed import UNSIGNED, check_own, read_signed, write_signed
from surgeon.common.work_folders import LOCK_FILE, parse_record, read_own, record_of, write_durably
from surgeon.errors import BadInput, printable

RUNS_FILE = "runs.jsonl.gz"
_VERSION = 1
# Unpacked; a record has about a thousand bytes.
_MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class Packed:
    """The records in such a file: the study's fingerprint, and by name of run the content of its record's file."""

    study: str
    records: Mapping[str, bytes]


def read_packed(path: Path) -> Packed | None:
    """Return what the file at `path` holds; None where there is none. Raises BadInput for any other file."""
    content = read_own(path)
    if content is None:
        return None
    try:
        lines = _lines(content)
        head = next(lines)
        if head["surgeon_runs"] != _VERSION:
            raise ValueError(f"its version is {head['surgeon_runs']}, this surgeon reads {_VERSION}")
        study = str(head["study"])
        records = {}
        for line in lines:
            name = line.pop("run")
            if name in records or not isinstance(name, str) or name != Path(name).name or name.startswith("."):
                raise ValueError(f"{name!r} is no name of a run, or stands there twice")
            records[name] = record_of(line)
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, StopIteration, RecursionError) as error:
        raise BadInput(
            f"{printable(str(path))}: damaged or edited ({printable(str(error) or 'empty')}); remove it, and runs that"
            " have no record elsewhere are made again"
        ) from None
    return Packed(study, records)


def packed(study: str, records: Mapping[str, bytes]) -> bytes:
    """Return the content of such a file, the same for the same records; `records` are contents of records' files."""
    lines = [{"surgeon_runs": _VERSION, "study": study}]
    lines += [{"run": name, **parse_record(records[name])} for name in sorted(records)]
    return gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode(), mtime=0)


def _lines(content: bytes) -> Iterator[dict[str, Any]]:
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES >> 20} MiB when unpacked")
    for line in text.splitlines():
        data = json.loads(line)
        if not isinstance(data, dict):
            raise ValueError("a line is no object")
        yield data


STUDY_FILE = "study.json"
RECORDS = "records"
BASE = "base"


@dataclass(frozen=True)
class SourceLoss:
    """One held-out text: documents, tokens and UTF-8 bytes that were predicted, loss in nats a token, bits a byte.

    `by_document` has for each document its nats, tokens and bytes; empty in records of earlier versions. `kl` is
    KL(base ‖ model) in nats a token, where it was measured.
    """

    documents: int
    tokens: int
    nbytes: int
    loss: float
    bits_per_byte: float
    by_document: tuple[tuple[float, int, int], ...] = ()
    kl: float | None = None

    @classmethod
    def parse(cls, data: dict[str, Any]) -> SourceLoss:
        """From plain data. Raises TypeError, ValueError."""
        each = [(float(nats), int(tokens), int(nbytes)) for nats, tokens, nbytes in data.get("by_document", ())]
        return cls(**data | {"by_document": tuple(each)})

    def of(self, documents: Sequence[int] | None, *, by_byte: bool) -> float:
        """The loss, in bits a byte or in nats a token, of some of its documents; None: of all."""
        if documents is None or not self.by_document:
            return self.bits_per_byte if by_byte else self.loss
        some = [self.by_document[number] for number in documents]
        nats = math.fsum(each[0] for each in some)
        return nats / math.log(2) / sum(each[2] for each in some) if by_byte else nats / sum(each[1] for each in some)


# Losses of a model, by text.
Measured = dict[str, SourceLoss]


@dataclass(frozen=True)
class Record:
    """What a finished run ended with: its losses by text (None: its loss was no number any more), and its size.

    `steps` are those that it made; 0 of the base, of a run that diverged, and in records of earlier versions.
    `blended` are the losses of the run on its way back to the base, by the run's share.
    """

    measured: Measured | None
    trained: int = 0
    diverged: str = ""
    steps: int = 0
    blended: dict[float, Measured] = field(default_factory=dict)

    def at(self, share: float) -> Measured | None:
        """The losses of the run (share 1), or of a blend; None where they were not measured."""
        return self.measured if share == 1.0 else self.blended.get(share)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        plain = {"trained": self.trained, "diverged": self.diverged, "steps": self.steps}
        blended = {f"{share:g}": _plain(measured) for share, measured in self.blended.items()}
        measured = None if self.measured is None else _plain(self.measured)
        return {"measured": measured, **plain, **({"blended": blended} if blended else {})}

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Record:
        """From plain data. Raises KeyError, TypeError, ValueError."""
        measured = None if data["measured"] is None else _parse(data["measured"])
        blended = {float(share): _parse(each) for share, each in data.get("blended", {}).items()}
        return cls(measured, data["trained"], data["diverged"], data.get("steps", 0), blended)


def _plain(measured: Measured) -> dict[str, Any]:
    """As plain data; what was not measured is left out."""
    return {name: {k: v for k, v in vars(loss).items() if v not in ((), None)} for name, loss in measured.items()}


def _parse(measured: dict[str, Any]) -> Measured:
    return {name: SourceLoss.parse(source) for name, source in measured.items()}


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
        except (KeyError, TypeError, ValueError, AttributeError) as error:
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


def losses_of(
    record: Record,
    names: tuple[list[str], list[str]],
    *,
    by_byte: bool,
    documents: Mapping[str, Sequence[int]] | None = None,
    share: float = 1.0,
) -> tuple[float, float]:
    """Mean loss over the new texts and over the original ones; infinite of a run that diverged.

    Args:
        record: What a run ended with.
        names: The names of the new texts and of the original ones.
        by_byte: Whether in bits a byte, not in nats a token.
        documents: By text, which of its documents count; None: all.
        share: The run's share in its blend with the base.
    """
    measured = record.at(share)
    if measured is None:
        return math.inf, math.inf
    kept = documents or {}
    new, original = (
        sum(measured[name].of(kept.get(name), by_byte=by_byte) for name in group) / len(group) for group in names
    )
    return new, original
