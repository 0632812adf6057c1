"""Learning and forgetting: losses by source, from manifests' training runs or from a log."""

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

MAX_LOG_BYTES = 64_000_000
# The name of a source's held-out loss in a trainer's log.
_BEFORE, _AFTER = "eval_", "_loss"
# A page's labels are placed beside one another.
_MOST_SOURCES = 200
# The most lengths of prefixes that are shown of a gate.
_LENGTHS = 16


@dataclass(frozen=True)
class Curve:
    """Losses on one source, in nats a token, by step."""

    source: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class GateActivity:
    """The shares of held-out tokens on which a domain gate was open once a run had fitted it.

    `shares` maps roles (new, original) to the share of all tokens, `by_length` lengths of prefixes to such maps.
    """

    shares: Mapping[str, float]
    by_length: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, figures: Mapping[str, Any] | None) -> GateActivity | None:
        """From a manifest, whose figures need not be shares; None where it has none of a gate."""
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
    """Keep the figures that are shares."""
    return {
        role: float(share)
        for role, share in entries
        if isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share <= 1
    }


@dataclass(frozen=True)
class TrainingRun:
    """One training run, as a manifest records it.

    `losses` maps sources to held-out losses before and after, `curves` to all that were measured, by step. `changes`
    maps every tensor that trained, by its name in that surgery's output, to max |Δ| and ‖Δ‖ / ‖before‖ (None: it was
    zero before). `gate` is what a domain gate did that the run fitted.
    """

    surgery: int
    steps: int
    tokens: int
    losses: dict[str, tuple[float, float]]
    changes: dict[str, tuple[float, float | None]]
    curves: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    gate: GateActivity | None = None

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Tensors that trained and did not change."""
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
        )
        for number, manifest in history.surgeries.items()
        for entry in manifest.training
    )


def _points(by_step: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """The losses of a manifest in the order of their steps, without those that are no numbers."""
    found = ((int(step), loss) for step, loss in by_step.items() if re.fullmatch("[0-9]{1,15}", step))
    return tuple(sorted((step, loss) for step, loss in found if math.isfinite(loss)))


def curves_of(runs: Iterable[TrainingRun]) -> tuple[Curve, ...]:
    """Runs one after the other: a source's losses each time that they were measured.

    Of runs whose manifests have none but those at the beginning and the end, these.
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
    """One curve a source, in the order they appear. Raises BadInput, which names the first bad line.

    A log is JSON lines of `step`, `source` and `loss`, or the output of `surgeon train --json`. It skips lines
    without a loss, and losses that are not finite.
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
    """The log's entries with their line numbers (for the output of `surgeon train --json`: their order)."""
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
    """Losses of one entry by source."""
    if entry.get("source") is not None and entry.get("loss") is not None:
        return {entry["source"] if isinstance(entry["source"], str) else None: entry["loss"]}
    return {
        key.removeprefix(_BEFORE).removesuffix(_AFTER): value
        for key, value in entry.items()
        if key.startswith(_BEFORE) and key.endswith(_AFTER) and len(key) > len(_BEFORE + _AFTER)
    }
