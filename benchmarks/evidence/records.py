"""The records of finished runs: one JSON line each, added when a run is done and never changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results"
FILE = RESULTS / "evidence" / "runs.jsonl"

Key = tuple[Any, ...]
_FIELDS = ("method", "p", "rate", "seed", "steps", "batch", "length", "device")


def key_of(spec: dict[str, Any]) -> Key:
    """What tells one run from another."""
    return tuple(spec[field] for field in _FIELDS)


class Records:
    """All of them, by key."""

    def __init__(self, file: Path = FILE) -> None:
        self.file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        self.by_key: dict[Key, dict[str, Any]] = {}
        for line in lines:
            record = json.loads(line)
            self.by_key[key_of(record)] = record

    def get(self, key: Key) -> dict[str, Any] | None:
        """The record of a run that is done."""
        return self.by_key.get(key)

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record, on disk before it counts as done."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(record) + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        self.by_key[key_of(record)] = record
