"""A run's checkpoints; a checkpoint counts only while its files are exactly those that were written, byte for byte.

`run.json`, the run's record, has the digests of the files of each checkpoint, and is written after them. It is signed,
and counts only where this user wrote it, in this place.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from surgeon.common.signed import Signed, read_signed, write_signed
from surgeon.common.work_folders import sync
from surgeon.errors import BadInput, printable

RUN_FILE = "run.json"
# The file of transformers' Trainer that has the log.
STATE_FILE = "trainer_state.json"

# How many checkpoints are kept: the last, and the one before in case the last is damaged.
KEPT = 2

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")


@dataclass
class RunRecord:
    """The content of `run.json`.

    `fingerprint` is the digest of all that the run's numbers depend on. `first` has the held-out losses before the
    first step (None: not measured yet). `checkpoints` has by step the digests of the checkpoint's files, by name, and
    `kept` the digests of files that remedies keep in the work folder. `decided` has the numbers that this machine's
    speed and memory decided: those of a `Budget`, and `micro_batch`.
    """

    fingerprint: str
    first: dict[str, float] | None = None
    checkpoints: dict[str, dict[str, str]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    decided: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, work: Path) -> RunRecord | None:
        """Read the record in a work folder; None where there is none. Raises BadInput where it is damaged or edited."""
        found = cls.read_with_origin(work)
        return None if found is None else found[0]

    @classmethod
    def read_with_origin(cls, work: Path) -> tuple[RunRecord, Signed] | None:
        """Return (record, signature, which shows who wrote it where); None where there is none. Raises as `read`."""
        try:
            signed = read_signed(work / RUN_FILE)
            if signed is None:
                return None
            record = cls(**signed.data)
            texts = [record.fingerprint, *record.kept.values()]
            texts += [digest for files in record.checkpoints.values() for digest in files.values()]
            numbers = [*(record.first or {}).values(), *map(float, record.decided.values())]
            if not all(isinstance(text, str) for text in texts) or not all(isinstance(n, float) for n in numbers):
                raise TypeError("it is no record of a run")
        except (ValueError, TypeError, AttributeError) as error:
            raise BadInput(
                f"{printable(str(work / RUN_FILE))}: damaged or edited ({printable(str(error))}); remove"
                f" {printable(str(work))}, and the run starts from the beginning"
            ) from None
        return record, signed

    def has_kept(self, work: Path, *files: str) -> bool:
        """Return whether files of the work folder exist with the digests that `keep` recorded."""
        try:
            return all(self.kept.get(name) == file_digest(work / name) for name in files)
        except OSError:
            return False

    def keep(self, work: Path, *files: str) -> None:
        """Flush files of the work folder, and record their digests."""
        for name in files:
            sync(work / name)
        self.kept |= _digests(work, files)
        self.write(work)

    def write(self, work: Path) -> None:
        """Replace the record in a work folder, durably."""
        write_signed(work / RUN_FILE, asdict(self))


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written."""
    found = _NAME.fullmatch(checkpoint.name)
    assert found, printable(checkpoint.name)
    return int(found[1])


def newest_checkpoint(work: Path) -> Path | None:
    """Return the latest checkpoint that counts, after reading every byte of it; None where no checkpoint counts.

    Raises BadInput as `RunRecord.read`.
    """
    record = RunRecord.read(work)
    if record is None:
        return None
    return next((folder for folder in reversed(_folders(work)) if damage(folder, record) is None), None)


def best_step(log: Iterable[Mapping[str, Any]], source: str) -> int | None:
    """Return the first step in a log with the lowest finite held-out loss on a source; None: no such loss is logged."""
    key = f"eval_{source}_loss"
    found = [(float(entry[key]), int(entry["step"])) for entry in log if key in entry and math.isfinite(entry[key])]
    return min(found)[1] if found else None


def damage(checkpoint: Path, record: RunRecord) -> str | None:
    """Return in words why a checkpoint does not count; None where it counts."""
    shown = printable(checkpoint.name)
    recorded = record.checkpoints.get(str(step_of(checkpoint)))
    if recorded is None:
        return f"{shown} is not complete, or not this run's"
    try:
        if differing := sorted(recorded.keys() ^ {path.name for path in checkpoint.iterdir()}):
            missing = differing[0] in recorded
            return f"{shown}/{printable(differing[0])} {'is missing' if missing else 'was not written by the run'}"
        changed = sorted(name for name, digest in _digests(checkpoint, recorded).items() if digest != recorded[name])
    except OSError as error:
        return f"{shown} cannot be read ({printable(str(error))})"
    return f"{shown}/{printable(changed[0])} is not what was written" if changed else None


def drop_what_does_not_count(work: Path, keep_best: str | None = None) -> list[str]:
    """Remove the checkpoints that are incomplete or were changed; return for each in words why.

    With `keep_best`, the name of a source, a checkpoint is also removed where the best checkpoint in its log does not
    count, because the run may have to publish that one.
    """
    record = RunRecord.read(work)
    assert record is not None
    found = [(folder, damage(folder, record)) for folder in _folders(work)]
    sound = {step_of(folder) for folder, wrong in found if wrong is None}
    for number, (folder, wrong) in enumerate(found):
        best = None
        if wrong is None and keep_best is not None:
            state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
            best = best_step(state["log_history"], keep_best)
        if best is not None and best not in sound:
            found[number] = folder, f"{folder.name} goes on from checkpoint-{best}, the best so far, which is gone"
            sound -= {step_of(folder)}
    for folder, wrong in found:
        if wrong is not None:
            shutil.rmtree(folder)
    return [wrong for _, wrong in found if wrong is not None]


def complete(checkpoint: Path, step: int, best: int | None = None) -> None:
    """Flush a checkpoint's files, record their digests, and remove all checkpoints before the last KEPT.

    The checkpoint of the step `best` is not removed.
    """
    work, names = checkpoint.parent, [path.name for path in checkpoint.iterdir()]
    for path in (*(checkpoint / name for name in names), checkpoint, work):
        sync(path)
    digests = _digests(checkpoint, names)
    record = RunRecord.read(work)
    assert record is not None
    record.checkpoints[str(step)] = digests
    old = [folder for folder in _folders(work) if str(step_of(folder)) in record.checkpoints][:-KEPT]
    old = [folder for folder in old if step_of(folder) != best]
    for folder in old:
        del record.checkpoints[str(step_of(folder))]
    record.write(work)
    for folder in old:
        shutil.rmtree(folder)


def _folders(work: Path) -> list[Path]:
    """Return the folders of checkpoints in a work folder, complete or not, sorted by step."""
    return sorted((path for path in work.glob("checkpoint-*") if _NAME.fullmatch(path.name)), key=step_of)


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the files `names` in a folder, by name."""
    return {name: file_digest(folder / name) for name in names}


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file that surgeon wrote; symbolic links are not followed."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
