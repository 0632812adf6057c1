"""What a training run spends on checkpoints and on masked attention, as it was and as it is.

    python benchmarks/training_waste.py --work DIR [--steps 12] [--every 3] [--rounds 1]

Checkpoints: `surgeon train` of two layers put into a random Llama in float32, whose tensors are some 100 MB, a
checkpoint every so many steps: written within the steps, beside them, and none. Each run is a process. What counts is
wall time from the end of the first step to the end of the last (the checkpoint after it is written in the step always),
and of it the time in which no step was made.

Attention: forward and backward of sequences of 1,024 tokens, packed from documents of one length, through a random
Llama of 4 layers, 512 wide, by `sdpa` on a CPU: masked as a whole, by document, and with `packing: joined`. Processor
seconds, the lesser of two. Results go to benchmarks/results/training_waste.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from measuring import in_a_process, machine, peak_memory
from random_llama import WORDS, make_base

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

RESULTS = Path(__file__).resolve().parent / "results"
CONFIG = """\
surgeon_train: 1
steps: {steps}
batch: 1
length: 128
packing: joined
save_every: {every}
saving: {saving}
evaluate_every: 1000
validation_sequences: 1
optimizer: {{lr: 1e-5, warmup: 1}}
sources:
  - {{name: text, path: text.txt, share: 1, validation: 0.05}}
"""
LENGTH, SEQUENCES = 1024, 1
DOCUMENTS = (64, 256)
WAYS = {"none": "no checkpoint between", "in_step": "within the steps", "beside": "beside the steps"}


def make(work: Path) -> None:
    """The base, text of its words, and the base with two layers more."""
    import surgeon

    make_base(work / "base", width=1024, inner=3072, layers=6, heads=16, groups=4, tied=True, documents=100, length=200)
    plan = work / "plan.yaml"
    plan.write_text("surgeon: 1\noperations:\n  - {op: insert_layers, where: {after: [3, 5]}, init: {kind: copy}}\n")
    surgeon.apply(plan, str(work / "base"), work / "grown", device="cpu")


def checkpoints(work: Path, saving: str, steps: int, every: int) -> dict[str, Any]:
    """One run: wall seconds of its steps, those in which none was made, processor seconds, and its bytes."""
    import torch
    from transformers import TrainerCallback

    import surgeon
    from surgeon.training import footprint, opening, session

    torch.set_num_threads(1)
    ends: list[tuple[float, float, float]] = []
    trainers: list[Any] = []

    class Clocked(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append((time.perf_counter(), time.process_time(), trainers[0].aside))

    made = session.SurgeonTrainer

    def watched(*given: Any, **named: Any) -> Any:
        trainers.append(made(*given, **named))
        return trainers[0]

    # In the place of trackers, which are called as it is.
    opening.open_trackers = lambda *_, **__: [Clocked()]
    session.SurgeonTrainer = watched  # type: ignore[misc]
    config = work / f"{saving}.yaml"
    asked = "in_step" if saving == "none" else saving
    config.write_text(CONFIG.format(steps=steps, every=steps if saving == "none" else every, saving=asked))
    surgeon.train(work / "grown", config, work / f"run-{saving}", device="cpu")
    shutil.rmtree(work / f"run-{saving}")
    wall, cpu, aside = (last - first for first, last in zip(ends[0], ends[-1], strict=True))
    return {
        "wall": wall,
        "cpu": cpu,
        "still": aside,
        "peak": peak_memory(),
        "checkpoint": footprint.checkpoint_bytes(trainers[0].model),
    }


def attention() -> dict[str, dict[str, float]]:
    """Processor seconds of a forward and backward, by tokens a document and way."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from surgeon.training.steps.by_document import by_document

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(3, WORDS, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))

    def spent(tokens: int, way: Callable[[], AbstractContextManager[None]]) -> float:
        positions = (torch.arange(LENGTH) % tokens).expand(SEQUENCES, -1)
        best = float("inf")
        for _ in range(2):
            begun = time.process_time()
            with way():
                model(input_ids=ids, labels=ids, position_ids=positions).loss.backward()
            best = min(best, time.process_time() - begun)
            model.zero_grad()
        return best

    ways = {"masked": contextlib.nullcontext, "by document": by_document}
    found = {f"{n} tokens": {name: spent(n, way) for name, way in ways.items()} for n in DOCUMENTS}
    return found | {"joined": {"whole": spent(LENGTH, contextlib.nullcontext)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and runs, removed afterwards")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    if work.exists() and any(work.iterdir()):
        parser.error(f"--work {work}: not empty, and it is removed afterwards")
    work.mkdir(parents=True, exist_ok=True)
    import torch
    import transformers

    runs: dict[str, list[dict[str, Any]]] = {}
    try:
        make(work)
        for _ in range(arguments.rounds):
            for saving in WAYS:
                found = in_a_process(__file__, "checkpoints", work, saving, arguments.steps, arguments.every)
                runs.setdefault(saving, []).append(found)
                print(saving, found, flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    spent = in_a_process(__file__, "attention")
    counted, written = arguments.steps - 1, (arguments.steps - 1) // arguments.every
    given = f"--steps {arguments.steps} --every {arguments.every} --rounds {arguments.rounds}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    nbytes = runs["beside"][0]["checkpoint"]
    lines = [
        "# What a training run spends on checkpoints and on masked attention",
        "",
        f"`python benchmarks/training_waste.py {given}`: {machine()}, {versions}; one thread; load at the end"
        f" {os.getloadavg()[0]:.1f}.",
        "",
        f"## Checkpoints of {nbytes / 1e6:.0f} MB, {written} of them in {counted} steps",
        "",
        f"Seconds of {counted} steps, of each way the round with the least wall time.",
        "",
        "| checkpoints | wall s | of it no step is made | processor s | peak memory, MB |",
        "|---|---:|---:|---:|---:|",
    ]
    for saving, rounds in runs.items():
        best = min(rounds, key=lambda each: float(each["wall"]))
        figures = f"{best['wall']:.2f} | {best['still']:.2f} | {best['cpu']:.2f} | {best['peak'] / 1e6:.0f}"
        lines.append(f"| {WAYS[saving]} | {figures} |")
    lines += [
        "",
        f"## Attention, {SEQUENCES} × {LENGTH:,} tokens, forward and backward",
        "",
        "| documents of | attention | processor s | × of masked |",
        "|---|---|---:|---:|",
    ]
    for documents, ways in spent.items():
        for way, seconds in ways.items():
            ratio = f"{seconds / ways['masked']:.2f}" if "masked" in ways else ""
            lines.append(f"| {documents} | {way} | {seconds:.2f} | {ratio} |")
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "training_waste.md").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))


def inner(what: str, *given: str) -> None:
    if what == "attention":
        print(json.dumps(attention()))
    else:
        work, saving, steps, every = given
        print(json.dumps(checkpoints(Path(work), saving, int(steps), int(every))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inner"]:
        inner(*sys.argv[2:])
    else:
        main()
