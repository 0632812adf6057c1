"""The table of transformers' own tests on outputs: what it says of a test that a base passes and an output does not."""

from __future__ import annotations

from benchmarks.transformers_suite import BASES, EXPLAINED, OUTPUTS, PAGE, Row, page


def test_a_miss_is_explained_or_shown() -> None:
    base = Row("llama", "base", passed=["test_config", "test_num_layers_is_small"])
    known = Row("llama", "control", passed=["test_config"], failed={"test_num_layers_is_small": "AssertionError"})
    assert EXPLAINED[0][2] in page({("llama", "base"): base, ("llama", "control"): known})
    shown = Row("llama", "gate", passed=["test_num_layers_is_small"], failed={"test_config": "ValueError: no | yes"})
    text = page({("llama", "base"): base, ("llama", "control"): known, ("llama", "gate"): shown})
    assert "| `test_config` | llama: gate | not explained: ValueError: no \\| yes |" in text
    gone = page({("llama", "base"): base, ("llama", "gate"): Row("llama", "gate", skipped=["test_config"])})
    assert "| `test_config` | llama: gate | not explained: skipped |" in gone


def test_the_tables_are_whole_and_explained() -> None:
    pages = sorted(PAGE.parent.glob("transformers_suite_*.md"))
    seen = set()
    for each in pages:
        text = each.read_text(encoding="utf-8")
        assert "not explained" not in text and len(EXPLAINED) <= 5
        for base in BASES:
            for row in (line for line in text.splitlines() if line.startswith(f"| {base} |")):
                assert len([cell for cell in row.split("|") if cell.strip()]) == len(OUTPUTS) + 1
                seen.add((each.stem.rpartition("_")[2], base))
    assert {(version, base) for version in ("5.19.0", "5.23.0") for base in ("llama", "qwen3_moe")} <= seen
    assert {("5.24.0", base) for base in BASES} <= seen
