"""`import surgeon` in a notebook: what it offers, and what results look like there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.writing.apply import Applied
from tests import tiny
from tests.reference_pages.json_keys import SECTIONS

ROOT = Path(__file__).resolve().parent.parent


def test_what_is_exported_is_there_and_documented() -> None:
    told = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert dir(surgeon) == surgeon.__all__
    for name in surgeon.__all__:
        found = getattr(surgeon, name)
        assert name.startswith("__") or (found.__doc__ and re.search(rf"\b{name}\b", told)), name
    with pytest.raises(AttributeError, match="no attribute 'aply'"):
        surgeon.aply  # noqa: B018


def documented_keys(section: str) -> list[set[str]]:
    """The keys of a section of docs/reference/json.md, table by table."""
    page = (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8")
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    tables = text.split("| key | |")[1:]
    rows = [re.findall(r"^\| (`.*?) \|", table, re.M) for table in tables]
    return [{key for row in table for key in re.findall(r"`(\w+)`", row)} for table in rows]


def check_json(result: Any) -> None:
    """A result's plain data has exactly the keys of its section in docs/reference/json.md."""
    kind = type(result)
    section, number = next(
        (function, number)
        for function, tables in SECTIONS.items()
        for number, results in enumerate(tables.values())
        if kind in results
    )
    wanted = documented_keys(section)[number]
    if kind is Applied:
        wanted |= documented_keys("preview")[0]
    assert result.to_json().keys() == wanted, kind


def test_results_print_as_one_line(tmp_path: Path) -> None:
    base = tiny.checkpoint(tmp_path / "base", "llama")
    plan = surgeon.parse_plan("surgeon: 1\noperations: [{op: pmoe_experts, slots: 2}]")
    shown = surgeon.preview(plan, base)
    assert repr(shown).startswith("Preview(llama, 6 → 6 layers, ")
    assert "promise 'exact'" in repr(shown)
    results = [
        shown,
        surgeon.apply(plan, base, tmp_path / "out"),
        surgeon.apply("opt-deus", base, tmp_path / "fused"),
        surgeon.verify(base, tmp_path / "out", window=16, windows=1),
        surgeon.inspect(base),
        surgeon.inspect(tmp_path / "out"),
        surgeon.diff(base, tmp_path / "out"),
        surgeon.families(),
        surgeon.families(tmp_path / "fused"),
        surgeon.revert(tmp_path / "out", tmp_path / "again"),
        surgeon.export_slot(tmp_path / "out", 0, tmp_path / "slot"),
        surgeon.make_delta(tmp_path / "out", tmp_path / "delta"),
        surgeon.apply_delta(tmp_path / "delta", base, tmp_path / "whole"),
        surgeon.transport_report(tmp_path / "fused"),
        surgeon.report(tmp_path / "out"),
        surgeon.routing_report(tmp_path / "out", {"probe": None}, window=16, windows=1),
    ]
    for result in results:
        told = repr(result)
        assert told.startswith(f"{type(result).__name__}("), told
        assert "\n" not in told and len(told) < 600, told
        check_json(result)
    assert "holds=True" in repr(results[3]) and "identical=True" in repr(results[3])
    assert " 0 removed, " in repr(results[6])


def test_a_plan_as_text_is_checked_like_a_file(tmp_path: Path) -> None:
    with pytest.raises(surgeon.BadInput, match=r"plan:2"):
        surgeon.parse_plan("surgeon: 1\noperation: []")
    assert issubclass(surgeon.BadInput, surgeon.SurgeonError)
