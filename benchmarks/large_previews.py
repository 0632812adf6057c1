"""What a preview of the largest open models takes: their headers and configs, without a byte of weights.

`python -m benchmarks.large_previews` writes shards that are header and hole (nothing on disk), in a temporary folder,
and runs `surgeon preview` on each in a process of its own, twice: with an empty cache, and with what the first run left
there. Wall seconds, the process' own seconds (which other programs' work changes less) and peak resident memory,
imports included. It writes results/large_previews.md.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "DeepSeek-V3, 671B": {"model_type": "deepseek_v3"},
    "Qwen3-MoE, 235B": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    },
    "Llama 3.1, 405B": {
        "model_type": "llama",
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 53248,
        "vocab_size": 128256,
    },
}
PLAN = "surgeon: 1\noperations:\n  - {op: insert_layers, where: {every: 4}, init: {kind: copy}}\n"
_SHARD = 5_000_000_000


def sparse_checkpoint(folder: Path, config: dict[str, Any]) -> int:
    """A checkpoint of this config whose weights are holes; returns the number of its parameters."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    folder.mkdir()
    made = CONFIG_MAPPING[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    # As published configs are: what is as in every config is left out.
    made.architectures, made.dtype = [type(model).__name__], "bfloat16"
    made.save_pretrained(folder)
    tensors = revert_weight_conversion(model, dict(model.state_dict()))
    shards: list[dict[str, Any]] = [{}]
    sizes = [0]
    total = 0
    for name, value in tensors.items():
        nbytes = 2 * value.numel()
        total += value.numel()
        if sizes[-1] and sizes[-1] + nbytes > _SHARD:
            shards.append({})
            sizes.append(0)
        offsets = [sizes[-1], sizes[-1] + nbytes]
        shards[-1][name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": offsets}
        sizes[-1] += nbytes
    places = {}
    for number, (header, size) in enumerate(zip(shards, sizes, strict=True), 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(folder / file, 8 + len(text) + size)
        places |= dict.fromkeys(header, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return total


_ABOUT = """# Previews of the largest open models

`python -m benchmarks.large_previews`: {machine}.
Headers and configs of these shapes, no weights; a copy after every fourth layer. Each preview is a process of its own,
imports included: first with an empty cache, then with what the first one left in it
([families](../../docs/reference/families.md#what-is-kept)). A usual model (Llama) needs neither a twin nor the
cache. CPU seconds are the process' own (user and system), one thread.

| model | parameters | tensors | first: seconds | CPU seconds | memory | again: seconds | CPU seconds | memory |
|---|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    import torch
    import transformers

    lines = []
    with tempfile.TemporaryDirectory(prefix="surgeon-large-") as room:
        plan = Path(room) / "plan.yaml"
        plan.write_text(PLAN)
        # Modules are compiled before anything is measured, as they are after any first use.
        for nth, (name, config) in enumerate(SHAPES.items()):
            folder = Path(room) / str(nth)
            parameters = sparse_checkpoint(folder, config)
            tensors = len(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])
            cells = [name, f"{parameters:,}", f"{tensors:,}"]
            measured(plan, folder, cache="off")
            for _ in ("first", "again"):
                cells += measured(plan, folder, cache=str(Path(room) / "cache"))
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    machine = f"{versions}, {os.cpu_count()} cores, load averages {load} at the end"
    (Path(__file__).parent / "results" / "large_previews.md").write_text(
        _ABOUT.format(machine=machine) + "\n".join(lines) + "\n"
    )


def measured(plan: Path, folder: Path, *, cache: str) -> list[str]:
    """Wall seconds, CPU seconds and peak memory of a preview in a process of its own."""
    settings = {**os.environ, "SURGEON_CACHE": cache, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    ran = subprocess.Popen(
        [sys.executable, "-m", "surgeon", "preview", str(plan), str(folder)], stdout=-3, env=settings
    )
    _, code, used = os.wait4(ran.pid, 0)
    seconds = time.perf_counter() - began
    if code:
        sys.exit(f"{folder.name}: exit {code}")
    memory = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return [f"{seconds:.1f}", f"{used.ru_utime + used.ru_stime:.1f}", f"{memory / 1e6:,.0f} MB"]


if __name__ == "__main__":
    main()
