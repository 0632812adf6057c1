"""Plans on quantised bases are proven on twins that are stored as these are."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.anatomy.dissect import dissect_folder
from surgeon.blueprint.recipes import Dequantised, elsewhere
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common import cache
from surgeon.errors import BadInput
from surgeon.models.load import load_model
from surgeon.operations.prepare import OpenedBase
from surgeon.plan.plan import draw, load_plan
from surgeon.writing import small_run
from tests.checkpoints import as_bytes, edit_tensor, weights
from tests.quantised import tiny_quantised
from tests.writing.test_small_run import FAULTS, plan_of

# What stores scales of FP8 blocks.
SCALES: dict[str, Any] = {
    "F32": lambda value: value,
    "BF16": lambda value: value.bfloat16(),
    "F8_E8M0": lambda value: value.to(torch.float8_e8m0fnu),
    "U8": lambda value: value.log2().round().add(127).to(torch.uint8),
}
METHODS = {"qwen3": "fp8", "deepseek_v3": "fp8", "gpt_oss": "mxfp4"}


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test proved says nothing of a mistake that is planted here."""
    monkeypatch.setenv(cache.VARIABLE, "off")


def with_scales(base: Path, dtype: str) -> Path:
    """The checkpoint with scales of FP8 blocks in another dtype."""
    for name in weights(base):
        if name.endswith("_scale_inv"):
            edit_tensor(base, name, SCALES[dtype])
    return base


def twin_of(base: Path, plan: Path, folder: Path) -> tuple[OpenedBase, CheckpointFolder]:
    """A base, and its twin for a plan."""
    found = CheckpointFolder.open(base)
    opened = OpenedBase(found, dissect_folder(found))
    return opened, small_run.save_twin(opened, draw(load_plan(plan), opened.anatomy, found.config, {}), folder)


CASES = [*((model_type, "F32") for model_type in METHODS), *(("qwen3", scales) for scales in SCALES if scales != "F32")]


@pytest.mark.parametrize(("model_type", "scales"), CASES)
def test_it_is_stored_as_its_base(model_type: str, scales: str, tmp_path: Path) -> None:
    """By the same names, in the same dtypes, in several blocks, and of finite numbers that transformers can load."""
    base = with_scales(tiny_quantised(tmp_path / "base", model_type, METHODS[model_type]), scales)
    opened, twin = twin_of(base, plan_of(tmp_path, {"op": "dequantise"}), tmp_path / "twin")
    stored = {name: info.dtype for name, info in twin.tensors.items()}
    assert stored == {name: opened.folder.tensors[name].dtype for name in stored}
    quantised = {name for name, dtype in stored.items() if dtype in ("F8_E4M3", "U8") and "scale" not in name}
    beside = {name for name in stored if "scale" in name}
    assert quantised and len(beside) == len(quantised)
    assert all(info.numel > 8 for name, info in twin.tensors.items() if name in beside)
    assert {torch.isfinite(value).all().item() for value in load_model(twin).state_dict().values()} == {True}


def other_code(old: str, new: str) -> Any:
    """A recipe that computes something else."""
    code = textwrap.dedent(inspect.getsource(Dequantised.compute))
    assert old in code
    names = dict(vars(elsewhere))
    exec("from __future__ import annotations\n" + code.replace(old, new), names)
    return names["compute"]


# What is computed wrongly, by model type.
MISTAKES = {
    "scales along the other axis": ("qwen3", "spread = spread.rep", "spread = spread.mT.reshape(spread.shape).rep"),
    "scales dropped": ("deepseek_v3", "weight.float() * spread", "weight.float()"),
    "rounded twice": ("qwen3", "weight.float() * spread", "weight.float() * spread.bfloat16().float()"),
    "nibbles in the other order": ("gpt_oss", "[one & 15, one >> 4]", "[one >> 4, one & 15]"),
    "not transposed": ("gpt_oss", ".transpose(-1, -2))", ".reshape(into.shape))"),
    "another bias": ("gpt_oss", "exponents.int() - _EXPONENT_BIAS", "exponents.int() - _EXPONENT_BIAS + 1"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_numbers_are_noticed(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, old, new = MISTAKES[mistake]
    base = tiny_quantised(tmp_path / "base", model_type, METHODS[model_type])
    monkeypatch.setattr(Dequantised, "compute", other_code(old, new))
    with pytest.raises(BadInput, match=r"on a twin of this model, the logits .* are not the base's"):
        surgeon.apply("dequantise", base, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model_type", METHODS)
def test_a_number_of_four_bits_or_eight_counts(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of sixteen values is wrong, or one code of 256."""
    base = tiny_quantised(tmp_path / "base", model_type, METHODS[model_type])
    table = (*elsewhere._FOUR_BITS[:11], -1.75, *elsewhere._FOUR_BITS[12:])
    monkeypatch.setattr(elsewhere, "_FOUR_BITS", table)
    off = "torch.where(weight.view(torch.uint8) == 250, -weight.float(), weight.float()) * spread"
    monkeypatch.setattr(Dequantised, "compute", other_code("weight.float() * spread", off))
    with pytest.raises(BadInput, match=r"on a twin of this model, the logits .* are not the base's"):
        surgeon.apply("dequantise", base, tmp_path / "out", device="cpu")


@pytest.mark.parametrize("fault", ["one writer is not silenced", "manifest of other layers"])
@pytest.mark.parametrize("model_type", METHODS)
def test_mistakes_in_layers_beside_quantised_ones_are_noticed(
    model_type: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, planted = FAULTS[fault]
    base = tiny_quantised(tmp_path / "base", model_type, METHODS[model_type])
    planted(monkeypatch)
    with pytest.raises(BadInput, match="on a twin of this model"):
        surgeon.apply(plan_of(tmp_path, operation), base, tmp_path / "out", device="cpu")


@pytest.mark.parametrize("model_type", METHODS)
def test_a_layer_that_goes_without_a_trace_is_zero_codes(model_type: str, tmp_path: Path) -> None:
    base = tiny_quantised(tmp_path / "base", model_type, METHODS[model_type])
    opened, twin = twin_of(base, plan_of(tmp_path, {"op": "drop_layers", "layers": [1]}), tmp_path / "twin")
    anatomy, held = opened.anatomy, weights(twin.path)
    silent = {anatomy.layer_name(1, suffix) for suffix in anatomy.kinds[anatomy.kind_of[1]].silence}
    zeros = [name for name in silent & held.keys() if not as_bytes(held[name]).any()]
    assert zeros and not any(as_bytes(held[name]).any() for name in silent & held.keys())
    assert any(twin.tensors[name].dtype in ("F8_E4M3", "U8") for name in zeros)
