"""Results as plain data, for `--json` and for files of results, and a sort key for names with numbers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Result(Protocol):
    """The interface of a public function's result."""

    def to_json(self) -> Any:
        """Return plain data for `--json`."""


def plain(value: Any) -> Any:
    """Return `value` in a form that JSON can represent: paths and non-finite numbers as strings, tuples as lists.

    A result is converted by its own `to_json`, any other dataclass by its fields (`plain_fields`).
    """
    if isinstance(value, Result):
        return value.to_json()
    if is_dataclass(value):
        return plain_fields(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def plain_fields(result: Any, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass as plain data, except those named in `without`.

    In keys, `nbytes` is replaced by `bytes`.
    """
    shown = [field.name for field in fields(result) if field.name not in without]
    return {name.replace("nbytes", "bytes"): plain(getattr(result, name)) for name in shown}


def same_json(one: Any, other: Any) -> bool:
    """Return whether two values are the same JSON: true differs from 1, and NaN equals NaN."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def by_number(name: str) -> list[str | int]:
    """Return a sort key that orders numbers in names as numbers: layer 2 comes before layer 10."""
    return [int(part) if number % 2 else part for number, part in enumerate(re.split(r"([0-9]+)", name))]
