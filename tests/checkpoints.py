"""Folders of weights that tests read, write plans for, change as training would, and edit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import surgeon
from tests.shipped_plans import plan_of

INDEX = "model.safetensors.index.json"


def attaches_grafts(name: str) -> bool:
    """Whether a shipped plan attaches a graft to the base on which it is tried.

    Experts do so beside an MLP that no class of transformers holds with them.
    """
    operations = plan_of(name).plan.operations
    return any(op.grafts and (op.op != "upcycle_experts" or name.endswith("/beside")) for op in operations)


def weights(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, read by the safetensors library."""
    found: dict[str, Any] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        found |= load_file(shard)
    return found


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes."""
    return value.contiguous().view(-1).view(torch.uint8)


def same_bytes(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two checkpoints hold the same tensors, in their dtypes, bit for bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(as_bytes(one[name]), as_bytes(other[name]))
        for name in one
    )


def write_plan(path: Path, operations: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"surgeon": 1, "operations": operations}))
    return path


def train(folder: Path, *names: str, seed: int, scale: float = 1.0) -> None:
    """Other values for tensors of a checkpoint (without names: for every new one), as training would give them."""
    chosen = set(names or surgeon.inspect(folder).manifest.new_tensors)
    generator = torch.Generator().manual_seed(seed)
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        if not chosen & set(tensors):
            continue
        for name in sorted(chosen & set(tensors)):
            noise = scale * torch.randn(tensors[name].shape, generator=generator)
            tensors[name] = (tensors[name] + noise).to(tensors[name].dtype)
        save_file(tensors, shard, metadata={"format": "pt"})


def edit_config(base: Path, **changes: object) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | changes))


def edit_tensor(base: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    file = json.loads((base / INDEX).read_text())["weight_map"][name]
    tensors = load_file(base / file)
    tensors[name] = change(tensors[name])
    save_file(tensors, base / file, metadata={"format": "pt"})


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
