"""Tiny LoRA adapters as PEFT saves them, written without PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The queries of a tiny model, outputs by inputs (`tiny.COMMON`).
QUERY = {"self_attn.q_proj": (32, 32)}


def lora(
    folder: Path, modules: Mapping[str, tuple[int, int]] = QUERY, *, layers: int = 6, rank: int = 2, **config: Any
) -> Path:
    """Write an adapter of modules in each of the first layers into the new folder, and return it."""
    import torch
    from safetensors.torch import save_file

    drawn = torch.Generator().manual_seed(0)
    tensors = {
        f"base_model.model.model.layers.{layer}.{module}.lora_{part}.weight": torch.randn(shape, generator=drawn) * 0.1
        for layer in range(layers)
        for module, (rows, columns) in modules.items()
        for part, shape in (("A", (rank, columns)), ("B", (rows, rank)))
    }
    names = sorted({module.rpartition(".")[2] for module in modules})
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    return folder
