"""Tables at every width: what is written is whole, wherever it stands."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

import surgeon
from surgeon.common.check import Check
from surgeon.common.json_results import by_number
from surgeon.common.tables import FittedTable
from surgeon.data.scores import Ratio
from surgeon.lab.evaluation.evaluate import evaluation_view
from surgeon.lab.evaluation.results import Evaluation, ModelScores, SourceScores
from surgeon.models.compare import LogitComparison
from surgeon.verification.diff import difference_view
from surgeon.verification.verification import Verification, verification_view
from surgeon.writing.preview_view import preview_view
from tests import tiny
from tests.test_api import check_json

WIDTHS = (60, 80, 120)


def lines(shown: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def words(shown: RenderableType, width: int) -> list[str]:
    return sorted(" ".join(lines(shown, width)).split())


def grown(folder: Path) -> tuple[Path, Path]:
    base = tiny.checkpoint(folder / "base", "llama")
    out = folder / "out"
    if not out.exists():
        surgeon.apply("llama-pro", base, out)
    return base, out


def previewed(folder: Path) -> RenderableType:
    base, _ = grown(folder)
    return preview_view(surgeon.preview("opt-deus", base), "base")


def compared(folder: Path) -> RenderableType:
    return difference_view(surgeon.diff(*grown(folder)))


def verified(_: Path) -> RenderableType:
    checks = [
        Check("base tensors", True, "1,157 byte-identical in their places, and 12 copies of them"),
        Check("beside the weights", True, "nothing that a loader would take for a part of the model"),
    ]
    found = LogitComparison("cached decode", "bfloat16", 1024, False, 0.0123, 1.5e-5, 0.9987, 8.257451, 8.257452)
    return verification_view(Verification("exact", checks, [found, found], tokens="the built-in probe text"))


def evaluated(_: Path) -> RenderableType:
    ratio = Ratio(1234.5678, (1200.1234, 1300.4321))
    scores = [
        SourceScores(source, 500, 123_456, 654_321, *[ratio] * 4, *[ratio] * 2) for source in ("code", "documentation")
    ]
    rows = tuple(ModelScores(name, True, tuple(scores)) for name in ("base", "some/where/else/grown-model"))
    found = Evaluation(rows, 2048, "bfloat16", "cpu", ())
    check_json(found)
    return evaluation_view(found)


@pytest.mark.parametrize("view", [previewed, compared, verified, evaluated])
def test_no_number_is_cut_and_no_word_broken(
    view: Callable[[Path], RenderableType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = view(Path())
    whole = set(words(shown, 400))
    for width in WIDTHS:
        found = lines(shown, width)
        assert max(map(len, found)) <= width
        # Where rows are stacked their names need no heading; nothing else is lost.
        assert set(words(shown, width)) ^ whole <= {"source", "model", "mode", "dtype", "operation"}
        assert "…" not in "".join(found)


def test_columns_fold_prose_alone_and_are_stacked_where_that_is_not_enough() -> None:
    table = FittedTable("operation", "why")
    table.add_column("tokens")
    table.add_row("insert_layers", "new layers add exactly zero to the residual stream", "1,234,567")
    assert [line.rstrip() for line in lines(table, 60)] == [
        "operation      why                                    tokens",
        "insert_layers  new layers add exactly zero to the  1,234,567",
        "               residual stream",
    ]
    assert [line.rstrip() for line in lines(table, 40)] == [
        "insert_layers",
        "  why new layers add exactly zero to the",
        "  residual stream",
        "  tokens 1,234,567",
    ]


def test_columns_without_content_and_values_too_long_for_their_place() -> None:
    table = FittedTable("model")
    table.add_column("loss")
    table.add_column("KL")
    table.add_row("a", "1.5", "")
    assert [line.split() for line in lines(table, 60)] == [["model", "loss"], ["a", "1.5"]]
    facts = FittedTable(headings=False)
    facts.add_row("family", "llama")
    facts.add_row("digest", 40 * "f")
    assert [line.rstrip() for line in lines(facts, 44)] == ["family  llama", "digest", f"  {40 * 'f'}"]


def test_numbers_in_names_sort_as_numbers() -> None:
    assert sorted(["layer 10", "layer 2", "a"], key=by_number) == ["a", "layer 2", "layer 10"]
