"""A sweep: one plan with varied values, such as the points of a figure or the rows of a table in a paper.

A point is what `surgeon apply PLAN BASE OUT --set KEY=VALUE …` carries out.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from surgeon.common.checked_yaml import check_yaml, editor_schema
from surgeon.common.schema import Entry
from surgeon.common.yaml import parse_yaml, read_text

_WHAT = "sweep"
_NEEDS = "`surgeon_sweep: 1`, `plan:` and `values:` or `points:`"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,59}$"
_PLAIN_WORD = re.compile(r"(?!(?:true|false|null)$)[A-Za-z][A-Za-z_]*", re.IGNORECASE)

Key = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^=]+$")]
Scalar = bool | int | float | str


class Sweep(Entry):
    """A plan with varied values at some of its keys: every combination of `values`, or each of the named `points`."""

    surgeon_sweep: Annotated[Literal[1], Field(description="version of this format")]
    plan: Annotated[str, Field(min_length=1, description="name of a shipped plan, or a plan's file beside this one")]
    values: Annotated[
        dict[Key, Annotated[list[Scalar], Field(min_length=1, max_length=100)]] | None,
        Field(min_length=1, max_length=5, description="values of keys of the plan (operations.0.alpha), all combined"),
    ] = None
    points: Annotated[
        dict[Annotated[str, StringConstraints(pattern=_NAME)], dict[Key, Any]] | None,
        Field(min_length=1, max_length=200, description="by their names, the values that each point sets"),
    ] = None

    @model_validator(mode="after")
    def _has_points(self) -> Sweep:
        """Check that exactly one of `values` and `points` is given. Raises ValueError."""
        if (self.values is None) == (self.points is None):
            raise ValueError("give one of `values`, which are all combined, and `points`, each with a name")
        return self


@dataclass(frozen=True)
class Point:
    """One point of a sweep: its name, and the values of the plan's keys that it sets."""

    name: str
    settings: Mapping[str, Any]

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return the settings as `--set` takes them."""
        return overrides_of(self.settings)

    @property
    def options(self) -> str:
        """Return the settings as options of a command, quoted for a shell."""
        return " ".join(f"--set {shlex.quote(override)}" for override in self.overrides)


@dataclass(frozen=True)
class LoadedSweep:
    """A sweep that was read, with its text and its file."""

    sweep: Sweep
    text: str
    source: Path

    @property
    def points(self) -> list[Point]:
        """Return all points; a point without a name is named by the file's name and its values."""
        if self.sweep.points is not None:
            return [Point(name, settings) for name, settings in self.sweep.points.items()]
        values = self.sweep.values or {}
        combined = (dict(zip(values, each, strict=True)) for each in itertools.product(*values.values()))
        return [Point(_name(self.source.stem, settings), settings) for settings in combined]


def load_sweep(path: Path) -> LoadedSweep:
    """Read and check a sweep's file. Raises BadInput, which names file and line."""
    text = read_text(path, what=_WHAT)
    document = parse_yaml(text, str(path), what=_WHAT, needs=_NEEDS)
    return LoadedSweep(check_yaml(Sweep, document), text, path)


def overrides_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return values by dotted keys as `--set` takes them."""
    return tuple(f"{key}={_word(value)}" for key, value in settings.items())


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of sweeps, for editors that complete YAML by it."""
    return editor_schema(Sweep, "surgeon sweep")


def _word(value: Any) -> str:
    """Return a value in YAML, in one line: a plain word as it is, anything else as JSON."""
    if isinstance(value, str) and _PLAIN_WORD.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def _name(stem: str, settings: Mapping[str, Any]) -> str:
    """Return the name of a point without one: the file's stem and its values, joined by hyphens."""
    words = [f"{value:g}" if isinstance(value, float) else str(value) for value in settings.values()]
    return re.sub(r"[^A-Za-z0-9._-]", "-", "-".join([stem, *words]))
