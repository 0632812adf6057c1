"""Training runs as manifests record them, and their losses by source as curves of learning and forgetting."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from surgeon.lab.reports.history import History
from surgeon.manifest.manifest import AnswersEntry

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
