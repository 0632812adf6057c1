"""A block that several layers run and that is stored once (Zamba 2): layers come and go, each has its own grafts."""

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
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from surgeon.families.adapted_ffns import adapted_ffns
from surgeon.families.dissect import dissect
from surgeon.families.shared import first_of_another, shared_in
from surgeon.families.skeleton import build
from tests.checkpoints import weights, write_plan
from tests.decoders import checkpoint_of

# Layers 2 and 5 run one block, which is stored as layer 2's.
SHARED = "model.layers.2.shared_transformer"
# Layers 0 and 3 run one block, layers 2 and 5 another.
TWO_BLOCKS = PUBLISHED["zamba2"] | {
    "num_mem_blocks": 2,
    "num_hidden_layers": 6,
    "hybrid_layer_ids": [0, 2, 3, 5],
    "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid", "mamba", "hybrid"],
}
IDS = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of(PUBLISHED["zamba2"], tmp_path_factory.mktemp("shared") / "base")


@pytest.fixture(scope="module")
def two_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of(TWO_BLOCKS, tmp_path_factory.mktemp("two") / "base")


def loaded(folder: Path, **more: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()


def test_a_block_that_layers_share_follows_new_layers_and_comes_back(base: Path, tmp_path: Path) -> None:
    """Zamba 2 stores it once; its adapters are numbered by the layers that run it, so old ones move up."""
    out, back = tmp_path / "out", tmp_path / "back"
    insert = {"op": "insert_layers", "where": {"after": [0, 2]}, "init": {"kind": "copy"}}
    surgeon.apply(write_plan(tmp_path / "plan.yaml", [insert]), base, out)
    assert surgeon.verify(base, out, windows=1, window=16).identical
    held, was = CheckpointFolder.open(out).tensors, CheckpointFolder.open(base).tensors
    adapters = "shared_transformer.feed_forward.gate_up_proj_adapter_list"
    assert f"model.layers.3.{adapters}.2.0.weight" in held
    assert f"model.layers.2.{adapters}.2.0.weight" not in was
    assert not any(name.startswith("model.layers.4.shared") for name in held)
    surgeon.revert(out, back, base=base)
    assert CheckpointFolder.open(back).tensors.keys() == was.keys()


@pytest.mark.parametrize("dropped", [2, 5])
def test_without_a_layer_the_others_compute_what_they_did(dropped: int, base: Path, tmp_path: Path) -> None:
    """Also without the one under whose name the block is stored: it moves to the other."""
    plan = write_plan(tmp_path / "plan.yaml", [{"op": "drop_layers", "layers": [dropped]}])
    surgeon.apply(plan, base, tmp_path / "out")
    model = loaded(base)
    model.model.layers[dropped].forward = lambda hidden_states, *_, **__: hidden_states
    with torch.no_grad():
        assert torch.equal(loaded(tmp_path / "out")(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)


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


@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_experts_beside_a_shared_ffn_are_what_each_layer_computes_there(
    dtype: str, off: float, two_blocks: Path, tmp_path: Path
) -> None:
    """W + B A with the layer's own adapter: given the FFN's output matrix, both experts together double the FFN."""
    base, out = (two_blocks if dtype == "bfloat16" else tmp_path / "base"), tmp_path / "out"
    if dtype == "float32":
        checkpoint_of(TWO_BLOCKS, base, dtype=dtype)
    plan = [{"op": "upcycle_experts", "form": "shared", "experts": 2, "top_k": 2}]
    made = surgeon.apply(write_plan(tmp_path / "plan.yaml", plan), base, out)
    assert {name.split(".")[2] for name in made.manifest.new_tensors} == {"0", "2", "3", "5"}
    assert surgeon.verify(base, out, windows=1, window=16, dtypes=[dtype]).identical
    grown, model = loaded(out, trust_remote_code=True), loaded(base)
    for index in (0, 2, 3, 5):
        native = model.model.layers[index].shared_transformer.feed_forward
        grown.model.layers[index].mlp.routed.down_proj.data.copy_(native.down_proj.weight.expand(2, -1, -1))
        native.register_forward_hook(lambda _module, _args, output: 2 * output)
    with torch.no_grad():
        wanted, found = model(IDS).logits, grown(IDS).logits
    assert float((found - wanted).abs().max()) <= off * float(wanted.abs().max())


def test_an_ffn_whose_formula_a_twin_does_not_confirm_is_left_out(two_blocks: Path) -> None:
    folder = CheckpointFolder.open(two_blocks)
    own: Any = dissect(folder.config, folder.tensors).derivation
    parts, outer, heads = own.shared_parts(), own.names.outer, own.derived.heads
    found = [
        adapted_ffns(folder.config, parts, outer, lambda _, name=name: name, heads=heads) for name in ("gelu", "silu")
    ]
    assert [*found[0]] == [0, 2, 3, 5] and not found[1]


def test_the_ffn_of_shared_blocks_becomes_wider_and_so_does_the_stream(two_blocks: Path, tmp_path: Path) -> None:
    """Each block's once; adapters of each layer that runs it grow with its gate and up, and add nothing to new ones."""
    base, out, by = two_blocks, tmp_path / "out", 16
    surgeon.apply(write_plan(tmp_path / "plan.yaml", [{"op": "widen_ffn", "by": by}]), base, out)
    assert surgeon.verify(base, out, windows=1, window=16, dtypes=["float32"]).holds
    before, after = weights(base), weights(out)
    grown = {name for name, value in before.items() if value.shape != after[name].shape}
    # Of each block two, and an adapter for each of the four layers that run one.
    assert len(grown) == 2 * 2 + 4
    for name in grown:
        if name.endswith("down_proj.weight"):
            assert torch.equal(after[name], torch.cat([before[name], torch.zeros(64, by)], 1).to(after[name].dtype))
            continue
        for one, other in zip(before[name].chunk(2), after[name].chunk(2), strict=True):
            assert torch.equal(other[:-by], one)
            assert bool(other[-by:].any()) == ("adapter" not in name)
    wide = tmp_path / "wide"
    plan = write_plan(tmp_path / "plan.yaml", [{"op": "widen_hidden", "times": 2}])
    grew = surgeon.apply(plan, base, wide).manifest.new_tensors
    assert surgeon.verify(base, wide, windows=1, window=16, dtypes=["float32"]).holds
    name = "model.layers.2.shared_transformer.self_attn.q_proj.weight"
    query, made = (weights(each)[name] for each in (base, wide))
    # The upper rows are the base's, and stay; those below train.
    assert [[*part] for part in grew[name].recipe["joined"][0]["joined"]] == [
        ["copy", "axis", "slices"],
        ["again", "axis", "slices"],
    ]
    # What it reads is the stream, and beside it the embeddings: each has its zeros behind it.
    assert made.shape == (2 * 128, 2 * 128)
    for rows in made.split(128):
        for one, other in zip(query.split(64, dim=1), rows.split(2 * 64, dim=1), strict=True):
            assert torch.equal(other[:, :64], one) and not other[:, 64:].any()


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


def test_one_block_may_not_become_two_nor_two_one() -> None:
    """Each would have to learn for itself, or no more."""
    one, two = (build(PUBLISHED["zamba2"] | {"num_mem_blocks": count}) for count in (1, 2))
    order = range(len(one.layers))
    assert shared_in(two) is None and first_of_another(one, shared_in(one), order) == (None, "")
    assert first_of_another(two, shared_in(one), order)[0] == 5
    assert first_of_another(one, None, order)[0] == 5
