"""Checkpoints laid out as they were published, not as transformers saves them today, and what it reads all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import surgeon
from surgeon.anatomy import grafted_config
from surgeon.anatomy.anatomy import layer_of
from surgeon.anatomy.skeleton import CAUSAL, IMAGE_TEXT
from surgeon.errors import BadInput
from tests import tiny
from tests.checkpoints import same_bytes, weights
from tests.decoders import tiny_decoder

Tensors = dict[str, torch.Tensor]


def rewritten(folder: Path, change: Callable[[str, torch.Tensor], Tensors]) -> None:
    """Every stored tensor, as `change` has it."""
    index = folder / "model.safetensors.index.json"
    places: dict[str, str] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        made: Tensors = {}
        for name, value in load_file(shard).items():
            made |= change(name, value)
        save_file(made, shard, metadata={"format": "pt"})
        places |= dict.fromkeys(made, shard.name)
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))


def gpt2(folder: Path) -> str:
    """Without the base model's prefix, with the masks of every layer."""

    def change(name: str, value: torch.Tensor) -> Tensors:
        bare = name.removeprefix("transformer.")
        masks = {bare.replace("ln_1.weight", "attn.bias"): torch.ones(1, 1, 8, 8).tril()}
        return {bare: value} | (masks if bare.endswith("ln_1.weight") else {})

    rewritten(tiny_decoder(folder, "gpt2", tie_word_embeddings=True), change)
    return CAUSAL


def pythia(folder: Path) -> str:
    """With masks as bytes and the frequencies of every layer's rotation."""

    def change(name: str, value: torch.Tensor) -> Tensors:
        if not name.endswith("attention.dense.weight"):
            return {name: value}
        block = name.removesuffix("dense.weight")
        buffers = {"bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8), "masked_bias": torch.tensor(-1e9)}
        buffers["rotary_emb.inv_freq"] = torch.ones(2)
        return {name: value} | {f"{block}{key}": buffer for key, buffer in buffers.items()}

    rewritten(tiny_decoder(folder, "gpt_neox"), change)
    return CAUSAL


def llama(folder: Path) -> str:
    """Without the base model's prefix, its head tied."""
    tiny.checkpoint(folder, "llama", dtype="float32", tie_word_embeddings=True)
    rewritten(folder, lambda name, value: {name.removeprefix("model."): value.clone()})
    return CAUSAL


def qwen2_vl(folder: Path) -> str:
    """The text's settings at the top of config.json."""
    tiny_decoder(folder, "qwen2_5_vl", IMAGE_TEXT)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    top = {key: value for key, value in text.items() if key not in ("model_type", "dtype", "tie_word_embeddings")}
    (folder / "config.json").write_text(json.dumps({**top, **config}, indent=2) + "\n")
    return IMAGE_TEXT


PLAN = """surgeon: 1
operations:
  - {op: insert_layers, where: {after: [1]}, init: {kind: copy}}
  - {op: control_llm, layers: [0, 2]}
  - {op: gated_adapters, layers: [1], size: 8, activation: silu}
"""


@pytest.mark.parametrize("layout", [gpt2, pythia, llama, qwen2_vl])
def test_a_published_layout_grows_and_comes_back(layout: Callable[[Path], str], tmp_path: Path) -> None:
    base, out, plan = tmp_path / "base", tmp_path / "out", tmp_path / "plan.yaml"
    auto = layout(base)
    plan.write_text(PLAN)
    surgeon.apply(plan, base, out, device="cpu")
    assert surgeon.verify(base, out, device="cpu", windows=1, window=16).identical
    found: list[Any] = []
    for folder in (base, out):
        model, told = getattr(transformers, auto).from_pretrained(
            folder, trust_remote_code=True, output_loading_info=True
        )
        assert not told["missing_keys"] and not told["unexpected_keys"]
        for value in model.parameters():
            value.data = value.data.clone()
        with torch.inference_mode():
            found.append(model.eval()(torch.arange(5, 25).reshape(2, 10)).logits)
    assert torch.equal(*found)
    # What nothing reads stays with the layers that had it: none is made for new ones, which train.
    manifest = surgeon.inspect(out).manifest
    assert manifest is not None
    assert not [name for name in manifest.new_tensors if name.endswith((".attn.bias", ".attention.bias", "inv_freq"))]
    surgeon.merge(out, tmp_path / "merged", alpha=0.5)
    plan.write_text("surgeon: 1\noperations:\n  - {op: insert_layers, where: {after: [2]}, init: {kind: copy}}\n")
    surgeon.apply(plan, out, tmp_path / "again", device="cpu")
    assert surgeon.verify(base, tmp_path / "again", device="cpu", windows=1, window=16).identical
    surgeon.revert(tmp_path / "again", tmp_path / "back", to=0)
    assert same_bytes(weights(base), weights(tmp_path / "back"))
    assert json.loads((base / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())


def test_a_mistral_with_types_of_layers_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """It has classes of its own, in which some layers have no window: another model than the type's."""
    base = tiny_decoder(tmp_path / "base", "ministral", layers=4)
    config = json.loads((base / "config.json").read_text())
    types = ["full_attention", "sliding_attention"] * 2
    named = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "layer_types": types}
    (base / "config.json").write_text(json.dumps(config | named))
    plan = tmp_path / "plan.yaml"
    copies = "{op: insert_layers, where: [0, 1], init: copy}"
    plan.write_text(f"surgeon: 1\noperations:\n  - {copies}\n  - {{op: gated_adapters, size: 8}}\n")
    made = surgeon.apply(plan, str(base), tmp_path / "out")
    assert any("as ministral" in note for note in made.preview.notes)
    ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        one = transformers.AutoModelForCausalLM.from_pretrained(base)(ids).logits
        out = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
        assert torch.equal(one, out(ids).logits)
        # The window counts: on so long a text the type's own class computes something else.
        own = transformers.MistralForCausalLM.from_pretrained(base, config=transformers.MistralConfig(**config))
        assert not torch.equal(one, own(ids).logits)


@pytest.mark.parametrize("kind", sorted(grafted_config.FLAT))
def test_text_settings_at_the_top_mean_what_they_mean_to_transformers(kind: str) -> None:
    """What is read of the flat form is what is read of the nested one, but for how it was written."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    made = transformers.CONFIG_MAPPING[kind]
    text = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300, "use_cache": False}
    if kind == "glm5_next":
        # Its own check wants as many.
        text["num_key_value_heads"] = 4
    top = {"model_type": kind, "image_token_id": 7, "tie_word_embeddings": True, **text}
    moved = grafted_config.nested(top)
    assert moved["text_config"].keys() >= text.keys()
    assert moved["image_token_id"] == 7 and not moved.keys() & text.keys()
    assert grafted_config.nested(moved) == moved
    one, other = (made.from_dict(dict(config)).to_dict() for config in (top, moved))
    assert one["text_config"] == other["text_config"] and one["tie_word_embeddings"] == other["tie_word_embeddings"]


def test_another_layout_of_the_text_s_settings_is_named(tmp_path: Path) -> None:
    """Where transformers finds them elsewhere, what surgery writes would hide them."""
    if "unlimited_ocr" not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no type that keeps them elsewhere still")
    base, plan = tiny_decoder(tmp_path / "base", "unlimited_ocr", IMAGE_TEXT), tmp_path / "plan.yaml"
    config = json.loads((base / "config.json").read_text())
    config["language_config"] = config.pop("text_config")
    (base / "config.json").write_text(json.dumps(config))
    plan.write_text(PLAN)
    with pytest.raises(BadInput, match=r"do not stand in `text_config`.* save the config with transformers once"):
        surgeon.preview(plan, base)


def test_layers_go_by_names_of_the_text_alone() -> None:
    """Decoders under an encoder's name are known by it; towers for images beside them are not taken for layers."""
    known = ("git.encoder.layer.", "cpmant.encoder.layers.", "language_model.model.encoder.layers.")
    assert [layer_of(f"{stem}3.norm.weight") for stem in known] == [(stem, 3, "norm.weight") for stem in known]
    others = ("git.image_encoder.vision_model.encoder.layers.", "vision_model.encoder.layers.", "model.encoder.layers.")
    assert not any(layer_of(f"{stem}3.norm.weight") for stem in others)


def test_whole_numbers_outside_the_layers_are_copied(tmp_path: Path) -> None:
    """A table of indices, as in Nemotron-H's tower for images; where the model has weights they stay refused."""
    base = tiny.checkpoint(tmp_path / "base", "llama", shard="10MB")
    (file,) = base.glob("*.safetensors")
    held = load_file(file)
    table = torch.arange(7)
    save_file({**held, "model.table": table}, file, metadata={"format": "pt"})
    plan = tmp_path / "plan.yaml"
    plan.write_text("surgeon: 1\noperations:\n  - {op: insert_layers, where: {every: 2}, init: {kind: copy}}\n")
    surgeon.apply(plan, str(base), tmp_path / "out")
    assert torch.equal(weights(tmp_path / "out")["model.table"], table)
    for norm in ("model.layers.1.input_layernorm.weight", "model.norm.weight"):
        save_file({**held, norm: held[norm].long()}, file, metadata={"format": "pt"})
        with pytest.raises(BadInput, match=rf"{norm} .*dtype I64; surgery needs plain floating-point"):
            surgeon.preview(surgeon.load_plan(plan), str(base))


@pytest.mark.parametrize("kind", ["exaone", "sarvam_moe"])
def test_roles_are_told_by_the_class_whatever_a_maker_calls_its_tensors(kind: str, tmp_path: Path) -> None:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    base, plan = tiny_decoder(tmp_path / "base", kind), tmp_path / "plan.yaml"
    plan.write_text(
        "surgeon: 1\noperations:\n"
        "  - {op: insert_layers, where: {after: [1]}, init: {kind: ot_fusion}, zero_init: true}\n"
    )
    surgeon.apply(plan, base, tmp_path / "out")
    verified = surgeon.verify(base, tmp_path / "out", window=16, windows=1)
    assert verified.holds and verified.identical
    surgeon.revert(tmp_path / "out", tmp_path / "back")
    assert same_bytes(weights(base), weights(tmp_path / "back"))
