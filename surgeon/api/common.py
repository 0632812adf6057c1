"""What every room of the API needs: a listener that is silent, manifests, the way to OUT, its troubles."""

from __future__ import annotations

import errno
from pathlib import Path

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.staging import check_destination, check_space
from surgeon.errors import BadInput, printable
from surgeon.execute import Job, Listener, execute
from surgeon.manifest import MANIFEST_FILE, Manifest, parse
from surgeon.ranks import Ranks
from surgeon.stopwatch import Stopwatch


class Quiet:
    """A listener that keeps what is said and shows nothing."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def begin(self, stage: str, total: int, unit: str = "bytes") -> None:
        """Nothing to show."""

    def advance(self, count: int) -> None:
        """Nothing to show."""

    def rename(self, stage: str) -> None:
        """Nothing to show."""

    def say(self, line: str) -> None:
        """Kept in `said`."""
        self.said.append(line)


def manifest_of(folder: CheckpointFolder) -> Manifest:
    """The manifest of an output of surgeon; BadInput for any other checkpoint."""
    if folder.manifest is None:
        raise BadInput(
            f"{printable(str(folder.path))}: no {MANIFEST_FILE}, so this is not an output of surgeon (or it was"
            " saved again by another tool, which leaves that file out)"
        )
    return parse(folder.manifest, file=str(folder.path / MANIFEST_FILE))


def check_way(job: Job, base: Path, out: Path) -> None:
    """BadInput where `out` is taken, or stands in `base`, or the disk has no room for what the job writes."""
    check_destination(out, base)
    check_space(out, job.bytes_to_write, fingerprint=job.fingerprint)


def written(job: Job, out: Path, listener: Listener, stopwatch: Stopwatch, ranks: Ranks) -> Manifest | None:
    """Carry out a job; BadInput where the disk, or what is read, gives trouble."""
    try:
        return execute(job, out, listener, stopwatch, ranks)
    except OSError as error:
        raise BadInput(disk_trouble(error, out)) from error


def disk_trouble(error: OSError, out: Path) -> str:
    """What to tell of an error while `out` was being written: where, what, and that nothing finished is lost."""
    where = printable(str(error.filename or out))
    working = printable(str(out.parent / f".{out.name}.surgeon"))
    staged = f"what was finished is kept in {working}: the same command continues"
    if error.errno == errno.ENOSPC:
        return f"{where}: the disk is full; make room and run the same command again ({staged})"
    return f"{where}: {error.strerror or error}; {staged}"
