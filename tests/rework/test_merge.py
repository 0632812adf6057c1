"""`surgeon merge`: branches become the weights of a native model, and what that changes is measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.edits import merge_branches
from surgeon.errors import BadInput
from surgeon.runtime.births import Birth, Fill
from surgeon.runtime.interpolators import Interpolation
from tests import tiny
from tests.adapters import lora
from tests.checkpoints import same_bytes, train, weights, write_plan
from tests.elsewhere import load_elsewhere
from tests.test_api import check_json

CONTROL: dict[str, Any] = {"op": "control_llm", "layers": [1, 4]}


def test_merge_folds_branches_and_measures(base: Path, plan: Callable[..., Path], tmp_path: Path) -> None:
    """Against the mean of both branches' weights in float64; a native model whose logits differ, as promised."""
    out, merged = tmp_path / "out", tmp_path / "merged"
    star = {"interpolator": {"kind": "lerp", "alpha": 1.0, "inference_alpha": 0.25}}
    surgeon.apply(plan(CONTROL | star), str(base), out)
    train(out, seed=7, scale=0.1)
    result = surgeon.merge(out, merged, window=24, windows=1)
    assert result.applied.manifest.native
    assert result.measured.promise == "none"
    assert result.measured.identical is False
    assert result.measured.holds
    check_json(result)
    before, after = weights(out), weights(merged)
    for layer in (1, 4):
        for suffix in ("mlp.up_proj.weight", "input_layernorm.weight"):
            name = f"model.layers.{layer}.{suffix}"
            trunk, twin = before[name].double(), before[f"model.layers.{layer}.expanded.{suffix}"].double()
            assert torch.equal(after[name], (0.75 * trunk + 0.25 * twin).to(torch.bfloat16))
    assert set(after) == set(weights(base))
    (elsewhere,) = load_elsewhere(merged, cache=tmp_path)
    assert elsewhere["class"] == "LlamaForCausalLM"
    config, native = (json.loads((folder / "config.json").read_text()) for folder in (merged, base))
    assert config == native


def test_a_model_without_branches_is_named_and_no_plan_that_nobody_wrote(base: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        surgeon.merge(base, tmp_path / "merged")
    assert str(caught.value) == f"{base}: there is no control block to merge in this model"


class Tanh(Interpolation):
    """A learned α that is no logit's sigmoid: ½ (1 + tanh c)."""

    def learned(self, alpha: float) -> dict[str, Birth]:
        return {"c": Fill((1,), math.atanh(2 * alpha - 1))}


def test_merge_asks_for_the_share_where_a_learned_alpha_is_no_logit(
    base: Path, plan: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    surgeon.apply(plan(CONTROL | {"interpolator": {"learnable": True}}), str(base), tmp_path / "out")
    monkeypatch.setattr(merge_branches, "INTERPOLATORS", {"lerp": Tanh()})
    with pytest.raises(BadInput, match="learns its α in another form than a logit; say which fixed share"):
        surgeon.merge(tmp_path / "out", tmp_path / "merged", window=24, windows=1)
    merged = surgeon.merge(tmp_path / "out", tmp_path / "merged", alpha=0.25, window=24, windows=1)
    assert merged.applied.manifest.native


def test_an_adapter_is_merged_into_its_base_by_what_the_folders_are(tmp_path: Path) -> None:
    """As by a plan with `merge_adapter`, tensor for tensor; a folder in the wrong place is named before torch is."""
    base = tiny.checkpoint(tmp_path / "base", "llama", num_hidden_layers=2)
    adapter = lora(tmp_path / "adapter", layers=2)
    plan = write_plan(tmp_path / "plan.yaml", [{"op": "merge_adapter", "from": "adapter"}])
    expected = surgeon.apply(plan, base, tmp_path / "expected").path
    found = surgeon.merge(base, adapter, tmp_path / "out")
    assert found.measured is None and found.to_json()["measured"] is None
    assert same_bytes(weights(tmp_path / "out"), weights(expected))
    for given, options, said in (
        ((base, adapter), {}, "adapter: a PEFT adapter; name the new folder behind it: .* BASE ADAPTER MERGED"),
        ((base, adapter, tmp_path / "new"), {"alpha": 0.5}, "--alpha: for control blocks .* BASE ADAPTER MERGED"),
        ((base, base, tmp_path / "new"), {}, "this is the folder of a whole model: give"),
        ((adapter, adapter, tmp_path / "new"), {}, "a PEFT adapter, not a base"),
        ((adapter, tmp_path / "new"), {}, "a PEFT adapter, not a base"),
    ):
        with pytest.raises(BadInput, match=said):
            surgeon.merge(*given, **options)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()
