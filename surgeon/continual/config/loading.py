"""tasks.yaml, read: values as the schema has them, the line of each, and texts that are there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgeon.common.checked_yaml import check_yaml, editor_schema
from surgeon.common.yaml import Place, parse_yaml, read_text
from surgeon.continual.config.schema import TasksConfig
from surgeon.errors import BadInput, printable

_WHAT = "tasks file"

# The operation whose settings a tasks file may give in a plan's place.
SLOTS = "pmoe_experts"


@dataclass(frozen=True)
class LoadedTasks:
    """A tasks file as read; relative paths in it start at the file's folder."""

    config: TasksConfig
    source: Path
    lines: Mapping[Place, int]

    def line_of_surgery(self, number: int) -> int:
        """The line (from 1) that says what task `number` (from 0) adds; of a default, the task's own."""
        general: Place = ("next_plan",) if number and ("next_plan",) in self.lines else ("plan",)
        places: list[Place] = [("tasks", number, "plan"), general, ("tasks", number)]
        return next(self.lines[place] for place in places if place in self.lines)

    def resolve(self, path: str) -> Path:
        """A path that the file names."""
        return self.source.parent / path


def load_tasks(path: Path) -> LoadedTasks:
    """Read and check a tasks file; BadInput names file and line."""
    text = read_text(path, what=_WHAT)
    data, lines = parse_yaml(text, str(path), what=_WHAT, needs="`surgeon_continual: 1` and `tasks:`")
    config = check_yaml(TasksConfig, data, lines, str(path), what=_WHAT)
    return LoadedTasks(config, path, lines)


def json_schema() -> dict[str, Any]:
    """The JSON schema of tasks files, for editors that complete YAML by it."""
    return editor_schema(TasksConfig, "surgeon tasks file")


def surgery_name(loaded: LoadedTasks, number: int) -> str:
    """Return what errors call the plan that settings of task `number` become."""
    return f"{loaded.source} (surgery of {loaded.config.tasks[number].name})"


@contextlib.contextmanager
def at_line(loaded: LoadedTasks, number: int) -> Iterator[None]:
    """Errors about the surgery of task `number` (from 0) name the line of the tasks file, not of the plan."""
    try:
        yield
    except BadInput as error:
        made = re.escape(printable(surgery_name(loaded, number)))
        message = re.sub(rf"^{made}:\d+: (operations\[0\] \({SLOTS}\): )?", "", str(error))
        if message == str(error) and isinstance(loaded.config.surgery(number), dict):
            # Of the base or the disk, not of what was asked.
            raise
        raise BadInput(f"{printable(str(loaded.source))}:{loaded.line_of_surgery(number)}: {message}") from None
