"""A run's checkpoints: one counts only while every file of it is what it was when it was written, and no file is more.

A checkpoint's `complete.json`, written last, has the digests of its files; `run.json`, which holds what the run is of,
has the digest of each `complete.json`, and is signed: it counts where this user wrote it, in this place.

One may be written beside the steps: what it holds is copied at its step, and a thread writes the copy. The thread only
writes. What needs other processes, the model or the optimizer is done at the step, by the thread that trains: gathering
shares, copying, random numbers. One checkpoint is written at a time.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from surgeon.common.signed import Signed, read_signed, write_signed
from surgeon.common.work_folders import read_own, sync, write_durably
from surgeon.errors import BadInput, printable

COMPLETE_FILE = "complete.json"
RUN_FILE = "run.json"
# transformers' own, with the log.
STATE_FILE = "trainer_state.json"

# The last, and the one before in case the last does not survive.
KEPT = 2

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")


@dataclass
class RunRecord:
    """`run.json`: the fingerprint of all that the run's numbers depend on, the held-out losses before the first step
    (None: not measured yet), of every checkpoint, by its step, the digest of its `complete.json`, and that of the files
    that each remedy keeps, by its key."""

    fingerprint: str
    first: dict[str, float] | None = None
    checkpoints: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, work: Path) -> RunRecord | None:
        """The record in a work folder, None where there is none. Raises BadInput for one that is not as it was."""
        found = cls.read_with_origin(work)
        return None if found is None else found[0]

    @classmethod
    def read_with_origin(cls, work: Path) -> tuple[RunRecord, Signed] | None:
        """The same, and who wrote it where."""
        try:
            signed = read_signed(work / RUN_FILE)
            if signed is None:
                return None
            record = cls(**signed.data)
            texts = [record.fingerprint, *record.kept.values(), *record.checkpoints.values()]
            numbers = [] if record.first is None else list(record.first.values())
            if not all(isinstance(text, str) for text in texts) or not all(isinstance(n, float) for n in numbers):
                raise TypeError("it is no record of a run")
        except (ValueError, TypeError, AttributeError) as error:
            raise BadInput(
                f"{printable(str(work / RUN_FILE))}: damaged or edited ({printable(str(error))}); remove"
                f" {printable(str(work))}, and the run starts from the beginning"
            ) from None
        return record, signed

    def has_kept(self, key: str, work: Path, *files: str) -> bool:
        """Whether files of the work folder are there and what `keep` wrote down of them."""
        try:
            return key in self.kept and self.kept[key] == _digest_of(work, files)
        except OSError:
            return False

    def keep(self, key: str, work: Path, *files: str) -> None:
        """Flush files of the work folder, and write down what they are."""
        for name in files:
            sync(work / name)
        self.kept[key] = _digest_of(work, files)
        self.write(work)

    def write(self, work: Path) -> None:
        """Replace the record in a work folder, durably."""
        write_signed(work / RUN_FILE, asdict(self))


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was taken."""
    found = _NAME.fullmatch(checkpoint.name)
    assert found, printable(checkpoint.name)
    return int(found[1])


def newest_checkpoint(work: Path) -> Path | None:
    """The checkpoint of the latest step that counts, every byte of it read. Raises BadInput as `RunRecord.read`."""
    record = RunRecord.read(work)
    if record is None:
        return None
    return next((folder for folder in reversed(_folders(work)) if damage(folder, record) is None), None)


def best_step(log: Iterable[Mapping[str, Any]], source: str) -> int | None:
    """Return the step of a trainer's log after which the held-out loss on a source was lowest, the first of equals."""
    key = f"eval_{source}_loss"
    found = [(float(entry[key]), int(entry["step"])) for entry in log if key in entry and math.isfinite(entry[key])]
    return min(found)[1] if found else None


def damage(checkpoint: Path, record: RunRecord) -> str | None:
    """Why a checkpoint does not count, in words; None where it does."""
    shown = printable(checkpoint.name)
    recorded = record.checkpoints.get(str(step_of(checkpoint)))
    try:
        marker = read_own(checkpoint / COMPLETE_FILE)
        if recorded is None or marker is None:
            return f"{shown} is not complete, or not this run's"
        if hashlib.sha256(marker).hexdigest() != recorded:
            return f"{shown}/{COMPLETE_FILE} is not the one that was written"
        files: dict[str, str] = json.loads(marker)["files"]
        there = {path.name for path in checkpoint.iterdir()} - {COMPLETE_FILE}
        if differing := sorted(files.keys() ^ there):
            missing = differing[0] in files
            return f"{shown}/{printable(differing[0])} {'is missing' if missing else 'was not written by the run'}"
        changed = sorted(name for name, digest in _digests(checkpoint, files).items() if digest != files[name])
    except (OSError, BadInput) as error:
        return f"{shown} cannot be read ({printable(str(error))})"
    return f"{shown}/{printable(changed[0])} is not what was written" if changed else None


def drop_what_does_not_count(work: Path, keep_best: str | None = None) -> list[str]:
    """Remove the checkpoints that a kill cut off, or that somebody or the disk changed; why, for each in words.

    With `keep_best`, a source, one goes too where the best checkpoint before it is gone, which would be published.
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
    """Flush a checkpoint's files, write down their digests, and let go of checkpoints before the last KEPT.

    That of the step `best` stays.
    """
    work, names = checkpoint.parent, [path.name for path in checkpoint.iterdir()]
    with ThreadPoolExecutor(1, thread_name_prefix="flush") as flusher:
        # Hashing takes the processor, flushing the disk.
        flushed = [flusher.submit(sync, checkpoint / name) for name in names]
        digests = _digests(checkpoint, names)
        for each in flushed:
            each.result()
    marker = json.dumps({"step": step, "files": digests}).encode()
    write_durably(checkpoint / COMPLETE_FILE, marker)
    sync(work)
    record = RunRecord.read(work)
    assert record is not None
    record.checkpoints[str(step)] = hashlib.sha256(marker).hexdigest()
    old = [folder for folder in _folders(work) if str(step_of(folder)) in record.checkpoints][:-KEPT]
    old = [folder for folder in old if step_of(folder) != best]
    for folder in old:
        del record.checkpoints[str(step_of(folder))]
    record.write(work)
    for folder in old:
        shutil.rmtree(folder)


def _folders(work: Path) -> list[Path]:
    return sorted((path for path in work.glob("checkpoint-*") if _NAME.fullmatch(path.name)), key=step_of)


def _digest_of(work: Path, files: Iterable[str]) -> str:
    """Digest files by their digests."""
    return hashlib.sha256("".join(file_digest(work / name) for name in files).encode()).hexdigest()


def _digests(folder: Path, names: Any) -> dict[str, str]:
    return {name: file_digest(folder / name) for name in names}


def file_digest(path: Path) -> str:
    """The SHA-256 of a file of ours; links are not followed."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Write = Callable[[], object]


def is_beside(setting: Literal["auto", "beside", "in_step"], *, copy_bytes: int, model_bytes: int) -> bool:
    """Whether checkpoints are written beside the steps; `auto`: where the copy is no larger than the model."""
    return setting == "beside" or (setting == "auto" and copy_bytes <= model_bytes)


class Saving:
    """Writes a checkpoint's files: at once, or beside the steps that follow.

    At its end as a context nothing is being written any more, whatever ended it. What the writing raised is raised
    where the next step begins, or the next checkpoint, or at the end, unless another error ends it.
    """

    def __init__(self, *, beside: bool) -> None:
        self._allowed = beside
        self.beside = False
        self._writes: list[Write] = []
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def begin(self, *, last: bool) -> None:
        """A checkpoint, once the one before is written; after the `last` step there is nothing to write beside.

        Raises what that one's writing raised.
        """
        self.wait()
        self.check()
        self.beside = self._allowed and not last
        self._writes = []

    def add(self, write: Write) -> None:
        """One file of it; where it is written beside, nothing else may change what `write` holds."""
        if self.beside:
            self._writes.append(write)
        else:
            write()

    def finish(self, write: Write) -> None:
        """The last of it, by which it counts."""
        self.add(write)
        if self.beside:
            writes, self._writes = self._writes, []
            self._writing = self._thread.submit(_in_turn, writes)

    def check(self) -> None:
        """Raise what the writing raised that is over."""
        if self._writing is not None and self._writing.done():
            over, self._writing = self._writing, None
            over.result()

    def wait(self) -> None:
        """Return when nothing is being written; an interruption of the waiting is raised then.

        Else the folder could be another process' while it is written to.
        """
        interrupted: KeyboardInterrupt | None = None
        while self._writing is not None and not self._writing.done():
            try:
                concurrent.futures.wait([self._writing])
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()
        if error is None:
            self.check()


def _in_turn(writes: list[Write]) -> None:
    """Each is let go of, with the tensors in it, as soon as it is done."""
    writes.reverse()
    while writes:
        writes.pop()()
