"""The tasks of a worker: let the base write text, grow a model by a plan, train and measure a run, measure the base.

A run is trained by `surgeon.train` from a config. Its losses, and the losses of its blends with the base, are measured
by `surgeon.evaluate`'s functions on held-out text. Tasks and answers are plain data, so they can be carried out in any
process.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surgeon import (
    HeldOut,
    apply,
    cut,
    discard_run,
    load_config,
    open_checkpoint,
    open_source,
    open_texts,
    recall,
    score,
    train,
    write_blend,
)
from surgeon.common.devices import one_thread
from surgeon.common.listener import Listener, Quiet
from surgeon.common.plugins import blamed
from surgeon.errors import BadInput, Diverged, Mistakes, SurgeonError
from surgeon.lab.studies.budget import Deadline
from surgeon.lab.studies.config.settings import RECALLED, seeded_plan
from surgeon.lab.studies.records import Measured, Record, SourceLoss
from surgeon.lab.studies.schedule import Run

Task = dict[str, Any]
Answer = dict[str, Any]

# Windows in one forward pass.
_BATCH = 8
# Held-out texts by the study's fingerprint, opened once for all runs of a study.
_held: dict[str, list[HeldOut]] = {}


class _Progress(Quiet):
    """A listener that tells at every hundredth of a stage how far it is."""

    def __init__(self, tell: Callable[[str], None], what: str) -> None:
        super().__init__()
        self._tell, self._what = tell, what

    def begin(self, stage: str, total: int, unit: str = "bytes") -> None:
        """Begin a stage."""
        self._stage, self._total, self._done = stage, max(1, total), 0

    def advance(self, count: int) -> None:
        """Count units of the stage; tell where a further hundredth is done."""
        before, self._done = self._done, self._done + count
        if 100 * before // self._total < 100 * self._done // self._total:
            self._tell(f"{self._what}: {self._stage} {self._done:,} of {self._total:,}")


def carry_out(task: Task, tell: Callable[[str], None] = lambda _text: None) -> Answer:
    """Carry out a task; return its result with `seconds`, or `error` with lines that explain what is wrong.

    `tell` receives how far it is.
    """
    listener = _Progress(tell, Run(*task["run"]).words if "run" in task else task.get("method", "the base"))
    begun = time.perf_counter()
    try:
        with one_thread():
            found = _TASKS[task["do"]](task, listener)
    except SurgeonError as error:
        lines = list(error.lines) if isinstance(error, Mistakes) else [str(error)]
        return {"error": lines}
    except BaseException as error:
        if (refusal := blamed(error)) is None:
            raise
        return {"error": [str(refusal)]}
    return {**found, "seconds": round(time.perf_counter() - begun, 3)}


def _recall(task: Task, listener: Listener) -> Answer:
    """Let the base write text; return the number of its tokens."""
    made = recall(
        task["base"],
        revision=task["revision"],
        to=task["to"],
        **task["asked"],
        once=True,
        take_over=task["take_over"],
        device=task["device"],
        trust_remote_code=task["trust_remote_code"],
        listener=listener,
    )
    return {"tokens": made.counts.tokens}


def _grow(task: Task, listener: Listener) -> Answer:
    """Grow the base by a plan with the task's seed."""
    apply(
        seeded_plan(task["plan"], task["source"], task["seed"]),
        task["base"],
        task["to"],
        revision=task["revision"],
        device=task["device"],
        trust_remote_code=task["trust_remote_code"],
        listener=listener,
    )
    return {}


def _run(task: Task, listener: Listener) -> Answer:
    """Train a run and measure it and its blends; a run that diverges gets no losses, but the reason."""
    target = Path(task["to"])
    if target.exists():
        # Left by a study that was interrupted between training and measuring.
        shutil.rmtree(target)
    try:
        trained = train(
            task["out"],
            task["config"],
            target,
            device=task["device"],
            trust_remote_code=task["trust_remote_code"],
            listener=listener if task["limit"] is None else Deadline(*task["limit"]),
        )
    except Diverged as error:
        discard_run(target)
        return Record(None, diverged=str(error)).to_json()
    assert trained is not None
    measured = _measured(task, target)
    odd = next((name for name, source in measured.items() if not math.isfinite(source.loss)), None)
    blended = {} if odd else _blended(task, target)
    if not task["keep"]:
        shutil.rmtree(target)
    if odd is not None:
        why = f"the held-out loss on {odd} is {measured[odd].loss} after the last step"
        return Record(None, diverged=why).to_json()
    return Record(measured, trained.parameters, steps=trained.settings["steps"], blended=blended).to_json()


def _blended(task: Task, run: Path) -> dict[float, Measured]:
    """Return the losses of the run blended with the base, by the run's share; empty where the run cannot be blended."""
    target, found = run.with_name(f"{run.name}+blend"), {}
    for share in task["blend"]:
        shutil.rmtree(target, ignore_errors=True)
        try:
            write_blend(run, target, base=task["base"], alpha=share, trust_remote_code=task["trust_remote_code"])
        except BadInput:
            # The grown parts were neither silent nor copies at birth. The results name such methods.
            return {}
        found[share] = _measured(task, target)
        shutil.rmtree(target)
    return found


def _texts(task: Task, listener: Listener) -> Answer:
    """Read all texts to the end, to find errors before long work; measured texts must have held-out documents."""
    seen: set[tuple[Any, ...]] = set()
    for path in task["configs"]:
        config = load_config(Path(path))
        for source in config.config.sources:
            known = (source.path, source.field, source.kind, source.validation)
            if known not in seen and source.name != RECALLED:
                open_source(source, config)
            seen.add(known)
    if given := [name for name in task["names"] if name != RECALLED]:
        open_texts(task["measure"], only=given, most=task["documents"])
    return {}


def _base(task: Task, listener: Listener) -> Answer:
    """Measure the base."""
    return Record(_measured(task, Path(task["base"]))).to_json()


def _measured(task: Task, folder: Path) -> Measured:
    """Return a checkpoint's losses on the study's held-out texts."""
    held = _held.get(task["study"])
    if held is None:
        _held.clear()
        held = open_texts(task["measure"], only=task["names"], most=task["documents"])
        _held[task["study"]] = held
    checkpoint = open_checkpoint(folder, trust_remote_code=task["trust_remote_code"])
    model, found = checkpoint.load(device=task["device"]), {}
    for name, windows in cut(held, checkpoint, length=task["length"]).items():
        scores = score(model, windows, batch=_BATCH)
        nats, tokens = scores.nats.round(4).tolist(), scores.tokens.tolist()
        found[name] = SourceLoss(
            documents=windows.documents,
            tokens=int(scores.tokens.sum()),
            nbytes=int(windows.nbytes.sum()),
            loss=scores.loss,
            bits_per_byte=scores.bits_per_byte(windows).value,
            by_document=tuple(zip(nats, tokens, windows.nbytes.tolist(), strict=True)),
        )
    return found


_TASKS: dict[str, Callable[[Task, Listener], Answer]] = {
    "texts": _texts,
    "recall": _recall,
    "grow": _grow,
    "run": _run,
    "base": _base,
}
