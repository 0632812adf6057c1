"""What merging a LoRA costs: `merge_adapter` beside PEFT's merge_and_unload and save_pretrained, in one run.

    python benchmarks/merging_cost.py --work DIR [--rounds 2]

A Llama of a 1B shape in bfloat16, of random numbers, and a random LoRA of rank 16 on all seven kinds of its matrices.
Each way runs in turn in a process of its own, one thread, from files to files: seconds on the clock and of the
processor, without imports, the least of the rounds; and the peaks of the resident set (with pages of mapped files) and
of what the process holds itself, above what it holds after imports. Results go to benchmarks/results/merging_cost.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import in_a_process, machine, peak_memory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

RESULT = Path(__file__).resolve().parent / "results" / "merging_cost.md"
WIDTH, INNER, LAYERS, WORDS, RANK = 2048, 8192, 16, 128256, 16
MATRICES = {
    **{f"self_attn.{name}_proj": (rows, WIDTH) for name, rows in (("q", WIDTH), ("k", 512), ("v", 512), ("o", WIDTH))},
    **{f"mlp.{name}_proj": shape for name, shape in (("gate", (INNER, WIDTH)), ("up", (INNER, WIDTH)))},
    "mlp.down_proj": (WIDTH, INNER),
}
WAYS = {
    "peft": "PEFT: load, merge_and_unload, save_pretrained",
    "nearest": "merge_adapter, `rounding: nearest`",
    "auto": "merge_adapter, `rounding: auto`",
}


def make(work: Path) -> None:
    """The base, whose matrices repeat a block of random numbers, and the adapter."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.adapters import lora

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(work / "base")
    block = (torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).named_parameters()}
    tensors = {
        name: block.repeat(-(-shape.numel() // 2**20))[: shape.numel()].view(shape) for name, shape in shapes.items()
    }
    save_file(tensors, work / "base" / "model.safetensors", metadata={"format": "pt"})
    lora(work / "adapter", MATRICES, layers=LAYERS, rank=RANK)


def by_peft(work: Path) -> None:
    """As PEFT's documentation merges."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch.bfloat16)
    peft.PeftModel.from_pretrained(model, work / "adapter").merge_and_unload().save_pretrained(work / "out")


def by_surgeon(work: Path, rounding: str) -> None:
    """The same by a plan."""
    import surgeon

    operation = {"op": "merge_adapter", "from": str(work / "adapter"), "rounding": rounding}
    plan = surgeon.parse_plan(json.dumps({"surgeon": 1, "operations": [operation]}), source=str(work / "plan.yaml"))
    surgeon.apply(plan, work / "base", work / "out", device="cpu")


def _own() -> int:
    """What the process holds itself, in bytes: without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@contextlib.contextmanager
def watched(peaks: list[int]) -> Iterator[None]:
    """Look at what the process holds itself, fifty times a second."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            peaks[0] = max(peaks[0], _own())

    thread = threading.Thread(target=look)
    thread.start()
    yield
    done.set()
    thread.join()


def measured(way: str, work: Path) -> dict[str, float]:
    """One way, once."""
    import torch

    import surgeon

    torch.set_num_threads(1)
    if way == "peft":
        import peft  # noqa: F401
        from transformers import AutoModelForCausalLM  # noqa: F401
    else:
        assert callable(surgeon.apply)
    resident, own, peaks = peak_memory(), _own(), [0]
    began, spent = time.perf_counter(), time.process_time()
    with watched(peaks):
        by_peft(work) if way == "peft" else by_surgeon(work, way)
    found = {"seconds": time.perf_counter() - began, "processor": time.process_time() - spent}
    return found | {"resident": peak_memory() - resident, "own": peaks[0] - own}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder with 8 GB of room")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    work: Path = given.work
    if not (work / "adapter").exists():
        in_a_process(__file__, "make", work)
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    loads = [os.getloadavg()[0]]
    for _ in range(given.rounds):
        for way in WAYS:
            shutil.rmtree(work / "out", ignore_errors=True)
            runs[way].append(in_a_process(__file__, way, work))
            loads.append(os.getloadavg()[0])
            print(way, runs[way][-1], flush=True)
    shutil.rmtree(work / "out", ignore_errors=True)
    least = {way: {key: min(run[key] for run in found) for key in found[0]} for way, found in runs.items()}
    rows = [
        f"| {WAYS[way]} | {one['seconds']:.0f} | {one['processor']:.0f} | {one['resident'] / 2**30:.2f} |"
        f" {one['own'] / 2**30:.2f} |"
        for way, one in least.items()
    ]
    text = [
        "# What merging a LoRA costs",
        "",
        f"`python benchmarks/merging_cost.py --work DIR`, {machine()}, one thread. A Llama of {LAYERS} layers,"
        f" hidden size {WIDTH}, {WORDS} tokens, tied, in bfloat16 (2.5 GB); a LoRA of rank {RANK} on all its matrices."
        " From files to files, without imports: the least of the rounds, which took turns. `apply` also digests the"
        " base, measures what rounding leaves of each change, flushes every shard to disk and reads it back."
        f" Load average {min(loads):.0f} to {max(loads):.0f}: where that is above the cores, compare processor"
        " seconds.",
        "",
        "| | seconds | processor seconds | resident set, GiB | of its own, GiB |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]
    RESULT.write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inner"]:
        what, place = sys.argv[2], Path(sys.argv[3])
        made = make(place) if what == "make" else measured(what, place)
        print(json.dumps(made or {}))
    else:
        main()
