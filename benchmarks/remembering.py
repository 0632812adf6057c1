"""What remembering costs: steps with the base as teacher beside steps without; text that a base writes, a second.

    python benchmarks/remembering.py --base DIR --work DIR [--plan llama-pro] [--batch 20] [--length T] [--steps N]
    python benchmarks/remembering.py --base DIR --work DIR --whole [--cached 64] [--batch 20] [--length T] [--steps N]

A step is of B × T random tokens, forward, backward and AdamW, in float32 and one thread, of which the given shares of
sequences are original text; with and without the teacher in turns, each share in a process of its own for its peak
memory. Seconds are the processor's, so that other work on the machine does not count. Recall is timed beside one call
of transformers' `generate` of as many tokens. Results go to benchmarks/results/remembering_<base>.md.

With `--whole` all of the base trains, so that its teacher is a frozen copy, or what it said before the first step, kept
on disk: a step without a teacher, and with each of both. Results go to benchmarks/results/preserving_whole_<base>.md.
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
from types import SimpleNamespace
from typing import Any

from measuring import in_a_process, machine, peak_memory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

RESULTS = Path(__file__).resolve().parent / "results"
SHARES = (0.1, 0.25, 1.0)


def steps(out: Path, share: float, batch: int, length: int, count: int) -> dict[str, Any]:
    """Best seconds of a step without and with the teacher, in turns, and bytes at the peak of the first of each."""
    import torch

    import surgeon
    from surgeon.manifest.trainable import trainable_set
    from surgeon.manifest.within import base_within
    from surgeon.training.losses.cross_entropy import FusedHead
    from surgeon.training.losses.preserving import Preserving
    from surgeon.training.trainable.trainable_set import unfreeze

    opened = surgeon.open_checkpoint(out)
    folder, manifest = opened.folder, opened.manifest
    assert manifest is not None
    wanted = trainable_set(folder, manifest, "last")
    model = opened.load(dtype="float32")
    for name in unfreeze(model, wanted, base_names=folder.tensors):
        model.get_parameter(name).data = model.get_parameter(name).data.clone()
    head = FusedHead(model, "chunked")
    within = base_within(folder, manifest, training=wanted.names)
    preserving = Preserving(model, surgeon.PreserveSpec(), within, head)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(3, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(length).expand(batch, length)}
    domains = (torch.arange(batch) >= round(share * batch)).long()
    named = {"domain_ids": domains} if hasattr(model, "surgery") else {}
    seconds: list[list[float]] = [[], []]
    peaks = []
    model.train()
    # Twice without the teacher, for the optimizer's state; then in turns.
    for teaches in (False, False, *([True, False] * count)):
        begun = time.process_time()
        taught = preserving.teaching(inputs | {"domain_ids": domains}) if teaches else contextlib.nullcontext()
        with taught, head.armed():
            model(**inputs, **named, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds[teaches].append(time.process_time() - begun)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return {"seconds": [min(each) for each in seconds], "bytes": peaks[1:3]}


class Drawn:
    """A source of random sequences of one domain, 0 original, 1 new."""

    def __init__(self, domain: int, length: int, vocabulary: int) -> None:
        import numpy

        self.name, self.packer = f"domain {domain}", SimpleNamespace(domain=domain)
        self.shape, self.numbers, self.count = (length, vocabulary), numpy.random.default_rng, 0

    def next(self) -> Any:
        """The next one: the same for the same position."""
        from surgeon.data.packing import PackedSequence

        length, vocabulary = self.shape
        self.count += 1
        ids = self.numbers((self.packer.domain, self.count)).integers(3, vocabulary, length).tolist()
        return PackedSequence(ids, ids, list(range(length)), self.packer.domain)

    def state(self) -> list[int]:
        """The position."""
        return [self.count]

    def restore(self, state: list[int]) -> None:
        """Go to it."""
        (self.count,) = state


def whole(base: Path, work: Path, teacher: str, share: float, batch: int, length: int, count: int) -> dict[str, Any]:
    """A step in which all of `base` trains: best seconds, bytes at the peak; of a cache its bytes, and seconds a token.

    `teacher` is none, base (a frozen copy), or how many likeliest tokens are kept.
    """
    import torch

    import surgeon
    from surgeon.common.distributed import Ranks
    from surgeon.common.listener import Quiet
    from surgeon.data.packing import NUMBERS, Batches, Mixture, batch_of
    from surgeon.manifest.within import Within
    from surgeon.training.losses.cached_teacher import CachedTeacher
    from surgeon.training.losses.cross_entropy import FusedHead
    from surgeon.training.losses.preserving import Preserving

    opened = surgeon.open_checkpoint(base)
    model = opened.load(dtype="float32")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    vocabulary = model.config.vocab_size
    streams = [Drawn(domain, length, vocabulary) for domain in (0, 1)]
    mixture: Any = Mixture(streams, [share, 1 - share], seed=0)
    head = FusedHead(model, "chunked")
    within = Within(opened.layers, (), None, newborn=False, apart=True)
    kept = int(teacher) if teacher.isdigit() else None
    copy = None
    if teacher == "base":
        copy = FusedHead(opened.load(dtype="float32").requires_grad_(False), "torch")
    spec = surgeon.PreserveSpec(teacher="base" if kept is None else surgeon.TeacherSpec(cached=kept))
    preserving = Preserving(model, spec, within, head, copy=copy)
    told: dict[str, Any] = {}
    if kept is not None:
        shutil.rmtree(work / "said", ignore_errors=True)
        (work / "said").mkdir()
        cached = CachedTeacher(work / "said", kept, "original", mixture, (count + 1) * batch, length)
        begun = time.process_time()
        cached.record(preserving, micro_batch=batch, device=torch.device("cpu"), ranks=Ranks(), listener=Quiet())
        tokens = sum(map(int, cached._index["tokens"]))
        told = {"tokens": tokens, "asking": (time.process_time() - begun) / tokens, "disk": cached.needed_bytes()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batches = iter(Batches(mixture, batch, 0, 1, make=batch_of))
    seconds = []
    model.train()
    # The first is for the optimizer's state.
    for _ in range(count + 1):
        inputs = next(batches)
        begun = time.process_time()
        with contextlib.ExitStack() as stack:
            if teacher != "none":
                counted = int(preserving.counted(inputs).sum())
                stack.enter_context(preserving.teaching(inputs, counted, anywhere=True))
            stack.enter_context(head.armed())
            del inputs[NUMBERS], inputs["domain_ids"]
            model(**inputs, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - begun)
    return {"seconds": min(seconds[1:]), "bytes": peak_memory(), **told}


def whole_page(asked: argparse.Namespace) -> None:
    """Measure and write what tuning all of the base costs beside each teacher."""
    lines = [
        f"# All of the base trained, and taught by it, on {asked.base.name} ({machine()}, one thread)",
        "",
        f"Steps of {asked.batch} × {asked.length} tokens in float32, the best of {asked.steps}, in seconds of the"
        f" processor (load {os.getloadavg()[0]:.0f}); `kl` on original text, each row in a process of its own.",
        "",
        "| original text | teacher | step s | × | peak GB | on disk, bytes a token | asking the base, ms a token |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for share in SHARES:
        alone = 0.0
        for teacher in ("none", "base", str(asked.cached)):
            given = (asked.base, asked.work, teacher, share, asked.batch, asked.length, asked.steps)
            found = in_a_process(__file__, "whole", *given)
            alone = alone or found["seconds"]
            named = {"none": "none", "base": "a frozen copy"}.get(teacher, f"`{{cached: {teacher}}}`")
            disk = f"{found['disk'] / found['tokens']:.0f} | {1e3 * found['asking']:.2f}" if "disk" in found else " | "
            lines.append(
                f"| {share:.0%} | {named} | {found['seconds']:.3f} | {found['seconds'] / alone:.2f} |"
                f" {found['bytes'] / 1e9:.2f} | {disk} |"
            )
            print(lines[-1], flush=True)
    (RESULTS / f"preserving_whole_{asked.base.name}.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


def writes(base: Path, work: Path, dtype: str, batch: int, length: int) -> dict[str, float]:
    """Tokens a second: recalled, and by `generate` called once with the same numbers."""
    import torch
    from transformers import GenerationConfig

    import surgeon

    to = work / f"memory-{dtype}.jsonl"
    to.unlink(missing_ok=True)
    # One batch, once without writing for what is imported and loaded.
    surgeon.recall(base, tokens=2, to=work / "first.jsonl", prompts="begin", length=2, batch=1, dtype=dtype)
    (work / "first.jsonl").unlink()
    begun = time.process_time()
    made = surgeon.recall(
        base, tokens=batch * length // 3, to=to, prompts="begin", length=length, batch=batch, dtype=dtype
    )
    counts = made.counts
    recalled = (batch * (length - 1)) * counts.batches / (time.process_time() - begun)
    model = surgeon.open_checkpoint(base).load(dtype=dtype)
    ids = torch.full((batch, 1), model.config.bos_token_id)
    how = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=length - 1, min_new_tokens=length - 1, pad_token_id=0
    )
    begun = time.process_time()
    with torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
    own = batch * (length - 1) / (time.process_time() - begun)
    return {
        "recalled": recalled,
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
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--cached", type=int, default=64)
    asked = parser.parse_args()

    import surgeon

    asked.work.mkdir(exist_ok=True)
    if asked.whole:
        whole_page(asked)
        return
    lines = [
        f"# What remembering costs, on {asked.base.name} ({machine()}, load {os.getloadavg()[0]:.0f}, one thread)",
        "",
        f"Steps of {asked.batch} × {asked.length} tokens in float32, the best of {asked.steps}, in seconds of the"
        " processor; `kl` on original text.",
        "",
        "| trained | original text | step s | with the teacher | × | peak GB | with the teacher |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for plan in asked.plan:
        out = asked.work / plan.replace("/", "-")
        shutil.rmtree(out, ignore_errors=True)
        surgeon.apply(plan, str(asked.base), out)
        for share in SHARES:
            found = in_a_process(__file__, "steps", out, share, asked.batch, asked.length, asked.steps)
            seconds, peaks = found["seconds"], [each / 1e9 for each in found["bytes"]]
            lines.append(
                f"| {plan} | {share:.0%} | {seconds[0]:.3f} | {seconds[1]:.3f} | {seconds[1] / seconds[0]:.2f} |"
                f" {peaks[0]:.2f} | {peaks[1]:.2f} |"
            )
            print(lines[-1], flush=True)
    lines += [
        "",
        "Documents of 256 tokens from the begin-of-text token, 32 at a time:",
        "",
        "| dtype | recall, tokens a second of the processor | `generate` alone | kept | cut at 256 tokens |",
        "|---|---:|---:|---:|---:|",
    ]
    for dtype in ("float32", "bfloat16"):
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
    if what == "whole":
        folder, work, teacher, share, *numbers = given
        return whole(Path(folder), Path(work), teacher, float(share), *(int(each) for each in numbers))
    out, share, *numbers = given
    return steps(Path(out), float(share), *(int(each) for each in numbers))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inner"]:
        print(json.dumps(inner(*sys.argv[2:])))
    else:
        main()
