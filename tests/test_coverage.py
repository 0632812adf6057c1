"""What docs say of every model type is what the sweep of all of them found."""

from __future__ import annotations

import json

import pytest

from benchmarks import coverage, published


def test_page_and_docs_are_written_from_the_rows() -> None:
    rows = coverage.read_rows()
    assert len({row.order for row in rows}) == len(rows) > 200
    assert all(row.told.keys() == coverage.PLANS.keys() and row.versions and row.day for row in rows)
    assert coverage.PAGE.read_text() == coverage.page(rows)
    docs = coverage.DOCS.read_text()
    section = coverage.section(rows)
    assert docs == coverage.with_section(docs, section)
    assert all(row.model_type in section for row in rows)


def test_every_refusal_of_a_published_config_is_of_one_kind_that_says_why() -> None:
    rows = coverage.read_rows(published.ROWS)
    refused = [row.told[name] for row in rows for name in published.PLANS if row.told[name] not in published.HELD]
    assert {published.kind_of(words) for words in refused} == set(published.KINDS), "kinds that nothing is of"
    assert published.ROWS.with_suffix(".md").read_text() == published.page(rows)
    for words in ("something new", "its layers share a block, and the base is a mixture of experts already"):
        with pytest.raises(ValueError, match="kinds of refusals"):
            published.kind_of(words)


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
