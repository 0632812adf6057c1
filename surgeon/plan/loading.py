"""Reading plan files: what a plan may say is in schema.py, how YAML is read in common/yaml.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from surgeon.common.yaml import Place, check_yaml, parse_yaml, read_text
from surgeon.operations import OPERATIONS
from surgeon.plan.schema import Plan


@dataclass(frozen=True)
class LoadedPlan:
    """A plan, its text as written, and where it came from."""

    plan: Plan
    text: str
    source: str

    def line_of_operation(self, number: int) -> int | None:
        """The line (from 1) on which an operation begins, for error messages."""
        return self._lines.get(("operations", number))

    @property
    def _lines(self) -> dict[Place, int]:
        return _parse(self.text, self.source)[1]


def load_plan(path: Path) -> LoadedPlan:
    """Read and check a plan file; BadInput names file and line."""
    return parse_plan(read_text(path, what="plan"), source=str(path))


def parse_plan(text: str, *, source: str = "plan") -> LoadedPlan:
    """Check a plan given as text; `source` is its file's name in messages, and where relative paths in it start."""
    data, lines = _parse(text, source)

    def known_keys(problem: ErrorDetails, place: Place) -> list[str]:
        return _known_keys(problem, data, place)

    return LoadedPlan(
        check_yaml(Plan, data, lines, source, what="plan", known_keys=known_keys, tags=_tags), text, source
    )


def _parse(text: str, source: str) -> tuple[dict[str, Any], dict[Place, int]]:
    return parse_yaml(text, source, what="plan", needs="`surgeon: 1` and `operations:`")


def _known_keys(problem: ErrorDetails, data: Any, place: Place) -> list[str]:
    """Keys the schema knows at the place of an unknown one."""
    if len(place) == 1:
        return list(Plan.model_fields)
    operation = data["operations"][int(place[1])]
    spec = OPERATIONS[operation["op"]]
    if len(place) == 3:
        return list(spec.model_fields)
    names = {
        name
        for definition in spec.model_json_schema().get("$defs", {}).values()
        for name in definition.get("properties", {})
        if problem["loc"][-2] in (definition["properties"].get("kind", {}).get("const"), definition.get("title"))
    }
    return sorted(names)


def _tags(discriminator: str) -> list[str]:
    if discriminator == "op":
        return list(OPERATIONS)
    kinds = {
        definition["properties"][discriminator]["const"]
        for spec in OPERATIONS.values()
        for definition in spec.model_json_schema().get("$defs", {}).values()
        if "const" in definition.get("properties", {}).get(discriminator, {})
    }
    return sorted(kinds)
