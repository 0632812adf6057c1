"""RESULTS/runs.jsonl.gz: all records of a study in one file, which is what to keep, to commit or to give away.

Its first line names the study by its fingerprint; each further line is one record: the run's name, the fingerprint of
its method, and what it found. A study goes on from this file where its work folder has no record of a run.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.common.work_folders import parse_record, read_own, record_of
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
