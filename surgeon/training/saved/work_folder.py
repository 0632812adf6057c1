"""The folder of a run's checkpoints until the run is published: locked, begun by this user here, and for one run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from surgeon._version import __version__
from surgeon.common.cache import digest_of
from surgeon.common.signed import check_own
from surgeon.common.work_folders import WorkFolder, working_in
from surgeon.errors import BadInput, printable
from surgeon.training.config.loading import LoadedConfig
from surgeon.training.config.settings import Settings
from surgeon.training.run import TrainingData
from surgeon.training.saved.checkpoints import RUN_FILE, RunRecord, newest_checkpoint


@contextlib.contextmanager
def own_work_folder(
    work: Path,
    target: Path,
    fingerprint: str,
    *,
    leads: bool,
    take_over: bool,
    say: Callable[[str], None],
    decided: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[WorkFolder | None]:
    """Lock the work folder within the context, and yield it; processes that do not lead get None.

    `decided` is recorded where the run begins (`RunRecord.decided`).
    The folder is removed where this call made it and fails before its first checkpoint. Raises BadInput where it
    belongs to another run or another user, where another process has locked it, and, without `take_over`, where this
    user did not begin it in this place.
    """
    if not leads:
        yield None
        return
    there = work.exists()
    with working_in(work, target=target, marker=RUN_FILE) as folder:
        try:
            _begin_or_go_on(work, fingerprint, decided, take_over=take_over, say=say)
            yield folder
        except Exception:
            # Only while this process has the lock: without it, another process may own the folder.
            with contextlib.suppress(OSError, BadInput):
                folder.check_there()
                if not there and newest_checkpoint(work) is None:
                    folder.remove(last=RUN_FILE)
            raise


def _begin_or_go_on(
    work: Path, fingerprint: str, decided: Mapping[str, Any], *, take_over: bool, say: Callable[[str], None]
) -> None:
    """Write the record of a run that begins, or check the record of one that continues.

    Raises BadInput where the record is another run's, or came from elsewhere without `take_over`.
    """
    found = RunRecord.read_with_origin(work)
    if found is None:
        check_own(None, work, "", take_over=take_over, say=say)
        RunRecord(fingerprint, decided=dict(decided)).write(work)
        return
    record, origin = found
    if record.fingerprint != fingerprint:
        raise BadInput(
            f"{printable(str(work))}: holds checkpoints of another run (config, data or output differ); remove"
            " it, or train to another folder"
        )
    last = max((int(step) for step in record.checkpoints if step.isdecimal()), default=0)
    holds = f"checkpoints of this run, the last of step {last}" if last else "the beginning of this run"
    check_own(origin, work, holds, take_over=take_over, say=say)
    if not origin.here:
        record.write(work)


def fingerprint_of(loaded: LoadedConfig, settings: Settings, held: dict[str, str], data: TrainingData) -> str:
    """Return a digest of all that the run's numbers depend on.

    The number of processes and options about memory or logging are not in it.

    Args:
        loaded: the training config.
        settings: the run's numbers.
        held: the digests of all tensors of the output.
        data: the texts.
    """
    numbers = settings.to_json()
    for key in ("micro_batch", "accumulation"):
        numbers.pop(key)
    about_memory = {"micro_batch", "checkpointing", "cross_entropy", "sharding"}
    config = loaded.config.model_dump(mode="json", exclude={"log_every", "report_to", *about_memory})
    for source in config["sources"]:
        # The data's identity has the commit, so a run continues after its branch has moved.
        source.pop("revision")
    content = {
        "version": __version__,
        "config": config,
        "settings": numbers,
        "tensors": held,
        "data": [documents.identity() for documents in data.documents],
    }
    return digest_of(content)
