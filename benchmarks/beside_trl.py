"""Tokens a second of `surgeon train` beside TRL's SFTTrainer and a plain loop with PEFT, the same tensors training.

    python benchmarks/beside_trl.py --work DIR [--steps 6] [--rounds 1] [--dtype float32]

A random Llama of 33 M parameters, 4 × 256 tokens a step, no gradient checkpointing, AdamW, gradients clipped at 1. What
trains: everything; a LoRA of rank 16 on all linear layers; two layers put in above the others (`llama-pro`'s kind). TRL
gets windows of tokens that are ready; surgeon reads, tokenises and packs its text within its steps, as it always does.
In float32 all take the same steps; in bfloat16 surgeon's AdamW keeps float32 masters, and the others' do not.

Each candidate is a fork of a process that has imported everything. What counts are processor seconds from the end of
the second step to the end of the last, all threads, a step's own data with it. Results go to
benchmarks/results/beside_trl_DTYPE.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from measuring import machine
from random_llama import WORDS, make_base

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

RESULTS = Path(__file__).resolve().parent / "results"
BATCH, LENGTH, RANK = 4, 256, 16
# Steps before the clock: AdamW's state is made in the first.
BEFORE = 2
CONFIG = """\
surgeon_train: 1
steps: {steps}
batch: {batch}
length: {length}
packing: joined
{what}
dtype: {dtype}
save_every: 1000
evaluate_every: 1000
validation_sequences: 1
optimizer: {{lr: 1e-5, warmup: 1}}
sources:
  - {{name: text, path: text.txt, share: 1, validation: 0.05}}
"""


class Clock:
    """Processor seconds at the end of each step, of all of this process's threads."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def stop(self) -> None:
        """A step has ended."""
        self.ends.append(time.process_time())

    def step(self) -> float:
        """Of one step, after the first ones."""
        return (self.ends[-1] - self.ends[BEFORE - 1]) / (len(self.ends) - BEFORE)


def callback(clock: Clock) -> Any:
    """What transformers' Trainer calls."""
    from transformers import TrainerCallback

    class Clocked(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.stop()

    return Clocked


def by_surgeon(out: Path, what: str, steps: int, dtype: str) -> float:
    """`surgeon train`, whole."""
    import surgeon
    from surgeon.training import opening

    clock, work = Clock(), out.parent
    # In the place of trackers, which are called as it is.
    opening.open_trackers = lambda *_, **__: [callback(clock)()]
    how = {"all": "what: all", "lora": f"lora: {{rank: {RANK}}}", "new": "what: last"}[what]
    config = work / f"{what}.yaml"
    config.write_text(CONFIG.format(steps=steps, batch=BATCH, length=LENGTH, what=how, dtype=dtype))
    surgeon.train(out, config, work / f"run-{what}", device="cpu")
    return clock.step()


def loaded(out: Path, what: str, dtype: str) -> Any:
    """The model, with the wanted tensors training; a LoRA comes later."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out, dtype=getattr(torch, dtype))
    if what == "new":
        manifest = json.loads((out / "surgery.json").read_text())
        fresh = set(manifest["new_tensors"])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in fresh)
    return model


def lora() -> Any:
    """That of `surgeon train`'s config."""
    import peft

    return peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")


def windows(steps: int) -> list[list[int]]:
    """Tokens of every step."""
    import torch

    drawn = torch.Generator().manual_seed(2)
    found: list[list[int]] = torch.randint(3, WORDS, (steps * BATCH, LENGTH), generator=drawn).tolist()
    return found


def by_trl(out: Path, what: str, steps: int, dtype: str) -> float:
    """TRL's SFTTrainer as it is, on windows of tokens."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    clock = Clock()
    settings = SFTConfig(
        output_dir=str(out.parent / f"trl-{what}"),
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        max_length=LENGTH,
        learning_rate=1e-5,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=10,
    )
    trainer = SFTTrainer(
        model=loaded(out, what, dtype),
        args=settings,
        train_dataset=Dataset.from_list([{"input_ids": row} for row in windows(steps)]),
        processing_class=AutoTokenizer.from_pretrained(out),
        peft_config=lora() if what == "lora" else None,
        callbacks=[callback(clock)()],
    )
    trainer.train()
    return clock.step()


def by_loop(out: Path, what: str, steps: int, dtype: str) -> float:
    """A loop of one's own with torch's AdamW, and PEFT for a LoRA."""
    import peft
    import torch

    clock, model = Clock(), loaded(out, what, dtype)
    if what == "lora":
        model = peft.get_peft_model(model, lora())
    model.train()
    training = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(training, lr=1e-5, fused=True)
    for batch in torch.tensor(windows(steps)).split(BATCH):
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(training, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.stop()
    return clock.step()


def in_a_fork(call: Callable[[], float]) -> float:
    """What a call finds, in a process that is as this one is now."""
    reader, writer = os.pipe()
    if (fork := os.fork()) == 0:
        try:
            os.write(writer, str(call()).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writer)
    if os.waitpid(fork, 0)[1]:
        sys.exit("a fork failed")
    return float(os.read(reader, 64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and runs, removed afterwards")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    if work.exists() and any(work.iterdir()):
        parser.error(f"--work {work}: not empty, and it is removed afterwards")
    work.mkdir(parents=True, exist_ok=True)
    import peft
    import torch
    import transformers
    import trl
    from trl import SFTTrainer

    import surgeon
    from surgeon.training import session

    assert SFTTrainer and session
    # A fork has no threads of the process that it is of.
    torch.set_num_threads(1)
    try:
        make_base(
            work / "base", width=512, inner=1536, layers=8, heads=8, groups=2, tied=False, documents=200, length=300
        )
        plan = work / "plan.yaml"
        plan.write_text(
            "surgeon: 1\noperations:\n  - {op: insert_layers, where: {after: [5, 7]}, init: {kind: copy}}\n"
        )
        surgeon.apply(plan, str(work / "base"), work / "grown", device="cpu")
        ways: dict[str, Callable[[Path, str, int, str], float]] = {
            "surgeon train": by_surgeon,
            "SFTTrainer": by_trl,
            "a plain loop": by_loop,
        }
        titles = {"all": "everything", "lora": f"LoRA, rank {RANK}", "new": "two layers put in"}
        spent: dict[tuple[str, str], list[float]] = {}
        for _ in range(arguments.rounds):
            for what in titles:
                for name, way in ways.items():
                    shutil.rmtree(work / f"run-{what}", ignore_errors=True)
                    out = work / ("grown" if what == "new" else "base")
                    call = partial(way, out, what, arguments.steps, arguments.dtype)
                    spent.setdefault((what, name), []).append(in_a_fork(call))
                    print(what, name, spent[what, name], flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, TRL {trl.__version__}"
    lines = [
        f"# `surgeon train` beside TRL and PEFT, {arguments.dtype}",
        "",
        f"`python benchmarks/beside_trl.py --steps {arguments.steps} --rounds {arguments.rounds} --dtype"
        f" {arguments.dtype}`: {machine()}, {versions}, PEFT {peft.__version__}; one thread; load at the end"
        f" {os.getloadavg()[0]:.1f}. Processor seconds of a step of {BATCH} × {LENGTH} tokens (the least of the rounds)"
        " and tokens in one of these; × is surgeon's tokens over theirs.",
        "",
        "| trained | by | processor s a step | tokens a processor s | × |",
        "|---|---|---:|---:|---:|",
    ]
    for (what, name), found in spent.items():
        own, step = min(spent[what, "surgeon train"]), min(found)
        lines.append(f"| {titles[what]} | {name} | {step:.3f} | {BATCH * LENGTH / step:,.0f} | {step / own:.2f} |")
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / f"beside_trl_{arguments.dtype}.md").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
