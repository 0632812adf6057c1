"""`surgeon continual`: learn tasks in order, each with a surgery, a training, and a measurement of all tasks so far."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon import LoadedPlan, open_checkpoint, preview
from surgeon.common import devices
from surgeon.common.disk_space import writing
from surgeon.common.distributed import Ranks
from surgeon.common.files import read_given
from surgeon.common.listener import Listener, Quiet
from surgeon.errors import BadInput, printable
from surgeon.lab.courses.config.loading import LoadedTasks, at_line, check_tasks, check_texts, load_tasks, plans_of
from surgeon.lab.courses.metrics import measured_rows
from surgeon.lab.courses.results import Continued, ContinuedRows
from surgeon.lab.courses.results import continued_view as continued_view

if TYPE_CHECKING:
    from surgeon.lab.courses.course import Request

# The name that `add_record` gives to the file of measurements in a run.
RECORD_FILE = "continual.json"
_LARGEST_RECORD = 100_000_000


def continual(
    tasks: str | Path,
    base: str | Path,
    run: str | Path,
    *,
    overrides: Sequence[str] = (),
    texts: Mapping[str, Path | None] | None = None,
    row: str | None = None,
    revision: str | None = None,
    keep: bool = False,
    take_over: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Continued | ContinuedRows:
    """Learn tasks one after another, and publish the model after the last task as the folder `run`.

    For each task: a surgery (PMoE: add a slot), a training of the new tensors on the task's text and a little of the
    earlier tasks' text, and a measurement of all tasks so far. `run` is a complete checkpoint with the measurements in
    `continual.json`; at any moment it is absent or complete. The same call continues an interrupted one, between tasks
    and within a task. For a file with `rows`, each row is a run of its own in the folder `run`/ROW; complete rows are
    kept.

    Args:
        tasks: The tasks file, or the name of a shipped one.
        base: The base checkpoint: a folder or a Hub id.
        run: The folder of the model after the last task, or of the rows' runs.
        overrides: Values that replace the file's and its rows': `train.steps=10`.
        texts: Files by the names of sources; each replaces the `path` of its source.
        row: The only row to run.
        revision: Branch, tag or commit of a Hub id.
        keep: Whether the earlier tasks' runs are kept, in `run`-tasks.
        take_over: Whether to continue a run that this user did not begin in this place.
        device: auto, cpu or cuda.
        trust_remote_code: Whether the base's own code may run.
        listener: Receives progress and notes.

    Returns:
        Performance on every task after every task, and the paper's metrics; for a file with rows, by row.

    Raises:
        BadInput: The tasks file, its texts or the base are not valid, or changed since the run began; also the errors
            of `apply` and `train`.
    """
    devices.check(device)
    if Ranks.of_environment().size > 1:
        raise BadInput("torchrun: `surgeon continual` runs in one process; `surgeon train` takes several")
    given = {name: path for name, path in (texts or {}).items() if path is not None}
    rows = load_tasks(tasks, overrides, texts=given, row=row)
    whole = Path(run)
    if "" not in rows:
        _check_room(whole)
    from surgeon.lab.courses.course import Request

    listener, device = listener or Quiet(), devices.resolve(device)
    # Check all rows before the first one begins, and what needs no weights before the base is opened.
    plans = {
        name: _checked(loaded, base, revision, trust_remote_code=trust_remote_code) for name, loaded in rows.items()
    }
    # All tasks use the commit that is read here, even if the branch moves during a long run.
    opened = open_checkpoint(base, revision=revision, trust_remote_code=trust_remote_code)
    for name, loaded in rows.items():
        check_tasks(loaded, plans[name], opened)

    @cache
    def digests() -> Mapping[str, str]:
        """Return the base's digests; the whole base is read, once for all rows."""
        listener.begin("reading", opened.nbytes)
        return opened.digests(listener.advance)

    requests = {
        name: Request(
            loaded,
            plans[name],
            opened,
            digests,
            whole / name,
            keep,
            device,
            trust_remote_code,
            listener,
            take_over,
        )
        for name, loaded in rows.items()
    }
    if "" in requests:
        return _carried_out(requests[""])
    whole.mkdir(exist_ok=True)
    done: dict[str, Continued] = {}
    for name, each in requests.items():
        listener.say(f"row {len(done) + 1} of {len(requests)}: {name}")
        done[name] = _complete(each) or _carried_out(each)
    return ContinuedRows(whole, done)


def _check_room(folder: Path) -> None:
    """Raise BadInput where the runs of rows cannot be written into `folder`."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()) or (folder / "config.json").exists():
        raise BadInput(f"{printable(str(folder))}: exists, and holds no rows' runs; choose another folder")
    if not folder.absolute().parent.is_dir():
        raise BadInput(f"{printable(str(folder))}: its folder does not exist; make it first")


def _carried_out(request: Request) -> Continued:
    """Make the rest of a run, and return its results. Raises BadInput, and the errors of `apply` and `train`."""
    from surgeon.lab.courses.course import run_course

    with writing(request.target, kept="what is complete is kept: the same command continues"):
        return run_course(request)


def _complete(request: Request) -> Continued | None:
    """Return the results of a row that an earlier call completed; None where it is not complete.

    Raises BadInput where the folder has the results of another run.
    """
    from surgeon.lab.courses.course import State, is_under_way

    file = request.target / RECORD_FILE
    if not os.path.lexists(file) or is_under_way(request.target):
        return None
    try:
        record = json.loads(read_given(file, what="record", most=_LARGEST_RECORD))
        rows = measured_rows(record["measured"])
        found = request.continued(State(record["fingerprint"], rows, record["trainings"]))
        # Raise for a record that lacks a task: its metrics cannot be computed.
        found.text()
    except (ValueError, TypeError, KeyError, AttributeError, LookupError, ZeroDivisionError):
        raise BadInput(
            f"{printable(str(file))}: damaged or edited; move {printable(str(request.target))} away, and the row is"
            " run again"
        ) from None
    if found.fingerprint != request.fingerprint:
        raise BadInput(
            f"{printable(str(request.target))}: of another run (the tasks file, its texts, the base or surgeon"
            " changed); undo the change, or choose another RUN"
        )
    request.listener.say(f"{printable(str(request.target))} was already complete")
    return found


def _checked(
    loaded: LoadedTasks, base: str | Path, revision: str | None, *, trust_remote_code: bool
) -> list[LoadedPlan | None]:
    """Check the tasks' texts and the first task's plan on the base; return each task's plan (None: it adds nothing).

    Raises BadInput for texts and plans that are not valid, and for a first plan that the base refuses.
    """
    check_texts(loaded)
    plans = plans_of(loaded)
    if plans[0] is not None:
        with at_line(loaded, 0):
            preview(plans[0], base, revision=revision, trust_remote_code=trust_remote_code)
    return plans
