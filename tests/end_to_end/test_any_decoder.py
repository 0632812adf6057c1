"""Decoders that nobody described: a real layout on disk, from preview to training and back to the base.

Each model type brings what it is known for: experts stored one by one, several kinds of layers, names on disk that are
not the model's, towers for images, layers above the stack.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import surgeon
from surgeon.errors import BadInput
from surgeon.families.skeleton import CAUSAL, IMAGE_TEXT
from tests.decoders import JAMBA, tiny_decoder
from tests.end_to_end.conftest import WITHOUT_SURGEON, weights
from tests.train.texts import corpus
from tests.warm import warm

# Model types by auto class, and changes to their tiny configs.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (CAUSAL, {}),
    "mixtral": (CAUSAL, {}),
    "deepseek_v3": (CAUSAL, {}),
    "glm4_moe": (CAUSAL, {}),
    "qwen3_next": (CAUSAL, {}),
    "qwen3_5_moe": (IMAGE_TEXT, {}),
    "llama4": (IMAGE_TEXT, {}),
    "gemma3": (IMAGE_TEXT, {}),
    "gemma4": (IMAGE_TEXT, {}),
    "mistral3": (IMAGE_TEXT, {}),
    "granitemoehybrid": (CAUSAL, {}),
    "nemotron_h": (CAUSAL, {}),
    "olmo3": (CAUSAL, {}),
    "smollm3": (CAUSAL, {}),
    "gpt2": (CAUSAL, {"tie_word_embeddings": True}),
    "gpt_neox": (CAUSAL, {}),
}

# Experts one by one, names that differ, one list of layers inside two models, tied embeddings.
STREAMED = ("mixtral", "granitemoehybrid", "llama4", "gpt2")

TRAINING = {
    "surgeon_train": 1,
    "steps": 20,
    "batch": 2,
    "length": 16,
    "optimizer": {"lr": 1e-3, "warmup": 2},
    "sources": [{"name": "words", "path": "words.jsonl", "share": 1.0, "validation": 0.1}],
}

ELSEWHERE = (
    WITHOUT_SURGEON
    + """
import torch, transformers
transformers.logging.set_verbosity_error()
for auto, folder, twin in (line.split() for line in sys.stdin):
    found = []
    for path in (folder, twin):
        model, info = getattr(transformers, auto).from_pretrained(path, output_loading_info=True)
        assert not info["missing_keys"], (path, info)
        model.set_attn_implementation("eager")
        for value in model.parameters():
            value.data = value.data.clone()
        ids = torch.arange(5, 25).reshape(2, 10)
        with torch.inference_mode():
            found.append([model(ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)])
    assert all(torch.equal(*pair) for pair in zip(*found)), folder
print("the same")
"""
)


def add_letters(folder: Path) -> Path:
    """A tokenizer of single letters as all byte-level ones are made: transformers has a class for some model types."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["</s>", *"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ"]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text("surgeon: 1\noperations:\n  - {op: insert_layers, where: {every: 2}, init: {kind: copy}}\n")
    return path


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_from_preview_to_training_and_back(model_type: str, plan: Path, tmp_path: Path) -> None:
    auto, changes = LAYOUTS[model_type]
    base = add_letters(tiny_decoder(tmp_path / "base", model_type, auto, dtype="bfloat16", **changes))
    shown = surgeon.preview(plan, str(base))
    assert any("proven on a twin" in note for note in shown.notes)
    surgeon.apply(plan, str(base), tmp_path / "out")
    text = corpus(tmp_path / "words.jsonl", documents=60)
    for streamed in (False, True) if model_type in STREAMED else (False,):
        dtypes = ["auto"] if streamed else ["auto", "float32"]
        options: dict[str, Any] = {"text": text, "window": 24, "windows": 1, "dtypes": dtypes, "streamed": streamed}
        verified = surgeon.verify(base, tmp_path / "out", **options)
        assert verified.holds
        assert verified.identical

    (tmp_path / "train.yaml").write_text(yaml.safe_dump(TRAINING))
    surgeon.train(tmp_path / "out", tmp_path / "train.yaml", tmp_path / "run", device="cpu")
    assert surgeon.verify(base, tmp_path / "run", text=text, window=24, windows=1).holds
    surgeon.revert(tmp_path / "run", tmp_path / "back")
    before, after = weights(base), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((base / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())


def test_they_load_where_surgeon_is_not(plan: Path, tmp_path: Path) -> None:
    """As the base's own classes, with the base's logits and words."""
    lines = []
    for model_type in ("mixtral", "qwen3_next", "gemma3", "nemotron_h", "gpt2"):
        auto, changes = LAYOUTS[model_type]
        base = tiny_decoder(tmp_path / model_type, model_type, auto, **changes)
        surgeon.apply(plan, str(base), tmp_path / f"{model_type}-out")
        lines.append(f"{auto} {base} {base}-out\n")
    told = subprocess.run([*warm(), "-c", ELSEWHERE], input="".join(lines), capture_output=True, text=True, check=False)
    assert told.stdout == "the same\n", told.stderr


def test_layers_above_the_stack_stay_above_it(plan: Path, tmp_path: Path) -> None:
    """DeepSeek-V3 keeps the layer that predicts a second token at the number after the last."""
    base = tiny_decoder(tmp_path / "base", "deepseek_v3")
    shard = max(base.glob("*.safetensors"))
    held = load_file(shard)
    extra = {f"model.layers.4.{name}": torch.randn(4, 3) for name in ("eh_proj.weight", "enorm.weight")}
    save_file(held | extra, shard, metadata={"format": "pt"})
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(extra, shard.name)
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    surgeon.apply(plan, str(base), tmp_path / "out")
    after = weights(tmp_path / "out")
    for name, value in extra.items():
        assert torch.equal(after[name.replace("layers.4.", "layers.6.")], value)
        assert name not in after
    verified = surgeon.verify(base, tmp_path / "out", window=24, windows=1)
    assert verified.holds
    assert verified.identical
    surgeon.revert(tmp_path / "out", tmp_path / "back")
    assert weights(tmp_path / "back").keys() == weights(base).keys()


def test_every_way_to_grow_and_to_undo(tmp_path: Path) -> None:
    """Experts one by one: averaged, drawn, stacked, grown twice, carried as a delta, taken back step by step."""
    base = tiny_decoder(tmp_path / "base", "qwen3_moe")

    def applied(name: str, operation: str, onto: Path = base) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"surgeon: 1\noperations:\n  - {operation}\n")
        surgeon.apply(path, str(onto), tmp_path / name)
        return tmp_path / name

    for name, operation, exact in (
        ("average", "{op: insert_layers, where: {after: [0]}, init: {kind: average}}", True),
        ("random", "{op: insert_layers, where: {every: 2}, init: {kind: random}}", True),
        ("loud", "{op: insert_layers, where: {every: 2}, init: {kind: copy}, zero_init: false}", False),
        ("stack", "{op: stack_layers, bottom: 3, top: 3}", False),
        ("control", "{op: control_llm, layers: {every: 2}, expansion: stack}", True),
    ):
        verified = surgeon.verify(base, applied(name, operation), window=24, windows=1)
        assert verified.holds, name
        assert verified.identical is exact, name
    twice = applied("twice", "{op: insert_layers, where: {every: 3}, init: {kind: copy}}", tmp_path / "random")
    verified = surgeon.verify(base, twice, window=24, windows=1)
    assert verified.holds
    assert verified.identical
    surgeon.make_delta(twice, tmp_path / "delta")
    surgeon.apply_delta(tmp_path / "delta", str(tmp_path / "random"), tmp_path / "same")
    assert weights(tmp_path / "same").keys() == weights(twice).keys()
    assert all(torch.equal(value, weights(twice)[name]) for name, value in weights(tmp_path / "same").items())
    surgeon.revert(twice, tmp_path / "once")
    surgeon.revert(tmp_path / "once", tmp_path / "none")
    assert all(torch.equal(value, weights(base)[name]) for name, value in weights(tmp_path / "none").items())
    surgeon.report(twice, html=tmp_path / "report.html")
    assert "qwen3_moe" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("model_type", ["smollm3", "olmo3", "granite"])
def test_fusion_by_transport_is_that_of_the_described_family(model_type: str, tmp_path: Path) -> None:
    """The same weights under a described family's name: the same fused bytes (OLMo 3's layer is OLMo 2's)."""
    base = tiny_decoder(tmp_path / "base", model_type, attention_bias=False)
    twin = tmp_path / "twin"
    shutil.copytree(base, twin)
    known = "olmo2" if model_type == "olmo3" else "llama"
    config = json.loads((base / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("layer_types", "sliding_window")}
    architecture = {"olmo2": "Olmo2ForCausalLM", "llama": "LlamaForCausalLM"}[known]
    (twin / "config.json").write_text(json.dumps(config | {"model_type": known, "architectures": [architecture]}))
    path = tmp_path / "plan.yaml"
    operation = "{op: insert_layers, where: {after: [0]}, init: {kind: ot_fusion}}"
    path.write_text(f"surgeon: 1\nseed: 3\noperations:\n  - {operation}\n")
    for folder in (base, twin):
        surgeon.apply(path, str(folder), folder.with_name(f"{folder.name}-out"))
    mine, theirs = weights(tmp_path / "base-out"), weights(tmp_path / "twin-out")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert not torch.equal(
        mine["model.layers.1.self_attn.q_proj.weight"], mine["model.layers.0.self_attn.q_proj.weight"]
    )
    verified = surgeon.verify(base, tmp_path / "base-out", window=24, windows=1)
    assert verified.holds
    assert verified.identical


@pytest.mark.parametrize(
    "operation",
    [
        "{op: control_llm, layers: {every: 2}}",
        "{op: gated_adapters, layers: all, size: 4}",
        "{op: pmoe_experts, threshold: 2}",
        "{op: mixture_of_control}",
    ],
)
def test_grafts_are_for_families_that_are_described(operation: str, tmp_path: Path) -> None:
    base = tiny_decoder(tmp_path / "base", "gpt2")
    (tmp_path / "plan.yaml").write_text(f"surgeon: 1\noperations:\n  - {operation}\n")
    with pytest.raises(BadInput, match=r"plan\.yaml:3: .* gpt2 is a model type that surgeon derives, and .* stands in"):
        surgeon.preview(tmp_path / "plan.yaml", str(base))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "hyper-connections": ("minimax", {}, "cannot be added without changing the model: even with all its weights zero"),
    "post-norm blocks": ("bart", {}, "cannot be added without changing the model"),
    "a layer's number in its weights' scale": ("diffllama", {}, "layer 1, .* another kind .*lambda_init"),
    "features of images by a layer's number": ("qwen3_vl", {}, "features of images .* choose places above"),
    "a period in numbers alone": (
        "jamba",
        {"attn_layer_period": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
        "layer 1, .* another kind .*Jamba.* in place of Jamba",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exact_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    model_type, changes, words = REFUSED[case]
    base = tiny_decoder(tmp_path / "base", model_type, IMAGE_TEXT if model_type == "qwen3_vl" else CAUSAL, **changes)
    path = tmp_path / "plan.yaml"
    path.write_text("surgeon: 1\noperations:\n  - {op: insert_layers, where: {every: 1}, init: {kind: copy}}\n")
    with pytest.raises(BadInput, match=words):
        surgeon.preview(path, str(base))


def test_above_the_layers_that_take_an_images_features_it_is_exact(tmp_path: Path) -> None:
    base = tiny_decoder(tmp_path / "base", "qwen3_vl", IMAGE_TEXT)
    path = tmp_path / "plan.yaml"
    path.write_text("surgeon: 1\noperations:\n  - {op: insert_layers, where: {after: [2, 3]}, init: {kind: copy}}\n")
    surgeon.apply(path, str(base), tmp_path / "out")
    verified = surgeon.verify(base, tmp_path / "out", window=24, windows=1)
    assert verified.holds
    assert verified.identical


@pytest.mark.parametrize("init", ["copy", "random"])
def test_whole_periods_go_where_single_layers_cannot(init: str, tmp_path: Path) -> None:
    """Jamba's kinds follow from numbers in its config alone: its period of eight layers is inserted as a whole."""
    base = tiny_decoder(tmp_path / "base", "jamba", **JAMBA)
    path = tmp_path / "plan.yaml"
    path.write_text(
        "surgeon: 1\noperations:\n"
        f"  - {{op: insert_layers, where: {{every_period: 2}}, init: {{kind: {init}}}}}\n"
        f"  - {{op: insert_layers, where: {{every_period: 1}}, count: 8, init: {{kind: {init}}}}}\n"
    )
    shown = surgeon.preview(path, str(base))
    assert [record.matched for record in shown.blueprint.operations] == [
        "8 new layers in whole periods of 8 layers, after layer 15",
        "8 new layers in whole periods of 8 layers, after layer 23",
    ]
    assert [layer.like for layer in shown.blueprint.layers] == [*range(16), *range(8, 16), *range(8, 16)]
    surgeon.apply(path, str(base), tmp_path / "out")
    verified = surgeon.verify(base, tmp_path / "out", window=24, windows=1)
    assert verified.holds
    assert verified.identical
    before, after = weights(base), weights(tmp_path / "out")
    same = [
        torch.equal(after[name.replace("layers.9.", "layers.17.")], before[name])
        for name in before
        if ".layers.9." in name and "experts" in name and "up_proj" in name
    ]
    assert same and all(same) is (init == "copy")
    surgeon.revert(tmp_path / "out", tmp_path / "back")
    assert weights(tmp_path / "back").keys() == before.keys()


def test_a_part_of_a_period_stays_at_the_top(tmp_path: Path) -> None:
    """RecurrentGemma's pattern is a list of three in its config, and its eight layers are two of them and two more."""
    base = tiny_decoder(tmp_path / "base", "recurrent_gemma", layers=8)
    copies = "{op: insert_layers, where: {every_period: 1}, init: {kind: copy}}"
    shown = surgeon.preview(surgeon.parse_plan(f"surgeon: 1\noperations:\n  - {copies}\n"), base)
    assert shown.blueprint.promise == "exact"
    assert [layer.like for layer in shown.blueprint.layers] == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]


def _shape(folder: Path) -> None:
    shard = min(folder.glob("*.safetensors"))
    held = load_file(shard)
    name = next(name for name in held if "experts.3." in name)
    held[name] = held[name][:-1].contiguous()
    save_file(held, shard, metadata={"format": "pt"})


def _named(folder: Path, change: Callable[[str], str]) -> None:
    """Rename tensors of the first shard."""
    shard = min(folder.glob("*.safetensors"))
    held = {change(name): value for name, value in load_file(shard).items()}
    save_file(held, shard, metadata={"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {change(name): file for name, file in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "an expert of another shape": (_shape, r"experts\.3\..*: shape \["),
    "an expert's tensor missing": (
        lambda f: _named(f, lambda name: name.replace("layers.0.mlp.experts.3.up_proj", "spare.up_proj")),
        r"layers\.0\..*experts\.3\.up_proj|layer 0, which is of the same kind, has no such tensor",
    ),
    "a layer's tensor unknown": (
        lambda f: _named(f, lambda name: name.replace("layers.0.input_layernorm", "layers.0.inner_norm")),
        r"layers\.0\.inner_norm\.weight: layer 1, which is of the same kind, has no such tensor",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_checkpoint_that_contradicts_its_config(case: str, plan: Path, tmp_path: Path) -> None:
    break_it, words = BROKEN[case]
    base = tiny_decoder(tmp_path / "base", "qwen3_moe")
    break_it(base)
    with pytest.raises(BadInput, match=words):
        surgeon.preview(plan, str(base))
    assert not (tmp_path / "out").exists()
