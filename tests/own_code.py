"""A tiny decoder that brings its own code: names and classes that no model of transformers has."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

CONFIGURATION = """
from transformers import PretrainedConfig


class PebbleConfig(PretrainedConfig):
    model_type = "pebble"
    attribute_map = {"num_hidden_layers": "depth"}

    def __init__(self, width=32, depth=3, voices=2, reach=48, vocab_size=64, layer_windows=None, **more):
        self.hidden_size, self.depth, self.voices, self.reach = width, depth, voices, reach
        self.width, self.vocab_size, self.layer_windows = width, vocab_size, layer_windows or [0] * depth
        super().__init__(**more)
"""

MODELING = """
import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_pebble import PebbleConfig


class PebbleScale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, stream):
        return self.gain * F.normalize(stream, dim=-1) * stream.shape[-1] ** 0.5


class PebbleMix(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.voices, self.layer_number, self.window = config.voices, number, config.layer_windows[number]
        self.to_three = nn.Linear(config.width, 3 * config.width, bias=False)
        self.to_one = nn.Linear(config.width, config.width)

    def forward(self, stream, cache):
        b, n, d = stream.shape
        q, k, v = self.to_three(stream).view(b, n, 3, self.voices, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_number)
        seen = k.shape[-2]
        after = torch.arange(seen - n, seen)[:, None] - torch.arange(seen)
        hidden = (after < 0) | ((after >= self.window) if self.window else False)
        scores = (q @ k.transpose(-1, -2) - 0.1 * after).masked_fill(hidden, float("-inf"))
        return self.to_one((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(b, n, d))


class PebbleWash(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.widen = nn.Linear(config.width, config.reach)
        self.narrow = nn.Linear(config.reach, config.width, bias=False)

    def forward(self, stream):
        return self.narrow(torch.sin(self.widen(stream)))


class PebbleLayer(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.before_mix, self.before_wash = PebbleScale(config.width), PebbleScale(config.width)
        self.mix, self.wash = PebbleMix(config, number), PebbleWash(config)

    def forward(self, hidden_states, cache=None):
        hidden_states = hidden_states + self.mix(self.before_mix(hidden_states), cache)
        return hidden_states + self.wash(self.before_wash(hidden_states))


class PebbleForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = PebbleConfig
    base_model_prefix = "backbone"
    _no_split_modules = ["PebbleLayer"]

    def __init__(self, config):
        super().__init__(config)
        self.backbone = nn.Module()
        self.backbone.words = nn.Embedding(config.vocab_size, config.width)
        self.backbone.blocks = nn.ModuleList(PebbleLayer(config, number) for number in range(config.depth))
        self.backbone.last = PebbleScale(config.width)
        self.speak = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.backbone.words

    def get_output_embeddings(self):
        return self.speak

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, use_cache=None, labels=None, **more):
        stream = self.backbone.words(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        for layer in self.backbone.blocks:
            stream = layer(stream, past_key_values if use_cache else None)
        logits = self.speak(self.backbone.last(stream))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
"""
AUTO_MAP = {
    "AutoConfig": "configuration_pebble.PebbleConfig",
    "AutoModelForCausalLM": "modeling_pebble.PebbleForCausalLM",
}


def pebble(folder: Path, *, changed: dict[str, str] | None = None, **config: Any) -> Path:
    """Save a tiny checkpoint in `folder`, with the code of its model beside the weights, lines of it `changed`."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    modeling = MODELING
    for line, other in (changed or {}).items():
        assert modeling.count(line) == 1, line
        modeling = modeling.replace(line, other)
    (folder / "configuration_pebble.py").write_text(CONFIGURATION)
    (folder / "modeling_pebble.py").write_text(modeling)
    name = "pebble_of_the_test"
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        made = importlib.import_module(f"{name}.modeling_pebble")
        torch.manual_seed(0)
        model = made.PebbleForCausalLM(made.PebbleConfig(**config))
        held = model.state_dict()
        tensors = {key: torch.randn(value.shape).bfloat16() * 0.3 for key, value in held.items()}
        tensors |= {key: value for key, value in held.items() if not value.is_floating_point()}
        fields = model.config.to_dict()
    finally:
        for held in [held for held in sys.modules if held.startswith(name)]:
            del sys.modules[held]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields |= {"architectures": ["PebbleForCausalLM"], "auto_map": AUTO_MAP, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(fields, indent=2))
    return folder


def installed(folder: Path, changed: dict[str, str], monkeypatch: Any, **config: Any) -> Path:
    """The same as a model type that the installed transformers has, for as long as the test runs."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    pebble(folder, changed=changed, **config)
    code = folder.parent / "code"
    code.mkdir()
    for file in folder.glob("*.py"):
        file.rename(code / file.name)
    fields = json.loads((folder / "config.json").read_text())
    del fields["auto_map"]
    # What was found of another code by the same config is kept in this process.
    fields["told_apart"] = list(changed.values())
    (folder / "config.json").write_text(json.dumps(fields, indent=2))
    name = "pebble_that_is_installed"
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(code)]
    for module in (name, f"{name}.configuration_pebble", f"{name}.modeling_pebble"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
    made = importlib.import_module(f"{name}.modeling_pebble")
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "pebble", "PebbleForCausalLM")
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "pebble", made.PebbleConfig)
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, made.PebbleConfig, made.PebbleForCausalLM)
    return folder
