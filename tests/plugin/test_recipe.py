"""A package of somebody else makes tensors by a recipe of its own: written, proven, verified and taken back."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests import tiny
from tests.checkpoints import weights
from tests.plugin.packages import COMMAND, HERE, install, run

APPLY = """
import sys, surgeon
plan, base, out, back = sys.argv[1:]
applied = surgeon.apply(plan, base, out, device="cpu")
assert applied.manifest.promise == "exact" and applied.preview.proof.how == "proven"
checked = surgeon.verify(base, out, window=24, windows=2, device="cpu")
assert checked.holds and checked.identical, checked
surgeon.revert(out, back)
"""


@pytest.fixture(scope="module")
def clipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, `out` with a layer of clipped matrices, and `back`, which is `out` without it."""
    folder = tmp_path_factory.mktemp("recipe")
    install(folder / "site")
    base = tiny.checkpoint(folder / "base", "llama")
    plan = folder / "plan.yaml"
    plan.write_text(yaml.safe_dump({"surgeon": 1, "operations": [{"op": "insert_clipped", "after": 1}]}))
    run(APPLY, plan, base, folder / "out", folder / "back", site=folder / "site")
    return folder


def test_it_computes_what_its_formula_says(clipped: Path) -> None:
    before, after = weights(clipped / "base"), weights(clipped / "out")
    for suffix in ("self_attn.q_proj.weight", "mlp.up_proj.weight"):
        old, new = before[f"model.layers.1.{suffix}"], after[f"model.layers.2.{suffix}"]
        assert torch.equal(new, (old.float() / 0.01).tanh().mul(0.01).bfloat16()) and not torch.equal(new, old)
    assert torch.equal(after["model.layers.2.input_layernorm.weight"], before["model.layers.1.input_layernorm.weight"])


def test_how_it_is_made_is_in_the_manifest(clipped: Path) -> None:
    made = json.loads((clipped / "out" / "surgery.json").read_text())["new_tensors"]
    assert made["model.layers.2.mlp.up_proj.weight"]["how"] == "clipped model.layers.1.mlp.up_proj.weight"


def test_it_is_taken_back_byte_for_byte(clipped: Path) -> None:
    before, after = weights(clipped / "base"), weights(clipped / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


# What an author of a plugin gets wrong: the file, the words there, the wrong words, and what the line says.
MISTAKES = {
    "another shape": ("recipe", ".mul_(self.limit)", ".mul_(self.limit)[1:]", "Clipped makes a tensor of shape"),
    "no tensor": ("recipe", ".mul_(self.limit)", ".mul_(self.limit).numpy()", "Clipped makes ndarray, where a tensor"),
    "no number": ("recipe", ".mul_(self.limit)", ".mul_(float('nan'))", "the new values are NaN.* or Clipped computes"),
    "chance": ("recipe", ".mul_(self.limit)", ".mul_(self.limit).bernoulli_(0.5)", "other values each time it is made"),
    "another promise": ("clipping", '"exact"', '"exactly"', "a claim promises one of exact, rounding, none, not 'exac"),
    "other training": ("clipping", 'trains="new"', 'trains="newest"', "an operation trains one of new, all, fitted"),
    "no record": ("clipping", "return OperationRecord(", "_ = OperationRecord(", "its `edit` returns NoneType, no Op"),
    "a base layer": (
        "clipping",
        "draft.insert({self.after: [made]})",
        "draft.layers[0].tensors |= clipped",
        r"makes it in a layer of the base, as no operation's; the one that did \(insert_clipped\)",
    ),
    "another base layer's": (
        "clipping",
        "draft.insert({self.after: [made]})",
        "draft.layers[0].tensors |= {o: draft.layers[1].tensors[o] for o in ('self_attn.o_proj.weight',)}",
        r"model\.layers\.0\.self_attn\.o_proj\.weight: Copy makes it in a layer of the base, as no operation's",
    ),
    "no training": (
        "clipping",
        "    training: ClassVar",
        "    learning: ClassVar",
        "must be an operation whose `training`",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_its_author_ends_in_one_line(mistake: str, clipped: Path, tmp_path: Path) -> None:
    file, words, wrong, said = MISTAKES[mistake]
    site = tmp_path / "site"
    shutil.copytree(clipped / "site", site)
    code = site / "surgeon_scale" / f"{file}.py"
    assert words in code.read_text()
    code.write_text(code.read_text().replace(words, wrong), encoding="utf-8")
    told = run(COMMAND, "apply", clipped / "plan.yaml", clipped / "base", tmp_path / "out", site=site, expect=2)
    refused = told.strip().splitlines()[-1]
    assert "Traceback" not in told and re.search(said, refused), told
    assert any(name in refused for name in ("surgeon-scale", "insert_clipped", "Clipped"))
    assert not (tmp_path / "out").exists() and HERE.exists()
