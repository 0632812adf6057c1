"""The blueprint of every shipped plan, as it was agreed: any change of a recipe shows up as a diff of a file.

python -m tests.test_golden      writes them anew; read the diff before you commit it
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

import surgeon
from surgeon.blueprint.recipes import describe
from surgeon.families import FAMILIES
from surgeon.plan import shipped
from tests import tiny

GOLDEN = Path(__file__).resolve().parent / "golden"
CASES = [(plan, "llama") for plan in shipped.names()] + [("opt-deus", f) for f in FAMILIES if f != "llama"]


def blueprint(plan: str, family: str, folder: Path) -> str:
    """Preview, config and the recipe of every new tensor, one line each."""
    base = tiny.base_for(plan, folder) if family == "llama" else tiny.checkpoint(folder, family)
    shown = surgeon.preview(plan, str(base))
    drawn = shown.blueprint
    lines = [
        {"preview": shown.to_json()},
        {"config": {key: drawn.config.get(key) for key in ("num_hidden_layers", "layer_types", "surgery")}},
        *(
            {"coupling": coupling.name, "rows": [coupling.start, coupling.stop]}
            | ({"whole_heads": coupling.whole_heads.heads} if coupling.whole_heads else {})
            for coupling in drawn.couplings.values()
        ),
        *({"tensor": output.name, **describe(output.recipe)} for output in drawn.outputs if output.new),
    ]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def golden_file(plan: str, family: str) -> Path:
    return GOLDEN / f"{plan.replace('/', '.')}.{family}.jsonl"


@pytest.mark.parametrize(("plan", "family"), CASES)
def test_blueprint_is_the_agreed_one(plan: str, family: str, tmp_path: Path) -> None:
    assert blueprint(plan, family, tmp_path) == golden_file(plan, family).read_text(encoding="utf-8")


def test_no_golden_file_without_a_plan() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {golden_file(*case).name for case in CASES}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for plan, family in CASES:
        with tempfile.TemporaryDirectory() as folder:
            golden_file(plan, family).write_text(blueprint(plan, family, Path(folder)), encoding="utf-8")
