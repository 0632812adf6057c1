"""A block that several layers run and that is stored once (Zamba 2): layers stay, each has its own grafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import surgeon
from benchmarks.published_configs import PUBLISHED
from surgeon.anatomy.growth import grown
from surgeon.anatomy.shared import shared_in
from surgeon.anatomy.skeleton import build
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from tests.checkpoints import write_plan
from tests.decoders import checkpoint_of

# Layers 2 and 5 run one block, which is stored as layer 2's.
SHARED = "model.layers.2.shared_transformer"
IDS = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of(PUBLISHED["zamba2"], tmp_path_factory.mktemp("shared") / "base")


def loaded(folder: Path, **more: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "insert_layers", "where": {"after": [0]}, "init": {"kind": "copy"}},
        {"op": "drop_layers", "layers": [0]},
        {"op": "control_llm", "layers": [0]},
    ],
)
def test_the_stack_keeps_its_layers(operation: dict[str, Any], base: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"layers share a block \(`shared_transformer`\).*use adapters, slots"):
        surgeon.preview(write_plan(tmp_path / "plan.yaml", [operation]), base)


def test_each_layer_has_grafts_of_its_own_beside_a_shared_block(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = surgeon.apply(write_plan(tmp_path / "plan.yaml", [{"op": "gated_adapters", "size": 8}]), base, out)
    model = loaded(out, trust_remote_code=True)
    tensors = {name: value for name, value in model.named_parameters() if name in made.manifest.new_tensors}
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in tensors.values():
            value.add_(0.1 * torch.randn(value.shape, generator=draws))
        logits = {"all": model(IDS).logits}
        for layer in ("2", "5"):
            mine = [value for name, value in tensors.items() if f"layers.{layer}." in name]
            kept = [value.clone() for value in mine]
            assert len(mine) == len(tensors) // 2
            for value in mine:
                value.add_(0.3 * torch.randn(value.shape, generator=draws))
            logits[layer] = model(IDS).logits
            for value, before in zip(mine, kept, strict=True):
                value.copy_(before)
        assert torch.equal(model(IDS).logits, logits["all"])
    assert not any(torch.equal(logits[one], logits[two]) for one, two in (("all", "2"), ("all", "5"), ("2", "5")))


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ({"op": "widen_ffn", "by": 16}, "several layers share, and such a block does not become wider; use grafts"),
        ({"op": "pad_to", "multiple_of": 1024}, "several layers share, and such a block does not become wider"),
        ({"op": "widen_hidden", "times": 2}, "its layers share a block .`shared_transformer`., and which sides"),
        ({"op": "upcycle_experts", "form": "shared", "experts": 2}, "experts begin as copies of a layer's own; use"),
        ({"op": "upcycle_experts", "form": "copies", "experts": 2}, "no class known here has experts in such a block"),
    ],
)
def test_a_block_that_layers_share_keeps_its_width_and_gets_no_experts(
    operation: dict[str, Any], words: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=words) as refused:
        surgeon.preview(write_plan(tmp_path / "plan.yaml", [operation]), base)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("layer", [2, 5])
def test_an_adapter_on_a_tensor_of_several_layers_is_not_merged(layer: int, base: Path, tmp_path: Path) -> None:
    """Merged, what it says of one layer would change the other."""
    name = f"{SHARED.replace('.2.', f'.{layer}.')}.self_attn.q_proj"
    rows, columns = CheckpointFolder.open(base).tensors[f"{SHARED}.self_attn.q_proj.weight"].shape
    lora = {"lora_A": torch.ones(2, columns), "lora_B": torch.ones(rows, 2)}
    held = {f"base_model.model.{name}.{key}.weight": value for key, value in lora.items()}
    (tmp_path / "adapter").mkdir()
    save_file(held, tmp_path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(told))
    plan = write_plan(tmp_path / "plan.yaml", [{"op": "merge_adapter", "from": str(tmp_path / "adapter")}])
    with pytest.raises(BadInput, match=rf"layers\.{layer}\..*for several layers"):
        surgeon.apply(plan, base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_shared_is_found_by_the_tensors_that_layers_have_in_common() -> None:
    one, two = (build(PUBLISHED["zamba2"] | {"num_mem_blocks": count}) for count in (1, 2))
    assert (shared_in(one), shared_in(two)) == (("shared_transformer",), ())
    # With one layer more, layers would share a block, which those of the base do not.
    with pytest.raises(BadInput, match="cannot be described: its layer"):
        grown(PUBLISHED["zamba2"] | {"num_mem_blocks": 2}, two, [0, 1, 2, *range(len(two.layers))])
