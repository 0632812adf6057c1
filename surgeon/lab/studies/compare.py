"""`surgeon compare`: compare ways of learning new text on a base, by the frontiers of finished runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon import Checkpoint, is_chat, open_checkpoint, preview
from surgeon.common import devices
from surgeon.common.disk_space import writing
from surgeon.common.distributed import Ranks
from surgeon.common.formatting import count
from surgeon.common.json_results import plain_fields
from surgeon.common.listener import Listener, Quiet
from surgeon.common.tables import FittedTable
from surgeon.common.work_folders import working_in, write_durably
from surgeon.errors import BadInput, bad_input, printable
from surgeon.lab.studies.config.loading import GROUPS, LoadedStudy, load_study, source_of
from surgeon.lab.studies.config.settings import suited
from surgeon.lab.studies.findings import Findings, Remedied
from surgeon.lab.studies.frontier import Interval
from surgeon.lab.studies.page import render
from surgeon.lab.studies.records import RUNS_FILE, STUDY_FILE

if TYPE_CHECKING:
    from surgeon.lab.studies.study import Request

PAGE_FILE, RESULTS_FILE, WORK_FOLDER, KEPT_FOLDER = "comparison.html", "results.json", "work", "runs"

# Memory of a run: this multiple of the base's bytes (weights; masters, moments and gradients in float32; activations),
# and this many bytes for the process itself.
_TIMES_BASE, _A_PROCESS = 16, 1_500_000_000


@dataclass(frozen=True)
class Compared:
    """A study's results in the folder `path`: the page, results.json, and the records that a later call continues.

    `made` is the number of runs that this call made, `seconds` their mean time (None: no run was made).
    """

    path: Path
    findings: Findings
    made: int
    seconds: float | None

    def __repr__(self) -> str:
        runs = sum(row.runs for row in self.findings.rows)
        return f"Compared({str(self.path)!r}, {runs} runs, {len(self.findings.missing)} rows with runs still to make)"

    @property
    def page(self) -> Path:
        """Path of the HTML page."""
        return self.path / PAGE_FILE

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`: the content of `results.json`, and facts about this call.

        Keys:
            `path`, `page`: the folder, and the HTML page in it (not in `results.json`)
            `made`: how many runs this call made (not in `results.json`)
            `seconds`: their mean time (null: none; not in `results.json`)
        """
        return {
            **plain_fields(self, without=("findings",)),
            "page": str(self.page),
            **self.findings.to_json(),
        }


def compare(
    study: str | Path,
    base: str | Path,
    results: str | Path,
    *,
    overrides: Sequence[str] = (),
    new: Sequence[str | Path] = (),
    original: Sequence[str | Path] = (),
    replayed: Sequence[str | Path] = (),
    minutes: float | None = None,
    jobs: int | None = None,
    keep: bool = False,
    take_over: bool = False,
    revision: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Compared:
    """Compare the methods of a study on `base` by finished runs, and write the results into a folder.

    Every run is made as `train` makes it, and measured on held-out text as `evaluate` measures. Learning rates are
    added while the best rate lies at an end. The same call continues where an earlier call was interrupted. A call with
    more methods, rates or seeds keeps the finished runs. All results of runs are in runs.jsonl.gz, and a call can
    continue from that file only.

    Args:
        study: The study's file, or the name of a shipped one.
        base: The base checkpoint: a folder or a Hub id.
        results: The folder of the page and the records.
        overrides: Values that replace the study's: `steps=100`.
        new: Texts to learn (files, or `NAME=FILE`), in place of the study's.
        original: Texts that must not be forgotten, in place of the study's.
        replayed: Texts to replay, in place of the study's.
        minutes: The time limit. What does not fit is left out for all rows alike: seeds first, then rates at the ends.
        jobs: Runs at a time; None: as many as cores, memory and GPUs allow.
        keep: Whether trained models are kept once they are measured.
        take_over: Whether records count that this user did not write in this place.
        revision: Branch, tag or commit of a Hub id.
        device: auto, cpu or cuda.
        trust_remote_code: Whether the base's own code may run.
        listener: Receives progress and notes.

    Returns:
        The results, the number of runs that this call made, and their mean time in seconds.

    Raises:
        BadInput: The study, its texts or the base are not valid; also the errors of `train`.
    """
    listener = listener or Quiet()
    _check_options(device, jobs, minutes)
    loaded = load_study(study, overrides, new=new, original=original, replayed=replayed)
    target = Path(results)
    opened = open_checkpoint(base, revision=revision, trust_remote_code=trust_remote_code)
    loaded = _fitted(loaded, opened, target, trust_remote_code=trust_remote_code)
    for note in loaded.notes:
        listener.say(note)

    from surgeon.lab.studies.study import Request

    device, kept = devices.resolve(device), target / KEPT_FOLDER if keep else None
    gpus = _gpus() if device == "cuda" else 0
    request = Request(
        loaded, opened, target / WORK_FOLDER, kept, device, trust_remote_code, minutes, listener, take_over
    )
    return _carried_out(request, target, jobs or _jobs(opened, gpus), gpus)


def _check_options(device: str, jobs: int | None, minutes: float | None) -> None:
    """Raise BadInput for a device that is not allowed, a number that is not positive and finite, and under torchrun."""
    if device.startswith("cuda:"):
        raise BadInput(f"--device {printable(device)}: runs take auto, cpu or cuda; CUDA_VISIBLE_DEVICES chooses")
    devices.check(device)
    if Ranks.of_environment().size > 1:
        raise BadInput("torchrun: `surgeon compare` starts its own processes (--jobs); run it without torchrun")
    for option, given in (("--jobs", jobs), ("--minutes", minutes)):
        if given is not None and not (given > 0 and math.isfinite(given)):
            raise BadInput(f"{option} {given:g}: give a number above 0")


def _fitted(loaded: LoadedStudy, base: Checkpoint, target: Path, *, trust_remote_code: bool) -> LoadedStudy:
    """Return the study with the settings chosen that its file leaves open because they depend on the base.

    Raises BadInput where the base, the folder of results or a method's plan does not allow the study.
    """
    _check_base(base, loaded)
    loaded = suited(loaded, base)
    _check_place(target, base)
    # Every run uses the commit that was read here, even if the branch moves later.
    _check_plans(loaded, base.name, base.revision, trust_remote_code=trust_remote_code)
    return loaded


def _carried_out(request: Request, target: Path, jobs: int, gpus: int) -> Compared:
    """Make the runs that are left, `jobs` at a time, and write the page and results.json from all finished runs."""
    from surgeon.lab.studies.study import Course
    from surgeon.lab.studies.workers import Here, Processes

    with writing(target, kept="what is finished is kept: the same command goes on"):
        target.mkdir(exist_ok=True)
        if request.kept is not None:
            _make_kept(request.kept)
        with working_in(request.work, target=target, marker=STUDY_FILE):
            course = Course.open(request)
            tell = request.listener.rename
            workers = Here(tell) if jobs == 1 else Processes(jobs, logs=request.work, gpus=gpus, tell=tell)
            try:
                with workers:
                    course.carry_out(workers)
            finally:
                # Finished runs are shown even where the study was interrupted or failed.
                if course.begun:
                    write_study(target, course.findings())
            return Compared(
                target,
                course.findings(),
                len(course.budget.made),
                course.budget.each if course.budget.made else None,
            )


def write_study(target: Path, found: Findings) -> None:
    """Write results.json and the page into the folder of a study."""
    write_durably(target / RESULTS_FILE, json.dumps(found.to_json(), indent=1, ensure_ascii=False) + "\n")
    write_durably(target / PAGE_FILE, render(found))


def _check_base(base: Checkpoint, loaded: LoadedStudy) -> None:
    """Raise BadInput for an encoder, a context shorter than a sequence, and chats without a chat template."""
    shown = printable(str(base.path))
    if base.is_encoder:
        raise BadInput(f"{shown}: an encoder, which predicts no next token; a study is of causal language models")
    context = base.context
    if context is not None and loaded.config.length > context:
        raise BadInput(
            f"{loaded.where('length')}`length` is {loaded.config.length}, the base's context {context}; use {context}"
            " at most"
        )
    texts = ((group, text) for group in GROUPS for text in getattr(loaded.config, group))
    chats = ((group, text) for group, text in texts if is_chat(source_of(text), loaded))
    if base.chat_template is None and (chat := next(chats, None)) is not None:
        group, text = chat
        raise BadInput(
            f"{loaded.where(group)}`{printable(text.called)}` holds chats, and {shown} has no chat template,"
            " with which it would be measured; add chat_template.jinja there"
        )


def _check_place(target: Path, base: Checkpoint) -> None:
    """Raise BadInput where results cannot be written to `target`.

    It must not be a file, overlap the base's folder, or contain files that belong to no study; its parent must exist.
    """
    shown = printable(str(target))
    if target.exists() and not target.is_dir():
        raise BadInput(f"{shown}: a file; RESULTS is a folder, give another name")
    if not target.exists() and not target.parent.is_dir():
        raise BadInput(f"{shown}: there is no folder {printable(str(target.parent))}; make it")
    resolved, own = target.resolve(), base.path.resolve()
    if resolved == own or own in resolved.parents or resolved in own.parents:
        raise BadInput(f"{shown}: is, holds or lies in the base; choose another folder for RESULTS")
    begun = (target / WORK_FOLDER / STUDY_FILE, target / RUNS_FILE)
    if target.is_dir() and not any(file.exists() for file in begun):
        strange = {path.name for path in target.iterdir()} - {WORK_FOLDER, KEPT_FOLDER}
        if strange:
            raise BadInput(f"{shown}: holds {printable(min(strange))}, and no study; choose a new folder for RESULTS")


def _make_kept(folder: Path) -> None:
    """Make the folder for kept runs. Raises BadInput where this folder, or an entry in it, is a symbolic link."""
    if not folder.is_symlink():
        folder.mkdir(exist_ok=True)
    for path in (folder, *sorted(folder.iterdir())):
        if path.is_symlink():
            raise BadInput(
                f"{printable(str(path))}: a link; --keep puts runs there, in the place of earlier ones: remove the link"
            )


def _check_plans(loaded: LoadedStudy, base: str | Path, revision: str | None, *, trust_remote_code: bool) -> None:
    """Raise BadInput that lists every plan that does not fit this base."""
    wrong = []
    for name, plan in loaded.plans.items():
        try:
            preview(plan, base, revision=revision, trust_remote_code=trust_remote_code)
        except BadInput as error:
            wrong.append(f"{printable(str(loaded.source))}: method {name}: {error}")
    if wrong:
        raise bad_input(wrong)


def _gpus() -> int:
    """Return the number of CUDA devices."""
    import torch

    return torch.cuda.device_count()


def _jobs(base: Checkpoint, gpus: int) -> int:
    """Return how many runs to make at a time: the number of GPUs, or what CPU cores and free memory allow."""
    if gpus:
        return gpus
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = devices.free_memory("cpu") or 0
    each = _TIMES_BASE * base.nbytes + _A_PROCESS
    return max(1, min(cores, free // each))


_CAPTION = "held-out loss, {unit}; each row's run with the smallest sum of both"


def compared_view(compared: Compared) -> RenderableType:
    """Return the study's results for the terminal.

    These are: what full fine-tuning beats, a row for each frontier, remedies, claims, notes, the advice, and missing
    runs.
    """
    found = compared.findings
    new, original = found.start
    table = FittedTable("method")
    for column in ("trained", "rate", "new", "original", "forgets beside full", "area"):
        table.add_column(column)
    table.add_row(Text("(the base)", style="dim"), "", "", f"{new:.3f}", f"{original:.3f}", "", "")
    for row in found.rows:
        best = row.best
        table.add_row(
            printable(row.label),
            count(row.trained) if row.trained else "",
            "" if best is None else best.shown_rate,
            "no run yet" if best is None else f"{best.new:.3f}",
            "" if best is None else f"{best.original:.3f}",
            _interval_cell(row.against and row.against.difference),
            _interval_cell(row.area, signed=False),
        )
    parts: list[RenderableType] = []
    if found.first:
        parts += [Text(printable(found.first, 2000), style="bold yellow"), Text()]
    parts += [table, Text(_CAPTION.format(unit=found.unit), style="dim")]
    for each in found.remedies:
        parts.append(_remedied(each))
    for judged in found.claims:
        parts.append(
            Text(printable(f"{judged.verdict}: {judged.claim.says} ({judged.remedy}) ", 500))
            + Text(_interval_words(judged.apart.difference), style="dim")
        )
    parts += [Text(printable(note, 500), style="dim") for note in found.notes]
    parts += [Text(), Text(printable(found.advice, 2000), style="bold green")]
    if found.missing:
        parts.append(Text("still to be made (the same command goes on):", style="yellow"))
        parts += [Text(f"  {printable(line, 500)}", style="yellow") for line in found.missing]
    parts.append(Text(f"the page: {printable(str(compared.page))}"))
    return Group(*parts)


def _interval_cell(found: Interval | None, *, signed: bool = True) -> Text:
    """Return a mean with half its interval; empty for None."""
    if found is None:
        return Text()
    text = Text(f"{found.mean:{'+' if signed else ''}.3f}")
    return text if found.half is None else text.append(f" ± {found.half:.3f}", style="dim")


def _remedied(each: Remedied) -> Text:
    """Return a sentence that compares how much a method forgets with one remedy and with another."""
    line = Text(printable(f"{each.label}: {each.with_} ", 200))
    if each.apart.difference is None:
        return line.append(f"and {each.beside}: ").append(_interval_words(None), style="dim")
    mine, theirs = (_interval_cell(one, signed=False) for one in each.forgets)
    line.append("forgets ").append(mine).append(" at equal new loss, ").append(printable(each.beside)).append(" ")
    line.append(theirs).append("; ")
    if each.share is not None:
        line.append("that is ").append(_interval_cell(each.share, signed=False)).append(" of it; ")
    return line.append("lowest new loss ").append(_interval_cell(each.reach))


def _interval_words(found: Interval | None) -> str:
    """Return a difference with half its interval and its number of seeds, as text."""
    if found is None:
        return "no common range"
    half = "" if found.half is None else f" ± {found.half:.3f}"
    return f"{found.mean:+.3f}{half}, {found.seeds} seed{'s' if found.seeds > 1 else ''}"
