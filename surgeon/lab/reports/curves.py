"""Curves of learning and forgetting: losses by source, from training runs in manifests or from a log."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.common.files import read_given
from surgeon.errors import BadInput, printable
from surgeon.lab.reports.history import History
from surgeon.manifest.manifest import AnswersEntry

MAX_LOG_BYTES = 64_000_000
# Prefix and suffix of a source's held-out loss in a trainer's log.
_BEFORE, _AFTER = "eval_", "_loss"
# The most sources in a log: the page places their labels next to each other.
_MOST_SOURCES = 200
# The most lengths of prefixes that are shown for a gate.
_LENGTHS = 16


@dataclass(frozen=True)
class Curve:
    """The losses on one source by step, in nats a token."""

    source: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class GateActivity:
    """The shares of held-out tokens for which a domain gate was open, measured after a run had fitted it.

    `shares` maps roles (new, original) to the share over all tokens. `by_length` maps lengths of prefixes to such maps.
    """

    shares: Mapping[str, float]
    by_length: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, figures: Mapping[str, Any] | None) -> GateActivity | None:
        """Return a manifest's figures of a gate as shares; None where a role has no valid share over all tokens."""
        if figures is None:
            return None
        lengths = figures.get("by_length")
        by_length = {
            name: _shares(zip(("original", "new"), both, strict=False))
            for name, both in itertools.islice(lengths.items() if isinstance(lengths, dict) else (), _LENGTHS)
            if isinstance(both, list)
        }
        shares = _shares((role, figures.get(role)) for role in ("original", "new"))
        return cls(shares, by_length) if len(shares) == 2 else None


def _shares(entries: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """Return the entries whose values are numbers from 0 to 1."""
    return {
        role: float(share)
        for role, share in entries
        if isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share <= 1
    }


@dataclass(frozen=True)
class TrainingRun:
    """One training run, as recorded in a manifest.

    `losses` maps sources to held-out losses before and after training, `curves` maps them to all measured losses by
    step. `changes` maps every trained tensor, by its name in the output of that surgery, to max |Δ| and ‖Δ‖ / ‖before‖
    (None: the tensor was zero before). `gate` describes the domain gate that the run fitted. `answers` says how near
    answers are to those before the run, where this was measured.
    """

    surgery: int
    steps: int
    tokens: int
    losses: dict[str, tuple[float, float]]
    changes: dict[str, tuple[float, float | None]]
    curves: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    gate: GateActivity | None = None
    answers: AnswersEntry | None = None

    @property
    def unchanged(self) -> tuple[str, ...]:
        """The tensors that trained but did not change."""
        return tuple(name for name, (largest, _) in self.changes.items() if largest == 0)


def training_runs(history: History) -> tuple[TrainingRun, ...]:
    """Return every training run of every known surgery, oldest first."""
    return tuple(
        TrainingRun(
            surgery=number,
            steps=entry.steps,
            tokens=entry.tokens,
            losses={
                name: (found[0], found[-1])
                for name, found in entry.losses.items()
                if found and all(map(math.isfinite, found))
            },
            changes={name: (tensor.max_change, tensor.relative_change) for name, tensor in entry.tensors.items()},
            curves={name: _points(by_step) for name, by_step in entry.curves.items()},
            gate=GateActivity.of(entry.gate),
            answers=entry.answers,
        )
        for number, manifest in history.surgeries.items()
        for entry in manifest.training
    )


def _points(by_step: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Return (step, loss) pairs from a manifest, sorted by step; losses that are not finite are left out."""
    found = ((int(step), loss) for step, loss in by_step.items() if re.fullmatch("[0-9]{1,15}", step))
    return tuple(sorted((step, loss) for step, loss in found if math.isfinite(loss)))


def curves_of(runs: Iterable[TrainingRun]) -> tuple[Curve, ...]:
    """Return each source's losses over all runs, with the steps of the runs added up.

    A run without recorded curves contributes the losses at its beginning and its end.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    step = 0
    for run in runs:
        for source, (before, after) in run.losses.items():
            measured = run.curves.get(source) or ((0, before), (run.steps, after))
            curves.setdefault(source, []).extend((step + at, loss) for at, loss in measured)
        step += run.steps
    return tuple(Curve(source, tuple(points)) for source, points in curves.items())


def read_curves(log: Path) -> tuple[Curve, ...]:
    """Return one curve per source, in the order of the log. Raises BadInput, which names the first bad line.

    A log contains JSON lines of `step`, `source` and `loss`, or it is the output of `surgeon train --json`. Lines
    without a loss, and losses that are not finite, are skipped.
    """
    shown = printable(str(log))
    content = read_given(log, what="log of losses", most=MAX_LOG_BYTES)
    curves: dict[str, list[tuple[int, float]]] = {}
    for number, entry in _entries(content, log):
        for source, loss in _losses(entry).items():
            step = entry.get("step")
            if type(step) is not int or not isinstance(loss, int | float) or not isinstance(source, str):
                raise BadInput(
                    f"{shown}, line {number}: expected a whole number as `step`, a text as `source`, a number as `loss`"
                )
            if math.isfinite(loss):
                curves.setdefault(source, []).append((step, float(loss)))
            if len(curves) > _MOST_SOURCES:
                raise BadInput(
                    f"{shown}: losses on more than {_MOST_SOURCES} sources, which no page shows; leave some out"
                )
    if not curves:
        raise BadInput(f'{shown}: no line has a loss; expected {{"step": …, "source": …, "loss": …}}')
    return tuple(Curve(source, tuple(sorted(points))) for source, points in curves.items())


def _entries(content: bytes, log: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, entry) for each entry; in the output of `surgeon train --json`, (position in the log, entry).

    Raises BadInput for content that is neither.
    """
    if content.startswith(b"{\n"):
        record = parse_json_strict(content, file=str(log), max_bytes=MAX_LOG_BYTES, constants=True)
        losses, logged = record.get("losses"), record.get("log")
        if not isinstance(losses, dict) or not isinstance(logged, list):
            raise BadInput(f"{printable(str(log))}: neither JSON lines nor the output of `surgeon train --json`")
        before = {name: both["before"] for name, both in losses.items() if isinstance(both, dict) and "before" in both}
        entries = [{"step": 0} | {f"{_BEFORE}{name}{_AFTER}": loss for name, loss in before.items()}]
        entries += [entry for entry in logged if isinstance(entry, dict) and entry.get("step") != 0]
        yield from enumerate(entries)
        return
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        entry = parse_json_strict(line, file=f"{log}, line {number}", max_bytes=1_000_000, constants=True)
        if not isinstance(entry, dict):
            raise BadInput(f'{printable(str(log))}, line {number}: expected {{"step": …, "source": …, "loss": …}}')
        yield number, entry


def _losses(entry: dict[str, Any]) -> dict[Any, Any]:
    """Return the losses of one entry by source."""
    if entry.get("source") is not None and entry.get("loss") is not None:
        return {entry["source"] if isinstance(entry["source"], str) else None: entry["loss"]}
    return {
        key.removeprefix(_BEFORE).removesuffix(_AFTER): value
        for key, value in entry.items()
        if key.startswith(_BEFORE) and key.endswith(_AFTER) and len(key) > len(_BEFORE + _AFTER)
    }
