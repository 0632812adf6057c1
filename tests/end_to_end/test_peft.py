"""PEFT adapters as slots and back: peft's own logits, its own bits, and every refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surgeon import api
from tests import tiny

# peft asks transformers for what transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.arange(3, 43).reshape(4, 10)
IMPORT: dict[str, Any] = {"op": "pmoe_experts", "from_peft": "adapter"}
EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# family and LoraConfig: what differs is rank, scale and fused modules.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "query and value": ("llama", {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8}),
    "patterns": (
        "llama",
        {
            "target_modules": EVERYWHERE,
            "r": 6,
            "lora_alpha": 5,
            "use_rslora": True,
            "lora_dropout": 0.1,
            "rank_pattern": {"q_proj": 2, r"layers.[2-3].mlp.up_proj": 3},
            "alpha_pattern": {"down_proj": 7, r"^model.layers.1.self_attn.v_proj": 11, r"layers.\d.*gate_proj": 3},
        },
    ),
    "some layers": ("llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1, 4]}),
    "gemma2": ("gemma2", {"target_modules": EVERYWHERE, "r": 3, "lora_alpha": 7}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 5, "lora_alpha": 16}),
}


def train(base: Path, adapter: Path, *, steps: int = 3, seed: int = 0, **config: Any) -> torch.Tensor:
    """A LoRA that peft trains on `base` in float32 for a few steps and saves; its logits."""
    torch.manual_seed(seed)
    native = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    model = get_peft_model(native, LoraConfig(task_type="CAUSAL_LM", **config))
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-2)
    model.train()
    for _ in range(steps):
        optimiser.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimiser.step()
    model.eval().save_pretrained(adapter)
    return logits(model)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
    return found


def load(out: Path, dtype: str = "float32") -> Any:
    return AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=dtype).eval()


def with_adapter(base: Path, adapter: Path) -> torch.Tensor:
    native = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    return logits(PeftModel.from_pretrained(native, adapter).eval())


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_as_the_only_slot_computes_what_peft_computes(
    case: str, plan: Callable[..., Path], tmp_path: Path
) -> None:
    family, config = ADAPTERS[case]
    base, out, adapter = tmp_path / "base", tmp_path / "out", tmp_path / "adapter"
    tiny.checkpoint(base, family, dtype="float32")
    expected = train(base, adapter, **config)
    native = logits(load(base))
    applied = api.apply(plan(IMPORT), str(base), out)
    assert applied.manifest.promise == "none"
    assert (expected - native).abs().max() > 0.1
    torch.testing.assert_close(logits(load(out)), expected, rtol=1e-4, atol=1e-4)
    assert api.verify(base, out, window=24, windows=1).holds
