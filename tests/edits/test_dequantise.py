"""`dequantise`: by plain transformers, the output is to the bit what the base is when it is loaded dequantised."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import surgeon
from surgeon.errors import BadInput
from tests import tiny
from tests.checkpoints import edit_config, edit_tensor, weights, write_plan
from tests.quantised import fp8_blocks, tiny_quantised

# By model type: dense, with experts one by one and in one tensor, whose scales are of one block or of many.
METHODS = {"qwen3": "fp8", "deepseek_v3": "fp8", "gpt_oss": "mxfp4"}


@pytest.fixture(scope="module", params=METHODS)
def dequantised(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Path]]:
    """A base, and what the shipped plan makes of it."""
    folder = tmp_path_factory.mktemp(request.param)
    base = tiny_quantised(folder / "base", request.param, METHODS[request.param])
    surgeon.apply("dequantise", base, folder / "out", device="cpu")
    yield base, folder / "out"


def test_it_is_what_transformers_makes_of_the_base(dequantised: tuple[Path, Path]) -> None:
    one, other = (AutoModelForCausalLM.from_pretrained(folder, dtype="auto") for folder in dequantised)
    before, after = one.state_dict(), other.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert {value.dtype for value in weights(dequantised[1]).values()} == {torch.bfloat16}
    configs = [json.loads((folder / "config.json").read_text()) for folder in dequantised]
    assert configs[0].pop("quantization_config") and configs[0] == configs[1]


def test_verify_and_revert(dequantised: tuple[Path, Path], tmp_path: Path) -> None:
    base, out = dequantised
    verified = surgeon.verify(
        base, out, device="cpu", window=16, windows=1, dtypes=("auto", "bfloat16", "float16", "float32")
    )
    assert verified.holds and verified.identical and len(verified.comparisons) == 8
    with pytest.raises(BadInput, match="take the base of that surgery itself"):
        surgeon.revert(out, tmp_path / "back")
    edited = shutil.copytree(out, tmp_path / "edited")
    name = next(name for name in weights(out) if "down_proj" in name)
    edit_tensor(edited, name, lambda value: value.flip(0))
    assert not surgeon.verify(base, edited, device="cpu", window=16, windows=1).holds


def test_layers_above_the_stack_and_the_head_are_dequantised_too(tmp_path: Path) -> None:
    base = tiny_quantised(tmp_path / "base", "qwen3", "fp8", skipped=[])
    held = weights(base)
    for file in (*base.glob("*.safetensors"), *base.glob("*.index.json")):
        file.unlink()
    count = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    above = {n.replace("layers.0.", f"layers.{count}."): v.clone() for n, v in held.items() if ".layers.0." in n}
    above[f"model.layers.{count}.enorm.weight"] = held["model.norm.weight"].clone()
    head = dict(zip(("lm_head.weight", "lm_head.weight_scale_inv"), fp8_blocks(held["lm_head.weight"]), strict=True))
    save_file(held | above | head, base / "model.safetensors", metadata={"format": "pt"})
    surgeon.apply("dequantise", base, tmp_path / "out", device="cpu")
    made = weights(tmp_path / "out")
    assert {value.dtype for value in made.values()} == {torch.bfloat16}
    assert all(
        torch.equal(made[name.replace("layers.0.", f"layers.{count}.")], made[name])
        for name in made
        if ".layers.0." in name
    )
    numbers = (
        head["lm_head.weight"].float()
        * head["lm_head.weight_scale_inv"]
        .repeat_interleave(128, 0)
        .repeat_interleave(128, 1)[: len(made["lm_head.weight"]), : made["lm_head.weight"].shape[1]]
    )
    assert torch.equal(made["lm_head.weight"], numbers.bfloat16())
    assert surgeon.verify(base, tmp_path / "out", device="cpu", window=16, windows=1).holds


def test_numbers_that_transformers_makes_otherwise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of a matrix is enough."""
    base = tiny_quantised(tmp_path / "base", "qwen3", "fp8")
    original = Fp8Dequantize._dequantize_one

    def off(self: Any, quantized: Any, *args: Any, **named: Any) -> Any:
        found = original(self, quantized, *args, **named)
        found.view(-1)[5] *= 2
        return found

    monkeypatch.setenv("SURGEON_CACHE", "off")
    monkeypatch.setattr(Fp8Dequantize, "_dequantize_one", off)
    with pytest.raises(BadInput, match=r"on a twin .* are not the base's, .*use the transformers of constraints"):
        surgeon.apply("dequantise", base, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_dequantised_is_refused(tmp_path: Path) -> None:
    plain = tiny.checkpoint(tmp_path / "plain", "llama", num_hidden_layers=2)
    with pytest.raises(BadInput, match="no `quantization_config`, so nothing is quantised here; leave"):
        surgeon.preview("dequantise", plain)
    base = tiny_quantised(tmp_path / "base", "qwen3", "fp8")
    write_plan(tmp_path / "plan.yaml", [{"op": "drop_layers", "layers": [1]}, {"op": "dequantise"}])
    with pytest.raises(BadInput, match="by a plan of its own: apply the operations before it first"):
        surgeon.preview(tmp_path / "plan.yaml", base)
    write_plan(tmp_path / "plan.yaml", [{"op": "dequantise"}, {"op": "drop_layers", "layers": [1]}])
    with pytest.raises(BadInput, match="it comes after `dequantise`"):
        surgeon.preview(tmp_path / "plan.yaml", base)
    half = shutil.copytree(base, tmp_path / "half")
    edit_config(half, dtype="float16")
    with pytest.raises(BadInput, match="dtype float16: surgeon dequantises to bfloat16; write"):
        surgeon.preview("dequantise", half)
    write_plan(tmp_path / "plan.yaml", [{"op": "gated_adapters", "layers": [0], "size": 8}])
    surgeon.apply(tmp_path / "plan.yaml", base, tmp_path / "grafted", device="cpu")
    with pytest.raises(BadInput, match="carries grafts beside quantised layers"):
        surgeon.preview("dequantise", tmp_path / "grafted")


@pytest.mark.parametrize("where", ["scale", "number", "exponent"])
def test_what_is_no_number_in_the_base_is_no_matter_of_range(where: str, tmp_path: Path) -> None:
    """A scale or an FP8 number is named by its place; of exponents that say NaN the tensor is."""
    base = tiny_quantised(tmp_path / "base", "qwen3", "fp8")
    name = next(name for name in weights(base) if "down_proj" in name and name.endswith("weight"))
    scales = f"{name}_scale_inv"
    if where == "exponent":
        edit_tensor(
            base, scales, lambda value: torch.full(value.shape, 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        )
    else:
        changed = scales if where == "scale" else name
        edit_tensor(base, changed, lambda value: torch.full(value.shape, torch.nan).to(value.dtype))
    said = "the new values are NaN: a scale of the base is" if where == "exponent" else r"holds nan at \[0, 0\]"
    with pytest.raises(BadInput, match=f"{name.rpartition('.')[0]}.*{said}"):
        surgeon.apply("dequantise", base, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()
