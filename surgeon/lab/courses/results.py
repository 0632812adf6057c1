"""The results of a continual run, as plain data and for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.common.json_results import plain, plain_fields
from surgeon.common.tables import FittedTable
from surgeon.errors import printable
from surgeon.lab.courses.metrics import Measurement, backward_transfer, general_ability_delta, overall_performance

_MEASURE = Text("token accuracy on held-out labels; BWT and ΔR in points", style="dim")


@dataclass(frozen=True)
class Continued:
    """The results of a continual run.

    `rows[0]` contains the base's measurements on every task and general source. `rows[t]` contains the measurements
    after the t-th task, on the tasks so far and the general sources. Performance is token accuracy on held-out labels,
    where the paper has benchmark scores. `trainings` contains each task's training (settings, steps, tokens, losses).
    `kept` is the folder of the earlier tasks' runs where they were kept. `config` is the tasks file.
    """

    path: Path
    base: str
    tasks: tuple[str, ...]
    general: tuple[str, ...]
    rows: tuple[Measurement, ...]
    trainings: tuple[dict[str, Any], ...]
    config: dict[str, Any]
    fingerprint: str
    resumed_after: int = 0
    kept: Path | None = None

    def __repr__(self) -> str:
        delta = "" if self.delta[-1] is None else f", ΔR {self.delta[-1]:+.4f}"
        shown = f"OP {self.overall[-1]:.4f}, BWT {self.backward[-1]:+.4f}{delta}"
        return f"Continued({str(self.path)!r}, {len(self.tasks)} tasks, {shown})"

    @property
    def matrix(self) -> list[list[float]]:
        """R[t][i]: performance on task i after training on task t, i ≤ t, from 0."""
        return [[row[name].accuracy for name in self.tasks[: number + 1]] for number, row in enumerate(self.rows[1:])]

    @property
    def overall(self) -> list[float]:
        """Overall performance (OP) after each task."""
        return [overall_performance(self.matrix, t) for t in range(len(self.tasks))]

    @property
    def backward(self) -> list[float]:
        """Backward transfer (BWT) after each task."""
        return [backward_transfer(self.matrix, t) for t in range(len(self.tasks))]

    @property
    def delta(self) -> list[float | None]:
        """Change of general ability (ΔR) after each task; None where there are no general sources."""
        before, *after = ([row[name].accuracy for name in self.general] for row in self.rows)
        return [general_ability_delta(before, row) for row in after]

    def record(self) -> dict[str, Any]:
        """Return the content of the run's `continual.json` as plain data."""
        return {
            "surgeon_continual": 1,
            "base": self.base,
            "tasks": list(self.tasks),
            "general": list(self.general),
            "performance": "token accuracy on held-out labels",
            "base_accuracy": {name: found.accuracy for name, found in self.rows[0].items()},
            "matrix": self.matrix,
            "overall_performance": self.overall,
            "backward_transfer": self.backward,
            "general_ability_delta": self.delta,
            "measured": [
                {name: plain(found) | {"accuracy": found.accuracy, "loss": found.loss} for name, found in row.items()}
                for row in self.rows
            ],
            "trainings": list(self.trainings),
            "config": self.config,
            "fingerprint": self.fingerprint,
        }

    def text(self) -> str:
        """Return the content of the run's `continual.json` as text."""
        return json.dumps(self.record(), indent=1, ensure_ascii=False) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `path`: the run's folder (not in `continual.json`)
            `kept`: with `--keep`, the folder of the earlier tasks' models (not in `continual.json`)
            `resumed_after`: how many tasks were complete before this call (not in `continual.json`)
            `surgeon_continual`: version of the format
            `base`: the base
            `tasks`, `general`: names of the tasks, in order, and of the general sources
            `performance`: the measure, in words
            `base_accuracy`: the base's accuracy by task and general source
            `matrix`: after each task, its accuracy on that task and on all before it
            `overall_performance`, `backward_transfer`, `general_ability_delta`: OP, BWT and ΔR after each task; ΔR is
                null without general sources
            `measured`: for the base and after each task, by task and general source: `right`, `tokens`, `nats`,
                `accuracy`, `loss`
            `trainings`: each task's `operations`, `settings`, `steps`, `tokens`, `losses` (by source, before and
                after), `tensors` (how many trained)
            `config`: the tasks file as it was read
            `fingerprint`: the digest of everything that the numbers depend on
        """
        return {
            "path": str(self.path),
            "kept": plain(self.kept),
            "resumed_after": self.resumed_after,
            **self.record(),
        }


@dataclass(frozen=True)
class ContinuedRows:
    """The results of a tasks file with rows: one run for each row, in a folder of `path`, in the file's order."""

    path: Path
    rows: Mapping[str, Continued]

    def __repr__(self) -> str:
        return f"ContinuedRows({str(self.path)!r}, {', '.join(self.rows)})"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `path`: the folder of the rows' runs
            `rows`: by row, in the file's order, the keys above
        """
        return plain_fields(self)


def continued_view(continued: Continued | ContinuedRows) -> RenderableType:
    """Return a table for the terminal: performance on all tasks, OP, BWT and ΔR, after each task.

    For a file with rows, it contains only the performance of each row after the last task.
    """
    if isinstance(continued, ContinuedRows):
        return _rows_view(continued)
    names = (*continued.tasks, *continued.general)
    table = _table("accuracy (loss) after", names)
    for number, row in enumerate(continued.rows):
        judged = _judged(continued, number) if number else ("", "", "")
        called = continued.tasks[number - 1] if number else Text("(the base)", style="dim")
        table.add_row(called, *_cells(row, names), *judged)
    notes = [_MEASURE]
    if not continued.general:
        notes.append(Text("no `general:` sources, so ΔR was not measured", style="dim"))
    done = Text(f"{printable(str(continued.path))} is complete", style="bold green")
    kept = [] if continued.kept is None else [Text(f"earlier tasks' models: {printable(str(continued.kept))}")]
    return Group(table, *notes, Text(), done, *kept)


def _rows_view(continued: ContinuedRows) -> RenderableType:
    """Return a table with the base's performance, and each row's performance after the last task."""
    first = next(iter(continued.rows.values()))
    names = list(dict.fromkeys(name for row in continued.rows.values() for name in (*row.tasks, *row.general)))
    table = _table("accuracy (loss) after all tasks", names)
    table.add_row(Text("(the base)", style="dim"), *_cells(first.rows[0], names), "", "", "")
    for name, row in continued.rows.items():
        table.add_row(name, *_cells(row.rows[-1], names), *_judged(row, len(row.tasks)))
    done = Text(f"{printable(str(continued.path))} has a complete run of each row", style="bold green")
    return Group(table, _MEASURE, Text(), done)


def _table(heading: str, names: Sequence[str]) -> FittedTable:
    """Return a table with columns for tasks and general sources, and for OP, BWT and ΔR."""
    table = FittedTable(heading)
    for name in names:
        table.add_column(name)
    for column in ("OP", "BWT", "ΔR"):
        table.add_column(column, style="bold")
    return table


def _cells(row: Measurement, names: Sequence[str]) -> list[str]:
    """Return accuracy and loss of a row by the columns `names`; empty where it was not measured."""
    return [f"{row[name].accuracy:.1%} ({row[name].loss:.3f})" if name in row else "" for name in names]


def _judged(continued: Continued, number: int) -> tuple[str, str, str]:
    """Return (OP, BWT, ΔR) after `number` tasks, as text: percent and points; ΔR is empty where not measured."""
    delta = continued.delta[number - 1]
    return (
        f"{continued.overall[number - 1]:.1%}",
        f"{100 * continued.backward[number - 1]:+.1f}",
        "" if delta is None else f"{100 * delta:+.1f}",
    )
