"""Expanded checkpoints made by hand with transformers alone: verify is not tested against our own writer."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# The stored value at which a post-norm writes nothing into the residual stream.
POST_NORM_OFF = {"gemma2": -1.0, "gemma3_text": -1.0, "olmo2": 0.0}


def grow(base: Path, out: Path, *, after: list[int], silent: bool = True) -> list[int]:
    """Copy `base` to `out` with a copy of each layer in `after` behind it, which writes nothing if `silent`.

    Returns the index in `out` of every base layer.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    sources: list[tuple[int, bool]] = []
    for layer in range(model.config.num_hidden_layers):
        sources.append((layer, False))
        if layer in after:
            sources.append((layer, True))
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(sources)
    if getattr(config, "layer_types", None):
        config.layer_types = [model.config.layer_types[source] for source, _ in sources]
    taller = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    weights = model.state_dict()
    taller.load_state_dict(
        {
            name: weights[re.sub(r"(?<=layers\.)\d+", lambda m: str(sources[int(m[0])][0]), name)]
            for name in taller.state_dict()
        }
    )
    if silent:
        for layer, (_, new) in enumerate(sources):
            if new:
                _silence(taller.model.layers[layer], model.config.model_type)
    taller.save_pretrained(out, max_shard_size="40KB")
    return [layer for layer, (_, new) in enumerate(sources) if not new]


def _silence(layer: Any, model_type: str) -> None:
    with torch.no_grad():
        if model_type in POST_NORM_OFF:
            for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
                norm.weight.fill_(POST_NORM_OFF[model_type])
            return
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            for parameter in module.parameters():
                parameter.zero_()


def shard_of(folder: Path, name: str) -> Path:
    """The shard of a checkpoint that holds this tensor."""
    for path in sorted(folder.glob("*.safetensors")):
        if name in load_file(path):
            return path
    raise AssertionError(f"{name} is in no shard of {folder}")


def edit(folder: Path, name: str, change: Any) -> None:
    """Replace one stored tensor by `change(tensor)`; None takes it out."""
    path = shard_of(folder, name)
    tensors = load_file(path)
    changed = change(tensors[name])
    if changed is None:
        del tensors[name]
    else:
        tensors[name] = changed.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
