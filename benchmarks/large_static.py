"""`verify --static` of a 70B shape beside `cat` and `sha256sum` of the same bytes.

    python benchmarks/large_static.py --work DIR [--layers 80]

Shards of the Llama-3 70B shape that are header and hole, so that they take no room; adapters grafted onto the first
layer with `--link`. `verify --static` reads every byte of base and output once each; so do `cat` and `sha256sum` beside
it, all of it from the file system's holes, which are faster than any disk. Processor seconds of whole processes. With
fewer layers the embeddings and the head, 4.2 GB, are what they are. Results go to benchmarks/results/large_static.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

from measuring import machine
from scale import Sizes, dense_sizes

RESULTS = Path(__file__).resolve().parent / "results"
LAYERS, SHARD = 80, 5_000_000_000
PLAN = "surgeon: 1\noperations:\n  - {op: gated_adapters, layers: [0], size: 8}\n"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def write(folder: Path, layers: int) -> int:
    """The sparse checkpoint; its bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    sizes: Sizes = dense_sizes(layers, hidden=8192, inner=28672, keys=1024, words=128256)
    shards: list[list[str]] = [[]]
    held = total = 0
    for name, shape in sizes.items():
        nbytes = 2 * math.prod(shape)
        if held and held + nbytes > SHARD:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held, total = held + nbytes, total + nbytes
    places = {}
    for number, names in enumerate(shards, 1):
        file, header, end = f"model-{number:05d}-of-{len(shards):05d}.safetensors", {}, 0
        for name in names:
            begin, end = end, end + 2 * math.prod(sizes[name])
            header[name] = {"dtype": "BF16", "shape": sizes[name], "data_offsets": [begin, end]}
            places[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(folder / file, 8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return total


def measured(command: list[str]) -> tuple[float, float, float]:
    """Wall and processor seconds and peak memory in MB."""
    began = time.perf_counter()
    ran = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, code, used = os.wait4(ran.pid, 0)
    if code:
        sys.exit(f"{' '.join(command[:4])}: failed")
    memory = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for sparse files, removed afterwards")
    parser.add_argument("--layers", type=int, default=LAYERS)
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    if work.exists() and any(work.iterdir()):
        parser.error(f"--work {work}: not empty, and it is removed afterwards")
    work.mkdir(parents=True, exist_ok=True)
    surgeon = [sys.executable, "-m", "surgeon"]
    base, out, plan = work / "base", work / "out", work / "plan.yaml"
    try:
        nbytes = write(base, arguments.layers)
        plan.write_text(PLAN)
        subprocess.run([*surgeon, "apply", str(plan), str(base), str(out), "--link", "-q"], check=True)
        both = [str(path) for folder in (base, out) for path in sorted(folder.glob("*.safetensors"))]
        found = {
            "surgeon verify --static": measured([*surgeon, "verify", str(base), str(out), "--static", "-q"]),
            "sha256sum of both": measured(["sha256sum", *both]),
            "cat of both": measured(["cat", *both]),
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)
    lines = [
        f"# verify --static of a 70B shape, {arguments.layers} of its {LAYERS} layers: {nbytes / 1e9:.1f} GB, twice",
        "",
        f"`python benchmarks/large_static.py --layers {arguments.layers}`: {machine()}; Python"
        f" {platform.python_version()}; load at the end {os.getloadavg()[0]:.1f}. Files of holes.",
        "",
        "| candidate | wall s | processor s | GB a processor s | peak memory MB |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, (wall, spent, memory) in found.items():
        lines.append(f"| {name} | {wall:.1f} | {spent:.1f} | {2 * nbytes / 1e9 / spent:.2f} | {memory:.0f} |")
    print("\n".join(lines))
    (RESULTS / "large_static.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
