"""What docs say of every model type is what the sweep of all of them found."""

from __future__ import annotations

import json

from benchmarks import coverage


def test_page_and_docs_are_written_from_the_rows() -> None:
    rows = coverage.read_rows()
    assert len({row.order for row in rows}) == len(rows) > 200
    assert all(row.told.keys() == coverage.PLANS.keys() and row.versions and row.day for row in rows)
    assert coverage.PAGE.read_text() == coverage.page(rows)
    docs = coverage.DOCS.read_text()
    section = coverage.section(rows)
    assert docs == coverage.with_section(docs, section)
    assert all(row.model_type in section for row in rows)


def test_a_row_is_kept_whole(tmp_path) -> None:
    row = coverage.Row("b", "AutoModelForCausalLM", {"insert": "exact"}, 1.5, "2026-01-01", {"torch": "2"})
    other = coverage.Row("a", "AutoModelForImageTextToText", {"insert": "é"})
    coverage.keep([other, row], tmp_path / "rows.jsonl")
    assert coverage.read_rows(tmp_path / "rows.jsonl") == [row, other]
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])["model_type"] == "b"


def test_what_hangs_or_dies_is_a_reason(monkeypatch) -> None:
    """What it found until then is kept."""

    def slow(model_type, auto, plans, made):
        yield "insert", "exact"
        if model_type == "dies":
            raise SystemExit(3)
        while True:
            pass

    monkeypatch.setattr(coverage, "tried", slow)
    # It is the processor's time that ends it, however long the machine takes to give that.
    monkeypatch.setattr(coverage, "PATIENCE", 10_000)
    hangs = coverage.in_a_process("hangs", "auto", {"insert": "", "branch": "", "slot": ""}, 1, None)
    assert hangs.told == {"insert": "exact", "branch": "HANG: no result within 1 CPU seconds", "slot": "not run"}
    dies = coverage.in_a_process("dies", "auto", {"insert": "", "branch": ""}, 20, None)
    assert dies.told == {"insert": "exact", "branch": "CRASH: the process ended with 3"}
