"""`verify --streamed` measured: seconds, processor seconds and peak memory, beside reading both checkpoints.

    python benchmarks/streamed_verify.py --work DIR [--windows 2] [--window 64]

Grows the Llama-3.2-1B-shaped checkpoint of depth_growth.py by `llama-pro` in DIR and verifies it layer by layer, in the
checkpoint's dtype, and in that and float32 from one pass. Memory is the highest resident set of the process, imports of
torch and transformers included, which stand in a row of their own. The floor of time is one reading of both checkpoints
from the page cache and all products of the forwards (prefill, and prefill and decoding with a cache) at the rate that a
product of such matrices in memory was measured at. Processor seconds are to be compared where others use the machine.
The result goes to benchmarks/results/streamed_verify.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

from depth_growth import make_base, warm
from measuring import in_a_process, machine, peak_memory

RESULTS = Path(__file__).resolve().parent / "results"


def inner(what: str, base: str, out: str, windows: str, window: str) -> None:
    """One candidate in a process of its own."""
    began, spent = time.perf_counter(), time.process_time()
    if what == "reading":
        for folder in (base, out):
            warm(Path(folder))
    elif what == "imports":
        import torch
        import transformers.models.llama.modeling_llama

        assert torch and transformers
    elif what.startswith("products"):
        spend_as_the_forwards(what.split()[1], [base, out], int(windows) * int(window))
    else:
        import torch

        import surgeon
        from surgeon.models.compare_streamed import compare_streamed

        opened = [surgeon.open_checkpoint(folder) for folder in (base, out)]
        manifest = opened[1].manifest
        assert manifest is not None
        images = tuple(n for n, layer in enumerate(manifest.layers) if layer.base is not None)
        ids = torch.randint(0, 128256, (int(windows), int(window)), generator=torch.Generator().manual_seed(0))
        began, spent = time.perf_counter(), time.process_time()
        found = compare_streamed(*(each.folder for each in opened), ids, dtypes=what.split("+"), layer_of_base=images)
        assert all(each.identical for each in found)
    print(
        json.dumps(
            {
                "wall": time.perf_counter() - began,
                "processor": time.process_time() - spent,
                "peak": peak_memory(),
            }
        )
    )


def spend_as_the_forwards(dtype: str, folders: list[str], tokens: int) -> None:
    """As many operations as the products of all forwards of both models take, a matrix in memory."""
    import torch

    import surgeon

    infos = [info for folder in folders for info in surgeon.open_checkpoint(folder).tensors.values()]
    # The embeddings are the head too.
    numbers = 2 * tokens * sum(info.shape[0] * info.shape[1] for info in infos if len(info.shape) == 2)
    matrix, inputs = (torch.randn(rows, 2048).to(getattr(torch, dtype)) for rows in (8192, tokens))
    for _ in range(round(numbers / (tokens * matrix.numel()))):
        torch.nn.functional.linear(inputs, matrix)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints (needs 7 GB)")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--window", type=int, default=64)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    base, out = arguments.work / "base-1b", arguments.work / "grown"
    make_base(base)
    if not out.exists():
        import surgeon

        surgeon.apply("llama-pro", base, out, device="cpu")
    lines = [
        f"Machine: {machine()}; Python {platform.python_version()}; {arguments.windows} windows of"
        f" {arguments.window} tokens; load at the end {{load}}.",
        "",
        "| candidate | wall s | processor s | peak memory MB |",
        "|---|---|---|---|",
    ]
    for name, what in (
        ("reading both checkpoints, from the page cache", "reading"),
        ("importing torch and transformers", "imports"),
        ("the products of all forwards, in memory, bfloat16", "products bfloat16"),
        ("the products of all forwards, in memory, float32", "products float32"),
        ("compared layer by layer, bfloat16", "auto"),
        ("compared layer by layer, bfloat16 and float32 from one pass", "auto+float32"),
    ):
        found = in_a_process(__file__, what, base, out, arguments.windows, arguments.window)
        lines.append(f"| {name} | {found['wall']:.1f} | {found['processor']:.1f} | {found['peak'] / 1e6:.0f} |")
        print(lines[-1], flush=True)
    text = "\n".join(lines).format(load=f"{os.getloadavg()[0]:.1f}")
    print(text)
    (RESULTS / "streamed_verify.md").write_text(f"# verify --streamed, 1B shape, 16 → 24 layers\n\n{text}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inner"]:
        inner(*sys.argv[2:])
    else:
        main()
