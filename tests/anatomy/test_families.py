"""Each family's words against transformers' own model of it: the native class is the authority."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from surgeon.anatomy.decoders import USUAL_DECODERS, USUAL_ENCODERS
from surgeon.anatomy.derived import derive
from surgeon.anatomy.dissect import dissect
from surgeon.anatomy.grafted_config import head_with_grafts, native_config
from surgeon.anatomy.skeleton import build
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.errors import BadInput
from tests import tiny
from tests.runtime.grafting import composition, joining

# Switches that add or take away tensors, beyond the defaults of tests/tiny.py.
VARIANTS = [
    *((family, {}) for family in USUAL_DECODERS),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"head_dim": 24, "num_key_value_heads": 4}),
    ("qwen2", {"tie_word_embeddings": False, "use_sliding_window": False}),
    ("qwen3", {"attention_bias": True}),
    ("gemma", {"attention_bias": True}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_parts_are_the_native_model_s(family: str, overrides: dict, tmp_path: Path) -> None:
    folder = CheckpointFolder.open(tiny.checkpoint(tmp_path, family, **overrides))
    anatomy = dissect(folder.config, folder.tensors)
    with torch.device("meta"):
        native = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    expected = {name: tuple(p.shape) for name, p in native.named_parameters()}
    ours = {
        anatomy.layer_name(index, part.suffix): part.shape
        for index in range(anatomy.sizes.layers)
        for part in anatomy.parts
    }
    assert {n: s for n, s in expected.items() if ".layers." in n} == ours
    assert anatomy.tied == (native.get_output_embeddings().weight is native.get_input_embeddings().weight)
    types = getattr(native.config, "layer_types", None) or []
    assert anatomy.layer_types == (types if len(set(types)) > 1 else None)


ENCODER_VARIANTS = [
    *((family, {}) for family in USUAL_ENCODERS),
    ("deberta", {"relative_attention": False, "pos_att_type": None, "type_vocab_size": 0}),
    ("deberta", {"pos_att_type": "p2c", "talking_head": True, "position_biased_input": False}),
    ("deberta", {"max_relative_positions": -1, "embedding_size": 24}),
    ("deberta-v2", {"share_att_key": True, "position_buckets": -1, "position_biased_input": True}),
    ("deberta-v2", {"pos_att_type": ["c2p"], "norm_rel_ebd": "none", "conv_kernel_size": 0, "type_vocab_size": 2}),
    ("deberta-v2", {"conv_groups": 4, "conv_kernel_size": 5, "embedding_size": 16}),
]


@pytest.mark.parametrize(("family", "overrides"), ENCODER_VARIANTS)
@pytest.mark.parametrize("head", ["ForSequenceClassification", ""])
def test_an_encoder_s_parts_are_the_native_model_s(family: str, overrides: dict, head: str, tmp_path: Path) -> None:
    model = tiny.model(family, head=head, **overrides)
    model.save_pretrained(tmp_path)
    folder = CheckpointFolder.open(tmp_path)
    anatomy = dissect(folder.config, folder.tensors)
    assert anatomy.prefix == (f"{model.base_model_prefix}." if head else "")
    expected = {name: tuple(p.shape) for name, p in model.base_model.named_parameters()}
    layers = {
        f"encoder.layer.{index}.{part.suffix}": part.shape
        for index in range(anatomy.sizes.layers)
        for part in anatomy.parts
    }
    held = {name.removeprefix(anatomy.prefix): info.shape for name, info in anatomy.outer.items()}
    assert {name: held.get(name, layers.get(name)) for name in expected} == expected
    assert layers.keys() <= expected.keys()


def test_old_names_and_tensors_nobody_reads_are_taken_as_they_are(tmp_path: Path) -> None:
    tiny.model("roberta", dtype="bfloat16").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    held = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(path).items()
    }
    held["roberta.embeddings.position_ids"] = torch.arange(136)[None]
    save_file(held, path, metadata={"format": "pt"})
    folder = CheckpointFolder.open(tmp_path)
    anatomy = dissect(folder.config, folder.tensors)
    assert "attention.output.LayerNorm.gamma" in anatomy.layers[3]
    assert "roberta.embeddings.position_ids" in anatomy.outer
    twice = "roberta.encoder.layer.2.output.LayerNorm.weight"
    held[twice] = torch.ones(32, dtype=torch.bfloat16)
    save_file(held, path, metadata={"format": "pt"})
    folder = CheckpointFolder.open(tmp_path)
    with pytest.raises(
        BadInput,
        match=r"LayerNorm\.weight \(.*: to transformers the same tensor as .*layer\.2\.output\.LayerNorm\.gamma; keep",
    ):
        dissect(folder.config, folder.tensors)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("roberta", {"type_vocab_size": 3}, r"token_type_embeddings\.weight .*the config requires \[3, 32\]"),
        ("roberta", {"num_hidden_layers": 7}, r"roberta\.encoder\.layer\.6\..*no shard has it"),
        ("deberta", {"pos_att_type": ["c2p"]}, r"pos_q_proj\.\w+ .*a layer of this architecture"),
        ("deberta", {"pos_att_type": 3}, "transformers cannot build this deberta .*pos_att_type"),
        ("deberta-v2", {"position_buckets": 4}, r"rel_embeddings\.weight .*requires \[8, 32\]"),
        ("deberta-v2", {"position_buckets": "8"}, "transformers cannot build this deberta-v2"),
        ("deberta-v2", {"norm_rel_ebd": 1}, "transformers cannot build this deberta-v2"),
    ],
)
def test_an_encoder_s_config_and_weights_that_disagree(
    family: str, changes: dict, message: str, tmp_path: Path
) -> None:
    tiny.checkpoint(tmp_path, family)
    with pytest.raises(BadInput, match=message):
        folder = open_changed(tmp_path, **changes)
        dissect(folder.config, folder.tensors)


@pytest.mark.parametrize("family", USUAL_DECODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silenced_layer_is_exactly_the_identity(family: str, dtype: torch.dtype) -> None:
    """What `silence` says makes the native layer add exactly nothing, whatever its other weights are."""
    overrides = {"attention_bias": True} if family in ("llama", "qwen3", "gemma", "olmo2") else {}
    overrides |= {"mlp_bias": True} if family == "llama" else {}
    model = tiny.model(family, dtype=str(dtype).removeprefix("torch."), **overrides)
    found = derive(json.loads(model.config.to_json_string()))
    layers = model.model.layers
    state = layers[1].state_dict()
    for name, value in found.silence[found.kind_of[1]].values.items():
        state[name].fill_(value)
    ids = torch.arange(24).reshape(2, 12)
    with torch.inference_mode():
        hidden = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(hidden[2], hidden[1])
    assert not torch.equal(hidden[3], hidden[2])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"layer_types": None}),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 3}),
        ("gemma3_text", {"layer_types": None}),
        ("qwen2", {"layer_types": None}),
        (
            "qwen3",
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        ),
    ],
)
def test_layer_types_that_older_configs_leave_out(family: str, changes: dict) -> None:
    config = json.loads(tiny.config(family).to_json_string()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    native, found = AutoConfig.for_model(**config), derive(config)
    titles = [found.titles[kind] for kind in found.kind_of]
    assert titles == native.layer_types or len(set(native.layer_types)) == len(found.titles) == 1


def open_changed(folder: Path, **changes: object) -> CheckpointFolder:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return CheckpointFolder.open(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "Llama"}, "config.json: model_type is 'Llama'; transformers writes it 'llama'"),
        ({"model_type": "mumba"}, "model_type 'mumba' is no text decoder or encoder of the installed transformers"),
        ({"model_type": None}, "`model_type` is missing"),
        ({"hidden_size": 64}, r"shape \[.*\], the config requires \[.*\]"),
        ({"hidden_size": None}, r"lm_head.weight .*: shape \[128, 32\], the config requires \[128, 4096\]"),
        ({"hidden_size": "32"}, r"Field 'hidden_size' expected int, got str \(value: '32'\)\); use the model's own"),
        ({"num_hidden_layers": 5}, "`num_hidden_layers` 5, so there is no layer 5"),
        ({"num_hidden_layers": 7}, r"model\.layers\.6\..*no shard has it"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000; more than 1000 is refused"),
        ({"num_key_value_heads": 4}, "the config requires"),
        ({"attention_bias": True}, r"self_attn\.\w_proj\.bias: the config requires this tensor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "`quantization_config` is left over"),
    ],
)
def test_config_and_weights_that_disagree(tmp_path: Path, changes: dict, message: str) -> None:
    tiny.checkpoint(tmp_path, "llama")
    with pytest.raises(BadInput, match=message):
        folder = open_changed(tmp_path, **changes)
        dissect(folder.config, folder.tensors)


# By setting: values with which transformers builds no model.
NONSENSE: dict[str, list[Any]] = {
    "max_position_embeddings": [True, "128", 2**40, [128]],
    "rope_parameters": [
        3,
        "x",
        [1],
        {"rope_type": "banana"},
        {"rope_type": [1]},
        {"type": "linear", "factor": "two"},
    ],
    "rope_scaling": [True, {"rope_type": "linear"}, {"rope_type": "yarn"}],
    "rms_norm_eps": [-1, "1e-6", True, [], math.nan],
    "hidden_act": [3, ["silu"], "os.system", "\x1b[31m"],
    "layer_types": ["full_attention", ["full_attention"], [1] * 6, 0],
    "tie_word_embeddings": [0, "true", []],
    "attention_bias": ["no", 1, [True]],
    "use_cache": ["yes", 1],
    "dtype": ["float8", 3, [], {}],
    "pad_token_id": [True, "0", 10**30, 128],
    "eos_token_id": [1.5, [None], {}, [[1]]],
    "attention_dropout": ["0", True],
    "num_attention_heads": [3],
    "num_hidden_layers": [10**9, "6", 0],
    "hidden_size": ["32", 1.5],
}


def test_settings_of_another_kind(tmp_path: Path) -> None:
    folder = CheckpointFolder.open(tiny.checkpoint(tmp_path, "llama"))
    dissect(folder.config, folder.tensors)
    for key, values in NONSENSE.items():
        for value in values:
            with pytest.raises(BadInput, match=r"config\.json: .*; use the model's own"):
                dissect(folder.config | {key: value}, folder.tensors)


@pytest.mark.parametrize("layers", [2**40, 10**30, 0, -1, 10_001])
def test_layers_that_nothing_could_count_out(layers: int) -> None:
    """Of a config with grafts, whose tail is counted out: once it took all memory."""
    said = joining("llama", {"trunk_layers": layers, "new_layers": [0]})
    with pytest.raises(BadInput, match="no `surgery` with `trunk_layers`"):
        native_config(said | {"num_hidden_layers": 6})


def test_an_output_of_before_is_refused_in_a_line() -> None:
    """Once config.json said nothing of the classes that an output's are composed of."""
    said = {"model_type": "upcycled_llama", "num_hidden_layers": 6, "surgery": {"trunk_layers": 6, "new_layers": [0]}}
    with pytest.raises(BadInput, match=r"config.json: `anatomy` cannot be read; get the output's own config.json"):
        native_config(said)


@pytest.mark.parametrize("number", ["01", "+1", "\u0661", "-1", "1_0", "0x1", "99999999999999999999", "1e0", " 1", ""])
def test_layers_are_numbered_in_plain_digits(tmp_path: Path, number: str) -> None:
    """Beside all layers that the config asks for, in any spelling that some reader may take for a number."""
    folder = CheckpointFolder.open(tiny.checkpoint(tmp_path, "llama"))
    info = folder.tensors["model.layers.1.mlp.up_proj.weight"]
    for stem in ("model.layers.", "layers."):
        name = f"{stem}{number}.mlp.up_proj.weight"
        with pytest.raises(BadInput, match=r"cannot renumber such layers|not know layers by|in plain digits"):
            dissect(folder.config, folder.tensors | {name: replace(info, name=name)})


def test_a_makers_own_name_of_an_architecture_is_read_by_its_head() -> None:
    """transformers ignores it: InternLM3's checkpoints are Llamas to it, and say InternLM3ForCausalLM."""
    llama = composition("llama")
    for named, head in (
        ("InternLM3ForCausalLM", "LlamaForCausalLM"),
        ("LLaMAForCausalLM", "LlamaForCausalLM"),
        ("OwnForSequenceClassification", "LlamaForSequenceClassification"),
    ):
        assert head_with_grafts(llama, {"architectures": [named]}) == head
    for wrong in ("OwnForRewards", "Own"):
        with pytest.raises(BadInput, match="if the weights are of one of these, write it alone"):
            head_with_grafts(llama, {"architectures": [wrong]})


def test_layers_that_attend_twice_are_said_to() -> None:
    config = {"model_type": "longcat_flash", "num_layers": 3, "hidden_size": 64, "n_routed_experts": 4}
    with pytest.raises(BadInput, match=r"no stack of 6 decoder layers .* or run several times, have no place"):
        build(config)
