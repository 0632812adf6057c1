"""Outputs of every operation, trained in between, with files of every kind beside the weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

import surgeon
from surgeon.anatomy.skeleton import IMAGE_TEXT
from tests import tiny
from tests.adapters import lora
from tests.decoders import tiny_decoder
from tests.quantised import tiny_quantised
from tests.training.texts import add_tokenizer, corpus, text
from tests.vocabularies import ENGLISH, FRENCH, byte_level, write_text

Operations = list[dict[str, Any]]

FUSION: Operations = [
    {
        "op": "insert_layers",
        "where": {"after": [1]},
        "init": {"kind": "ot_fusion", "max_iterations": 9, "cost_scale": "max"},
    }
]
GRAFTS: Operations = [
    {"op": "control_llm", "layers": [1, 2], "interpolator": {"kind": "lerp", "learnable": True}},
    {"op": "gated_adapters", "layers": "all", "size": 4},
    {"op": "mixture_of_control", "rank": 2},
]
EXPERTS: Operations = [
    {"op": "pmoe_experts", "from_peft": "adapter"},
    {"op": "insert_layers", "where": {"after": [0]}, "init": {"kind": "random"}},
]
STACK: Operations = [{"op": "stack_layers", "bottom": 2, "top": 2}]
CONTROL: Operations = [{"op": "control_llm", "layers": [1]}]
WORDS: Operations = [
    {"op": "grow_vocabulary", "tokens": {"learn": "new.jsonl", "count": 4, "keep": "old.jsonl"}, "measure": "new.jsonl"}
]
MIXTURE: Operations = [{"op": "upcycle_experts", "experts": 2, "top_k": 1}]
MODELS: Operations = [{"op": "upcycle_experts", "form": "copies", "experts": ["base", "./fine-tuned"]}]
DROP: Operations = [{"op": "drop_layers", "count": 1, "text": "text.txt", "window": 8, "windows": 4}]
UNGATED: Operations = [{"op": "gated_adapters", "layers": [0, 2], "size": 4, "gate": "none"}]
GATED: Operations = [{"op": "gated_adapters", "layers": [1, 2], "size": 4}, {"op": "domain_gate", "layer": 1}]
FOLD: Operations = [{"op": "fold_adapters"}]
WIDEN: Operations = [{"op": "widen_ffn", "by": 4, "init": "copy"}, {"op": "widen_attention", "groups": 2}]
STREAM: Operations = [{"op": "widen_hidden", "times": 2}]
PAD: Operations = [{"op": "pad_to", "tensor_parallel": 8}]
MERGE: Operations = [{"op": "merge_branches", "alpha": 0.5}]
ADAPTER: Operations = [{"op": "merge_adapter", "from": {"adapter": "queries", "weight": 0.5}}]

TRAINING: dict[str, Any] = {
    "surgeon_train": 1,
    "steps": 2,
    "batch": 2,
    "length": 16,
    "validation_sequences": 2,
    "optimizer": {"lr": 1e-2, "warmup": 1},
    "sources": [{"name": "fr", "path": "fr.jsonl", "share": 1, "validation": 0.1}],
}


def base(folder: Path) -> Path:
    """A tiny Llama with a tokenizer, templates in a folder, a licence, a card; texts and an adapter lie beside it."""
    made = add_tokenizer(tiny.checkpoint(folder / "base", "llama", num_hidden_layers=3), template="{{ messages }}")
    (made / "LICENSE").write_text("terms")
    (made / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (made / "additional_chat_templates").mkdir()
    (made / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    corpus(folder / "fr.jsonl", documents=20)
    (folder / "text.txt").write_text(text(80, seed=1))
    (folder / "train.yaml").write_text(yaml.safe_dump(TRAINING))
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    drawn = torch.Generator().manual_seed(0)
    shapes = {"lora_A": (2, 32), "lora_B": (32, 2)}
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.{part}.weight": torch.randn(shape, generator=drawn)
        for layer in (1, 3)
        for part, shape in shapes.items()
    }
    save_file(tensors, adapter / "adapter_model.safetensors")
    lora(folder / "queries", layers=3)
    return made


def grow(folder: Path, name: str, on: Path, operations: Operations) -> Path:
    """The output `name` of a plan of these operations, which lies beside the base."""
    plan = folder / f"{name}.yaml"
    plan.write_text(json.dumps({"surgeon": 1, "operations": operations}))
    surgeon.apply(plan, str(on), folder / name, device="cpu")
    return folder / name


def train(folder: Path, out: Path) -> Path:
    """The output, trained for two steps."""
    surgeon.train(out, folder / "train.yaml", folder / f"{out.name}-run", device="cpu")
    return folder / f"{out.name}-run"


def grown_vocabulary(folder: Path) -> Made:
    """A base whose tokenizer can grow, and an output with more tokens."""
    letters = byte_level(tiny.checkpoint(folder / "letters", "llama", num_hidden_layers=1, vocab_size=304))
    write_text(folder / "new.jsonl", FRENCH, times=2)
    write_text(folder / "old.jsonl", ENGLISH)
    return Made(letters, grow(folder, "worded", letters, WORDS))


def untied(folder: Path) -> Made:
    """A tied base, and an output with a head of its own."""
    tied = tiny.checkpoint(folder / "tied", "llama", num_hidden_layers=1, tie_word_embeddings=True)
    return Made(tied, grow(folder, "untied", tied, [{"op": "untie_embeddings"}]))


def text_alone(folder: Path) -> Made:
    """An image-text base, and its text tower."""
    images = tiny_decoder(folder / "images", "llava", IMAGE_TEXT)
    return Made(images, grow(folder, "text-alone", images, [{"op": "extract_text"}]))


def trimmed(folder: Path) -> Made:
    """A base whose tokenizer can be trimmed, and an output with fewer tokens."""
    letters = byte_level(tiny.checkpoint(folder / "spelt", "llama", num_hidden_layers=1, vocab_size=304))
    plan = [{"op": "trim_vocabulary", "tokens": ["the"], "pad_to_multiple_of": 1}]
    return Made(letters, grow(folder, "trimmed", letters, plan))


def in_bfloat16(folder: Path) -> Made:
    """A base in FP8, and an output whose weights are numbers again."""
    eight = tiny_quantised(folder / "fp8", "qwen3", "fp8")
    return Made(eight, grow(folder, "dequantised", eight, [{"op": "dequantise"}]))


def with_fewer_experts(folder: Path) -> Made:
    """A mixture, and an output with fewer experts."""
    experts = tiny_decoder(folder / "mixture", "qwen3_moe")
    plan = [{"op": "drop_experts", "experts": [0]}]
    return Made(experts, grow(folder, "fewer", experts, plan))


def with_more_experts(folder: Path) -> Made:
    """A mixture, and an output with copies of its experts."""
    experts = tiny_decoder(folder / "small mixture", "qwen3_moe")
    return Made(experts, grow(folder, "more", experts, [{"op": "add_experts", "times": 2, "top_k": "grown"}]))


@dataclass(frozen=True)
class Made:
    """A base and an output of it, of its last surgery or of all."""

    base: Path
    out: Path


def make(folder: Path) -> dict[str, Made]:
    """Outputs with every operation: of one surgery, of three and trained, merged, stacked."""
    first = base(folder)
    shutil.copytree(first, folder / "fine-tuned")
    fused = grow(folder, "fused", first, FUSION)
    grafted = grow(folder, "grafted", fused, GRAFTS)
    run = train(folder, grow(folder, "experts", grafted, EXPERTS))
    controlled = grow(folder, "controlled", first, CONTROL)
    ungated = grow(folder, "ungated", first, UNGATED)
    return {
        "three": Made(grafted, run),
        "three from the first base": Made(first, run),
        "fused": Made(first, fused),
        "adapted": Made(first, grow(folder, "adapted", first, ADAPTER)),
        "merged": Made(controlled, grow(folder, "merged", controlled, MERGE)),
        "vocabulary": grown_vocabulary(folder),
        "upcycled": Made(first, grow(folder, "upcycled", first, MIXTURE)),
        "of models": Made(first, grow(folder, "joined", first, MODELS)),
        "shorter": Made(first, grow(folder, "shorter", first, DROP)),
        "folded": Made(ungated, grow(folder, "folded", ungated, FOLD)),
        "wider": Made(first, grow(folder, "wider", first, WIDEN)),
        "wider stream": Made(first, grow(folder, "stream", first, STREAM)),
        "gated": Made(first, grow(folder, "gated", first, GATED)),
        "stacked": Made(first, grow(folder, "stacked", first, STACK)),
        "padded": Made(first, grow(folder, "padded", first, PAD)),
        "untied": untied(folder),
        "text": text_alone(folder),
        "trimmed": trimmed(folder),
        "dequantised": in_bfloat16(folder),
        "fewer experts": with_fewer_experts(folder),
        "more experts": with_more_experts(folder),
    }
