"""`expert_layout`: both layouts are, tensor for tensor, what transformers' own saving makes of the model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.errors import BadInput
from surgeon.operations import expert_layout
from tests import mtp, tiny
from tests.checkpoints import same_bytes, weights, write_plan
from tests.decoders import tiny_decoder
from tests.operations.test_grow_vocabulary import assert_same, logits_of
from tests.quantised import tiny_quantised

IDS = torch.randint(4, 38, (2, 12), generator=torch.Generator().manual_seed(0))


def laid(folder: Path, base: Path, layout: str) -> Path:
    plan = write_plan(folder / f"{layout}.yaml", [{"op": "expert_layout", "layout": layout}])
    return surgeon.apply(plan, base, folder / layout, device="cpu").path


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_next"])
def test_both_layouts_are_those_that_transformers_saves(model_type: str, tmp_path: Path) -> None:
    """Mixtral's other names change with them; Qwen3-Next has Qwen3-MoE's, in layers of two kinds."""
    base = tiny_decoder(tmp_path / "base", model_type, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model.save_pretrained(tmp_path / "as-saved")
    model.save_pretrained(tmp_path / "as-computed", save_original_format=False)
    stacked = laid(tmp_path, base, "stacked")
    assert same_bytes(weights(stacked), weights(tmp_path / "as-computed"))
    separate = laid(tmp_path, stacked, "separate")
    assert same_bytes(weights(separate), weights(tmp_path / "as-saved"))
    assert len(weights(stacked)) < len(weights(separate))
    for dtype in ("float32", "bfloat16"):
        assert torch.equal(logits_of(base, IDS, dtype), logits_of(stacked, IDS, dtype)), dtype
    proof = surgeon.verify(base, separate, device="cpu", windows=1, window=16)
    assert proof.holds and proof.identical and len(proof.comparisons) == 2
    for number, before in ((1, stacked), (0, base)):
        surgeon.revert(separate, tmp_path / f"back-{number}", to=number)
        assert_same(before, tmp_path / f"back-{number}")


def test_surgeries_go_on_and_layers_above_the_stack_stay(tmp_path: Path) -> None:
    base = mtp.checkpoint(tmp_path / "base", "deepseek_v3", dtype="bfloat16")
    above = {name: value for name, value in weights(base).items() if f".layers.{mtp.LAYERS}." in name}
    stacked = laid(tmp_path, base, "stacked")
    assert any(".experts.0." in name for name in above)
    assert same_bytes({name: weights(stacked)[name] for name in above}, above)
    deeper = {"op": "insert_layers", "where": {"after": [1]}, "init": {"kind": "copy"}}
    out = surgeon.apply(write_plan(tmp_path / "two.yaml", [deeper]), stacked, tmp_path / "out", device="cpu").path
    assert surgeon.verify(stacked, out, device="cpu", windows=1, window=16).holds
    surgeon.revert(out, tmp_path / "back", to=0)
    assert_same(base, tmp_path / "back")


def test_other_orders_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin that transformers loads shows up for gate, and one expert for another."""
    base = tiny.checkpoint(
        tmp_path / "base", "qwen3_moe", num_hidden_layers=2, num_experts=4, moe_intermediate_size=16, head_dim=16
    )
    right = expert_layout._together

    def wrong(tensors: Any, saved: Any, *, swapped: bool) -> Any:
        experts = saved[::-1] if not swapped else [expert[::-1] for expert in saved]
        return right(tensors, experts)

    for swapped in (True, False):
        with monkeypatch.context() as patched:
            patched.setattr(expert_layout, "_together", functools.partial(wrong, swapped=swapped))
            with pytest.raises(BadInput, match="on a twin transformers loads another model"):
                laid(tmp_path, base, "stacked")
    assert not (tmp_path / "stacked").exists()


def test_what_is_refused(tmp_path: Path) -> None:
    plan = [{"op": "expert_layout", "layout": "stacked"}]
    for model_type in ("gpt_oss", "granitemoe", "llama"):
        base = tiny_decoder(tmp_path / model_type, model_type)
        with pytest.raises(BadInput, match=rf"one layout alone for the experts of a {model_type}, or none"):
            surgeon.preview(write_plan(tmp_path / "plan.yaml", plan), base)
    base = tiny_decoder(tmp_path / "base", "qwen3_moe")
    with pytest.raises(BadInput, match="are in tensors for each already; leave"):
        surgeon.preview(write_plan(tmp_path / "plan.yaml", [plan[0] | {"layout": "separate"}]), base)
    drop = {"op": "drop_layers", "layers": [1]}
    for operations, reason in (([drop, *plan], "by a plan of its own"), ([*plan, drop], "after `expert_layout`")):
        with pytest.raises(BadInput, match=reason):
            surgeon.preview(write_plan(tmp_path / "plan.yaml", operations), base)
    with pytest.raises(BadInput, match="the experts are quantised"):
        write_plan(tmp_path / "plan.yaml", plan)
        surgeon.preview(tmp_path / "plan.yaml", tiny_quantised(tmp_path / "fp8", "deepseek_v3", "fp8"))
