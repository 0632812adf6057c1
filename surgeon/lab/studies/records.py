"""The records of a study's finished runs, and the files that store them.

RESULTS/runs.jsonl.gz contains all records. It is the file to keep, to commit or to give away. Its first line names the
study by its fingerprint. Each further line is one record: the run's name, the fingerprint of its method, and its
losses. RESULTS/work/study.json is signed and contains the digests of all records that were written here. Records of
another study are refused.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgeon.common.signed import UNSIGNED, check_own, read_signed, write_signed
from surgeon.common.work_folders import LOCK_FILE, read_own, write_durably
from surgeon.errors import BadInput, printable

RUNS_FILE = "runs.jsonl.gz"
_VERSION = 1
# Largest size of the records file when unpacked; a record has about a thousand bytes.
_MOST_BYTES = 1 << 28

# A line's content without the run's name: the `fingerprint` of the run's method, and the `record`.
Entry = dict[str, Any]


@dataclass(frozen=True)
class Packed:
    """The content of a runs.jsonl.gz: the study's fingerprint, and each run's entry by the run's name."""

    study: str
    records: Mapping[str, Entry]


def read_packed(path: Path) -> Packed | None:
    """Return the content of the runs.jsonl.gz at `path`; None where there is no file.

    Raises BadInput where the file is not a valid runs.jsonl.gz.
    """
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
                raise ValueError(f"{name!r} is not the name of a run, or occurs twice")
            records[name] = line
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, StopIteration, RecursionError) as error:
        raise _damaged(path, str(error) or "empty") from None
    return Packed(study, records)


def packed(found: Packed) -> bytes:
    """Return the bytes of a runs.jsonl.gz; equal records give equal bytes."""
    lines = [{"surgeon_runs": _VERSION, "study": found.study}]
    lines += [{"run": name, **found.records[name]} for name in sorted(found.records)]
    return gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode(), mtime=0)


def _lines(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the unpacked lines of a records file. Raises ValueError where it is too large or a line is no object."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES >> 20} MiB when unpacked")
    for line in text.splitlines():
        data = json.loads(line)
        if not isinstance(data, dict):
            raise ValueError("a line is no object")
        yield data


def _damaged(file: Path, why: str) -> BadInput:
    """Return the error for a file that is damaged or edited."""
    return BadInput(
        f"{printable(str(file))}: damaged or edited ({printable(why)}); remove it, and its runs are made again"
    )


STUDY_FILE = "study.json"
BASE = "base"


@dataclass(frozen=True)
class SourceLoss:
    """The losses on one held-out text.

    `documents`, `tokens` and `nbytes` count what was predicted (`nbytes`: UTF-8 bytes). `loss` is in nats a token.
    `by_document` contains (nats, tokens, bytes) of each document; it is empty in records of earlier versions.
    """

    documents: int
    tokens: int
    nbytes: int
    loss: float
    bits_per_byte: float
    by_document: tuple[tuple[float, int, int], ...] = ()

    @classmethod
    def parse(cls, data: dict[str, Any]) -> SourceLoss:
        """Return the losses in plain data. Raises TypeError or ValueError where the data have another form."""
        each = [(float(nats), int(tokens), int(nbytes)) for nats, tokens, nbytes in data.get("by_document", ())]
        # Records of earlier versions have a `kl` too.
        known = {key: value for key, value in data.items() if key != "kl"}
        return cls(**known | {"by_document": tuple(each)})

    def of(self, documents: Sequence[int] | None, *, by_byte: bool) -> float:
        """Return the loss on the given documents (None: on all), in bits a byte or in nats a token."""
        if documents is None or not self.by_document:
            return self.bits_per_byte if by_byte else self.loss
        some = [self.by_document[number] for number in documents]
        nats = math.fsum(each[0] for each in some)
        return nats / math.log(2) / sum(each[2] for each in some) if by_byte else nats / sum(each[1] for each in some)


# Losses of a model, by text.
Measured = dict[str, SourceLoss]


@dataclass(frozen=True)
class Record:
    """The result of a finished run: its losses by text, and its counts of trained parameters and steps.

    `measured` is None where the run diverged (`diverged` is the reason). `trained` is the number of trained parameters.
    `steps` counts the optimizer steps; it is 0 for the base, for a run that diverged, and in records of earlier
    versions. `blended` contains the losses of the run's blends with the base, by the run's share in the blend.
    """

    measured: Measured | None
    trained: int = 0
    diverged: str = ""
    steps: int = 0
    blended: dict[float, Measured] = field(default_factory=dict)

    def at(self, share: float) -> Measured | None:
        """Return the losses of the run (share 1) or of its blend with this share; None where they were not measured."""
        return self.measured if share == 1.0 else self.blended.get(share)

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain data."""
        plain = {"trained": self.trained, "diverged": self.diverged, "steps": self.steps}
        blended = {f"{share:g}": _plain(measured) for share, measured in self.blended.items()}
        measured = None if self.measured is None else _plain(self.measured)
        return {"measured": measured, **plain, **({"blended": blended} if blended else {})}

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Record:
        """Return the record in plain data. Raises KeyError, TypeError or ValueError where they have another form."""
        measured = None if data["measured"] is None else _parse(data["measured"])
        blended = {float(share): _parse(each) for share, each in data.get("blended", {}).items()}
        return cls(measured, data.get("trained", 0), data.get("diverged", ""), data.get("steps", 0), blended)


def _plain(measured: Measured) -> dict[str, Any]:
    """Return the losses as plain data, without fields that were not measured."""
    return {name: {k: v for k, v in vars(loss).items() if v != ()} for name, loss in measured.items()}


def _parse(measured: dict[str, Any]) -> Measured:
    """Return the losses by text that plain data describe."""
    return {name: SourceLoss.parse(source) for name, source in measured.items()}


@dataclass
class Records:
    """The records of a study, in the parent folder of its work folder `work`.

    With `take_over`, records that this user did not write here count too; a note reports them. By the run's name,
    `found` has the parsed records, `entries` the lines of the file, and `written` the digests of the entries that this
    user wrote or accepted here.
    """

    work: Path
    take_over: bool
    say: Callable[[str], None]
    found: dict[str, Record] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    fingerprint: str = ""
    written: dict[str, str] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """Path of the file that contains all records."""
        return self.work.parent / RUNS_FILE

    def check_study(self, fingerprint: str) -> None:
        """Load the records, and set the fingerprint of the study that they belong to.

        Raises BadInput where the folder contains finished runs of another study, files that are damaged, or, without
        `take_over`, records that this user did not write here.
        """
        file = self.work / STUDY_FILE
        there = read_packed(self.file) or Packed(fingerprint, {})
        finished = len(there.records)
        try:
            begun = read_signed(file)
            study = {} if begun is None else begun.data
            others = {there.study, study.get("fingerprint", fingerprint)} - {fingerprint}
            written = {str(key): str(digest) for key, digest in study.get("written", {}).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise _damaged(file, str(error)) from None
        if others and finished:
            raise BadInput(
                f"{printable(str(self.work.parent))}: holds runs of another study (the base, its texts, steps or"
                " settings differ, or surgeon's version); undo the change, or choose another folder for RESULTS"
            )
        if others:
            self._clear()
            begun, written = None, {}
        origin = begun or (UNSIGNED if finished else None)
        holds = f"this study, {finished} losses measured" if finished else "the beginning of this study"
        place = self.file if begun is None else self.work
        check_own(origin, place, holds, take_over=self.take_over, say=self.say)
        self.fingerprint, self.written, self.entries = fingerprint, written, dict(there.records)
        if origin is None or not origin.here:
            self._write_study()

    def _write_study(self) -> None:
        """Write study.json, signed."""
        write_signed(self.work / STUDY_FILE, {"fingerprint": self.fingerprint, "written": self.written})

    def _clear(self) -> None:
        """Remove all files of a study that has no finished run, such as the text that its base wrote."""
        for entry in self.work.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name not in (LOCK_FILE, STUDY_FILE):
                entry.unlink()

    def get(self, key: str, fingerprint: str) -> Record | None:
        """Return the record of a run; None where the run is not finished.

        Raises BadInput where the record has another fingerprint, is damaged, or, without `take_over`, was not written
        here by this user.
        """
        if key in self.found or key not in self.entries:
            return self.found.get(key)
        entry, shown = self.entries[key], f"{printable(str(self.file))}: {printable(key)}"
        if entry.get("fingerprint") != fingerprint:
            raise BadInput(
                f"{shown}: a run of another method of this name (its plan, remedy or training differs); give the method"
                " another `name:`, or choose another folder for RESULTS"
            )
        try:
            record = Record.parse(entry["record"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(self.file, f"{key}: {error}") from None
        if self.written.get(key) != digest(entry):
            holds = f"losses of {printable(key)}"
            check_own(UNSIGNED, self.file, holds, take_over=self.take_over, say=self.say, again="measure them again")
            self._note(key)
        self.found[key] = record
        return record

    def add(self, key: str, fingerprint: str, record: Record) -> None:
        """Add the record of a finished run, and write it to disk."""
        self.entries[key] = {"fingerprint": fingerprint, "record": record.to_json()}
        # Write the digest first: if the process is killed in between, a record without digest would count as foreign.
        self._note(key)
        write_durably(self.file, packed(Packed(self.fingerprint, self.entries)))
        self.found[key] = record

    def _note(self, key: str) -> None:
        """Add the digest of a run's entry to study.json."""
        self.written[key] = digest(self.entries[key])
        self._write_study()


def digest(content: Any) -> str:
    """Return the SHA-256 digest of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def losses_of(
    record: Record,
    names: tuple[list[str], list[str]],
    *,
    by_byte: bool,
    documents: Mapping[str, Sequence[int]] | None = None,
    share: float = 1.0,
) -> tuple[float, float]:
    """Return (mean loss on the new texts, mean loss on the original texts); both infinite where not measured.

    Args:
        record: The result of a run.
        names: The names of the new texts and of the original ones.
        by_byte: Whether losses are in bits a byte; else they are in nats a token.
        documents: By text, the documents that count; None: all.
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
