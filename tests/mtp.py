"""Tiny checkpoints with layers that predict further tokens, and transformers' own drafts of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny

_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_ROUTED = _EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
# Every type of transformers 5.23 whose default config says how to build its MTP layers.
TYPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": _ROUTED | _LATENT | {"num_key_value_heads": 4},
    "glm4_moe": _ROUTED | {"head_dim": 8},
    "mellum": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
LAYERS = 4


def checkpoint(folder: Path, model_type: str, *, depth: int = 1, **changes: Any) -> Path:
    """A base of `LAYERS` layers with `depth` MTP layers, in two shards; every value is random.

    They are stored as published checkpoints have them: layers above the stack, with copies of embeddings and
    head, or (mellum) `mtp.…`.
    """
    given: dict[str, Any] = {"dtype": "float32", "num_hidden_layers": LAYERS + depth} | TYPES[model_type] | changes
    if model_type == "mellum":
        kinds = ["sliding_attention", "full_attention"] * LAYERS
        given |= {"sliding_window": 8, "num_mtp_layers": 1, "mlp_layer_types": ["sparse"] * (LAYERS + 1)}
        given["layer_types"] = [*kinds[:LAYERS], "sliding_attention"]
    else:
        given["num_nextn_predict_layers"] = depth
    folder.mkdir(parents=True, exist_ok=True)
    tiny.model(model_type, **given).save_pretrained(folder, max_shard_size="1GB")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = LAYERS
    for key in ("layer_types", "mlp_layer_types"):
        if config.get(key):
            config[key] = config[key][:LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    _write(folder, _with_mtp(load_file(folder / "model.safetensors"), model_type, depth))
    return folder


def _with_mtp(tensors: dict[str, Tensor], model_type: str, depth: int) -> dict[str, Tensor]:
    """The tensors of a model, whose last `depth` layers become MTP layers."""
    torch.manual_seed(depth)
    embedded = tensors["model.embed_tokens.weight"]
    hidden, dtype = embedded.shape[1], embedded.dtype
    words = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
    if model_type == "mellum":
        words = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
    for number in range(depth):
        begin = f"model.layers.{LAYERS + number}."
        home = begin
        if model_type == "mellum":
            home = "mtp."
            for name in [name for name in tensors if name.startswith(begin)]:
                tensors[f"mtp.layers.0.{name.removeprefix(begin)}"] = tensors.pop(name)
        for word in words[:3]:
            tensors[f"{home}{word}.weight"] = (1 + torch.randn(hidden) * 0.2).to(dtype)
        tensors[f"{home}{words[3]}.weight"] = (torch.randn(hidden, 2 * hidden) * 0.2).to(dtype)
        if model_type != "mellum":
            tensors[f"{home}embed_tokens.weight"] = embedded.clone()
            tensors[f"{home}shared_head.head.weight"] = tensors.get("lm_head.weight", embedded).clone()
    return tensors


def _write(folder: Path, tensors: dict[str, Tensor]) -> None:
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def loaded(folder: Path) -> Any:
    """The model as transformers loads it, which finds the MTP layers where they lie, whatever their numbers."""
    from transformers import AutoModelForCausalLM

    grafted = (folder / "modeling_surgeon.py").is_file()
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=grafted).eval()
    first = model.config.num_hidden_layers
    if (folder / "config.json").read_text().find("mellum") < 0:
        numbers = range(first, first + model.config.num_mtp_layers)
        model._keys_to_ignore_on_load_unexpected = [rf"\.layers\.{number}\." for number in numbers]
    return model


@torch.no_grad()
def drafts(model: Any, ids: Tensor) -> list[Tensor]:
    """transformers' own logits of each depth at every place, prefilled as `generate(use_mtp=True)` does it."""
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    if not hasattr(MtpModel, "forward_layer"):
        pytest.skip("this transformers drafts otherwise")
    mtp = MtpModel.from_pretrained(model).eval()
    hidden = model(ids, output_hidden_states=True).hidden_states[-1][:, :-1]
    cache = MtpCache(config=model.config.get_mtp_config())
    positions, given, found = torch.arange(1, ids.shape[1])[None], ids[:, 1:], []
    for depth in range(mtp.num_mtp_layers):
        hidden = mtp.forward_layer(depth, hidden, positions, cache, input_ids=given)
        found.append(mtp._project_to_logits(hidden))
        given = torch.cat([given[:, 1:], found[-1][:, -1:].argmax(-1)], dim=1)
        positions = torch.cat([positions[:, 1:], positions[:, -1:] + 1], dim=1)
    return found


def generated(model: Any, ids: Tensor, **how: Any) -> Tensor:
    """Greedy tokens; `use_mtp=True`: by speculative decoding."""
    found: Tensor = model.generate(ids, do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0, **how)
    return found
