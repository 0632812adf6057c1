"""The blueprint of every plan in `plans/` itself, as it was agreed: a change of a recipe shows up as a diff of a file.

A file a plan holds structure: layers, counts, config, couplings, recipes. The sentences of all of them (what was
matched, why a promise holds, what grafts are called, notes) stand in one file, so that rewording changes that alone.

python -m tests.test_golden      writes them anew; read the diff before you commit it
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.anatomy.decoders import USUAL_DECODERS
from surgeon.common.cache import VARIABLE
from surgeon.writing.preview import Preview
from tests import tiny
from tests.shipped_plans import SHIPPED

GOLDEN = Path(__file__).resolve().parent / "golden"
SENTENCES = GOLDEN / "sentences.json"
# Variants of a plan (in folders) have their own tests; these are one of each kind.
CASES = [(plan, "llama") for plan in SHIPPED if "/" not in plan] + [
    ("opt-deus", f) for f in USUAL_DECODERS if f != "llama"
]


def preview(plan: str, family: str, folder: Path) -> Preview:
    base = tiny.base_for(plan, folder) if family == "llama" else tiny.checkpoint(folder, family)
    return surgeon.preview(plan, str(base))


def structure(shown: Preview) -> str:
    """Preview without its sentences and its proof, config and the recipe of every new tensor, one line each."""
    drawn = shown.blueprint
    told = shown.to_json()
    del told["notes"], told["proof"]
    if not told["texts"]:
        del told["texts"]
    for operation in told["operations"]:
        del operation["matched"], operation["reason"]
    for layer in told["layers"]:
        del layer["grafts"]
    lines = [
        {"preview": told},
        {"config": {key: drawn.config.get(key) for key in ("num_hidden_layers", "layer_types", "surgery")}},
        *({"coupling": each.name, "rows": [each.start, each.stop]} for each in drawn.couplings.values()),
        *({"tensor": output.name, "recipe": repr(output.recipe)} for output in drawn.outputs if output.new),
    ]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def sentences(shown: Preview) -> dict[str, Any]:
    """What the structure leaves out; the words for grafts with the layers that they are said of."""
    drawn = shown.blueprint
    grafts: dict[str, list[int]] = {}
    for layer in drawn.layers:
        for graft in layer.grafts:
            grafts.setdefault(graft.text, []).append(layer.index)
    return {
        "operations": [[record.matched, record.claim.reason] for record in drawn.operations],
        "grafts": grafts,
        # How long a proof took is of this run alone.
        "notes": [re.sub(r" in [0-9.]+ s:", ":", note) for note in shown.notes],
    }


def golden_file(plan: str, family: str) -> Path:
    return GOLDEN / f"{plan.replace('/', '.')}.{family}.jsonl"


@pytest.mark.parametrize(("plan", "family"), CASES)
def test_blueprint_is_the_agreed_one(plan: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    shown = preview(plan, family, tmp_path)
    assert structure(shown) == golden_file(plan, family).read_text(encoding="utf-8")
    assert sentences(shown) == json.loads(SENTENCES.read_text(encoding="utf-8"))[golden_file(plan, family).stem]


def test_no_golden_file_without_a_plan() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {golden_file(*case).name for case in CASES} | {SENTENCES.name}
    kept = json.loads(SENTENCES.read_text(encoding="utf-8"))
    assert list(kept) == [golden_file(*case).stem for case in CASES]


if __name__ == "__main__":
    os.environ[VARIABLE] = "off"
    GOLDEN.mkdir(exist_ok=True)
    said = {}
    for plan, family in CASES:
        with tempfile.TemporaryDirectory() as folder:
            shown = preview(plan, family, Path(folder))
        golden_file(plan, family).write_text(structure(shown), encoding="utf-8")
        said[golden_file(plan, family).stem] = sentences(shown)
    # A case a line, so that a diff names the plans whose words changed.
    rows = ",\n".join(f"{json.dumps(case)}: {json.dumps(words, ensure_ascii=False)}" for case, words in said.items())
    SENTENCES.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
