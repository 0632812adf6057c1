"""What remembering costs: steps with the base as teacher beside steps without; text that a base writes, a second.

    python benchmarks/remembering.py --base DIR --work DIR [--plan llama-pro] [--batch 20] [--length T] [--steps N]

A step is of B × T random tokens, forward, backward and AdamW, of which the given shares of sequences are original
text; the losses are computed by the same code with and without the teacher, in turns, each share in a process of its
own for its peak memory. Recall is timed beside transformers' own `generate` of as many tokens. Results go to
benchmarks/results/remembering_<base>.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from measuring import in_a_process, machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

RESULTS = Path(__file__).resolve().parent / "results"
SHARES = (0.0, 0.1, 0.25, 1.0)


def step(out: Path, share: float, teaches: int, batch: int, length: int, steps: int) -> dict[str, float]:
    """Best seconds of a step, and bytes at the peak."""
    import torch

    from surgeon.checkpoint.folder import CheckpointFolder
    from surgeon.manifest.lineage import trainable_set
    from surgeon.manifest.manifest import manifest_of
    from surgeon.manifest.within import base_within
    from surgeon.models.load import load_model
    from surgeon.train.config import PreserveSpec
    from surgeon.train.cross_entropy import FusedHead
    from surgeon.train.preserving import Preserving
    from surgeon.train.trainer import unfreeze

    folder = CheckpointFolder.open(out)
    manifest = manifest_of(folder)
    wanted = trainable_set(folder, manifest, "last")
    model = load_model(folder)
    for name in unfreeze(model, wanted, base_names=folder.tensors):
        model.get_parameter(name).data = model.get_parameter(name).data.clone()
    head = FusedHead(model, "chunked")
    within = base_within(folder, manifest, training=wanted.names)
    preserving = Preserving(model, PreserveSpec(), within, head)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(3, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(length).expand(batch, length)}
    domains = (torch.arange(batch) >= round(share * batch)).long()
    named = {"domain_ids": domains} if hasattr(model, "surgery") else {}
    seconds = []
    model.train()
    for _ in range(steps):
        begun = time.perf_counter()
        taught = preserving.teaching(inputs | {"domain_ids": domains}) if teaches else contextlib.nullcontext()
        with taught, head.armed():
            model(**inputs, **named, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
    return {"seconds": min(seconds), "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def writes(base: Path, work: Path, dtype: str, batch: int, length: int) -> dict[str, float]:
    """Tokens a second: recalled, and by `generate` called once with the same numbers."""
    import torch
    from transformers import GenerationConfig

    import surgeon
    from surgeon.models.load import load_model

    to = work / f"memory-{dtype}.jsonl"
    to.unlink(missing_ok=True)
    made = surgeon.recall(
        base, tokens=2 * batch * length // 3, to=to, prompts="begin", length=length, batch=batch, dtype=dtype
    )
    model = load_model(base, dtype=dtype)
    ids = torch.full((batch, 1), model.config.bos_token_id)
    how = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=length - 1, min_new_tokens=length - 1, pad_token_id=0
    )
    begun = time.perf_counter()
    with torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
    own = batch * (length - 1) / (time.perf_counter() - begun)
    counts = made.counts
    return {
        "recalled": made.tokens_per_second or 0.0,
        "generate": own,
        "kept": counts.kept / counts.written,
        "cut": counts.cut / counts.kept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--plan", nargs="*", default=["llama-pro", "neutral-residues"])
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    asked = parser.parse_args()

    import surgeon

    asked.work.mkdir(exist_ok=True)
    lines = [
        f"# What remembering costs, on {asked.base.name} ({machine()}, load {os.getloadavg()[0]:.0f}, one thread)",
        "",
        f"Steps of {asked.batch} × {asked.length} tokens, the best of twice {asked.steps}; `kl` on original text.",
        "",
        "| trained | original text | step s | with the teacher | × | peak GB | with the teacher |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for plan in asked.plan:
        out = asked.work / plan.replace("/", "-")
        shutil.rmtree(out, ignore_errors=True)
        surgeon.apply(plan, str(asked.base), out)
        for share in SHARES:
            found: list[list[dict[str, Any]]] = [[], []]
            for _ in range(2):
                for teaches in (0, 1):
                    given = (out, share, teaches, asked.batch, asked.length, asked.steps)
                    found[teaches].append(in_a_process(__file__, "step", *given))
            seconds = [min(one["seconds"] for one in runs) for runs in found]
            peaks = [min(one["bytes"] for one in runs) / 1e9 for runs in found]
            lines.append(
                f"| {plan} | {share:.0%} | {seconds[0]:.3f} | {seconds[1]:.3f} | {seconds[1] / seconds[0]:.2f} |"
                f" {peaks[0]:.2f} | {peaks[1]:.2f} |"
            )
            print(lines[-1], flush=True)
    lines += [
        "",
        "Documents of 256 tokens from the begin-of-text token, 32 at a time:",
        "",
        "| dtype | recall, tokens/s | `generate` alone, tokens/s | kept | cut at 256 tokens |",
        "|---|---:|---:|---:|---:|",
    ]
    for dtype in ("bfloat16", "float32"):
        told = in_a_process(__file__, "writes", asked.base, asked.work, dtype, 32, 256)
        lines.append(
            f"| {dtype} | {told['recalled']:.0f} | {told['generate']:.0f} | {told['kept']:.0%} | {told['cut']:.0%} |"
        )
        print(lines[-1], flush=True)
    (RESULTS / f"remembering_{asked.base.name}.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


def inner(what: str, *given: str) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    if what == "writes":
        base, work, dtype, batch, length = given
        return writes(Path(base), Path(work), dtype, int(batch), int(length))
    out, share, *numbers = given
    return step(Path(out), float(share), *(int(each) for each in numbers))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inner"]:
        print(json.dumps(inner(*sys.argv[2:])))
    else:
        main()
