"""Results as plain data: whatever a result holds, JSON can hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from surgeon.common.json_results import plain, plain_fields


@dataclass(frozen=True)
class Part:
    nbytes: int
    whole_nbytes: int


@dataclass(frozen=True)
class Whole:
    path: Path | None
    parts: tuple[Part, ...]
    by_number: dict[int, tuple[float, float | None]]
    hidden: object = None

    def to_json(self) -> dict[str, object]:
        return plain_fields(self, without=("hidden",)) | {"parts_held": len(self.parts)}


def test_a_result_becomes_what_json_can_hold() -> None:
    whole = Whole(Path("a/b"), (Part(3, 4),), {1: (0.5, None)}, hidden=object())
    expected = {
        "path": "a/b",
        "parts": [{"bytes": 3, "whole_bytes": 4}],
        "by_number": {"1": [0.5, None]},
        "parts_held": 1,
    }
    assert plain(whole) == expected
    assert plain((whole, {"nested": whole})) == [expected, {"nested": expected}]
    assert json.loads(json.dumps(plain(whole), allow_nan=False)) == expected


@pytest.mark.parametrize(("value", "shown"), [(float("nan"), "nan"), (float("-inf"), "-inf"), (1.5, 1.5), (True, True)])
def test_numbers_that_json_lacks_are_strings(value: float, shown: object) -> None:
    assert plain({"value": [value]}) == {"value": [shown]}
