"""Tiny checkpoints of any text decoder of transformers, laid out on disk as transformers saves the real ones.

The default config of a model type with its sizes shrunk, as few layers as have one of each kind, random weights.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from surgeon.anatomy.growth import grown
from surgeon.anatomy.kinds import described_kinds, numbered
from surgeon.anatomy.skeleton import CAUSAL, IMAGE_TEXT, build
from surgeon.anatomy.twin import fill, fill_buffers, shrunk, twin_of
from surgeon.errors import BadInput
from tests.pictures import seeing
from tests.vocabularies import byte_level

# What some default configs lack, or have too large: then no model can be built of them, or run.
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1, "topk_method": "greedy"},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4, "mamba_chunk_size": 8},
    "nemotron_h": {"chunk_size": 8},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "codegen": {"n_head": 4, "n_embd": 64, "rotary_dim": 8},
    "helium": {"head_dim": 32},
    "gemma4": {"hidden_size_per_layer_input": 0},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_period": 1, "expert_layer_offset": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "ministral": {"head_dim": 32},
    "nemotron": {"head_dim": 32, "num_key_value_heads": 8},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dbrx": {
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 500000, "model_type": ""},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "model_type": ""},
    },
    **{key: {"partial_rotary_factor": 0.5} for key in ("glm4v", "glm46v", "glmga")},
    # Encoders first, which generate as decoders.
    **{
        key: {"is_decoder": True}
        for key in (
            "bert",
            "bert-generation",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
        )
    },
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    **{
        key: {"is_decoder": True}
        for key in ("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl")
    },
}


# The same of models of several parts, of which no model can be built without; by these parts.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_COMPASS = {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}
_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
}
_PICTURES = {f"<|visual token {number:06d}|>": 210 + number for number in range(8)}
WHOLE: dict[str, dict[str, Any]] = {
    "chameleon": {
        "vocabulary_map": {"<image>": 200, **{f"IMGIMG{letter}Z": 201 + n for n, letter in enumerate("ABCD")}}
    },
    "cohere_compass_text": _COMPASS,
    "cohere_compass": {"text_config": _COMPASS},
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense"] + ["sparse"] * 31,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "n_shared_experts": 1,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "topk_group": 1,
            "topk_method": "greedy",
        }
    },
    "emu3": {
        "vocabulary_map": {"<image>": 200, "<|extra_200|>": 201, **_PICTURES},
        "vq_config": {"base_channels": 32},
    },
    "glm4v_moe": {"text_config": {"num_attention_heads": 32, "head_dim": 128}},
    "granite4_vision": {"downsample_rate": "4/8", "deepstack_layer_map": [[-1, 0]]},
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": _ROPE | {"mrope_section": [16, 16, 16, 16]}}},
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp": {"text_config": _QWEN4},
    "step3p7": {"text_config": {"sliding_window": 8}},
}
# With fewer heads than these a model of the type cannot run.
HEADS = {"codegen": 4}


def decoders() -> list[tuple[str, str]]:
    """Every (model type, auto class) of the installed transformers that makes a causal or image-text model."""
    from transformers.models.auto import modeling_auto

    return [
        (model_type, auto)
        for auto, names in (
            (CAUSAL, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
            (IMAGE_TEXT, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        )
        for model_type in names
    ]


def tiny_config(model_type: str, auto: str = CAUSAL, *, layers: int = 4, **changes: Any) -> dict[str, Any]:
    """A small config.json of a model type; `changes` are of its text part. Raises BadInput where it cannot be built."""
    from transformers.models.auto import modeling_auto

    names = {
        CAUSAL: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        IMAGE_TEXT: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }[auto]
    named = names[model_type]
    changes = CHANGES.get(model_type, {}) | changes
    config = _default(model_type, changes)
    config["architectures"] = [named if isinstance(named, str) else named[0]]
    config = seeing(_with_low_towers(shrunk(config)))
    skeleton = build(config)
    if skeleton.model.config.model_type != model_type:
        # A causal model of the text's part alone is stored with the part's config.
        config = skeleton.model.config.to_dict() | {"architectures": config["architectures"]}
        skeleton = build(config)
    if changes:
        _text_of(config, skeleton.path).update(changes)
        skeleton = build(config)
    kinds = numbered(described_kinds(skeleton))
    last = max(max(kinds.index(kind) for kind in set(kinds)), layers - 1)
    if len(kinds) > last + 1:
        with contextlib.suppress(BadInput):  # else all of them
            config = grown(config, skeleton, range(last + 1))
    return config


def _with_low_towers(config: dict[str, Any]) -> dict[str, Any]:
    """Two layers in a tower for images, where its config says how many in one number alone."""
    low = dict(config)
    for key, part in config.items():
        if "vision" not in key or not isinstance(part, dict):
            continue
        depth = next((k for k in ("num_hidden_layers", "depth") if k in part), None)
        if depth is not None and not any(isinstance(value, list) and value for value in part.values()):
            low[key] = part | {depth: min(part[depth], 2)}
    if low == config:
        return config
    try:
        build(low)
    except BadInput:
        return config
    return low


def _default(model_type: str, changes: dict[str, Any]) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    # As it stands in a file, whose keys are texts.
    config: dict[str, Any] = _joined(json.loads(json.dumps(kind().to_dict())), WHOLE.get(model_type, {}))
    # Where the model cannot be built without them.
    return config | changes if all(key in config for key in changes) else config


def _joined(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A config with changes, those of its parts (`text_config`) in these parts."""
    parts = {key: _joined(config[key], value) for key, value in changes.items() if isinstance(config.get(key), dict)}
    return config | changes | parts


def _text_of(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path:
        config = config[key]
    return config


def tiny_decoder(
    folder: Path, model_type: str, auto: str = CAUSAL, *, seed: int = 3, dtype: str = "float32", **changes: Any
) -> Path:
    """Save a tiny checkpoint of a model type in `folder`, in several shards; made once in a process, then copied."""
    made = _made(model_type, auto, seed, dtype, json.dumps(changes))
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder


@functools.cache
def _made(model_type: str, auto: str, seed: int, dtype: str, changes: str) -> Path:
    import torch

    folder = Path(tempfile.mkdtemp(prefix=f"surgeon-tiny-{model_type}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = tiny_config(model_type, auto, **json.loads(changes))
    model = twin_of(config, seed=seed, heads=HEADS.get(model_type, 2)).model
    for value in (*model.parameters(), *model.buffers()):
        if value.is_floating_point():
            value.data = value.data.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.config.architectures = config["architectures"]
    size = sum(value.nbytes for value in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size=max(size // 3, 1))
    return folder


def checkpoint_of(config: dict[str, Any], folder: Path, *, seed: int = 3, dtype: str = "bfloat16") -> Path:
    """Save a checkpoint of a small config.json as it stands, in several shards, with a tokenizer.

    Every parameter and every stored buffer is random; what builds and saves the model is transformers alone.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    text = json.dumps(config, indent=2)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    fill(model, seed)
    fill_buffers(model, seed)
    model.tie_weights()
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="150KB")
    byte_level(folder)
    (folder / "config.json").write_text(text)
    return folder
