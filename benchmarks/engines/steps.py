"""Each graft and what people do with a model: a table of graft and step, each step run on tiny outputs.

    python -m benchmarks.engines.steps WORK [--only STEP …]

WORK gets the outputs (a folder for each, kept), by `engines.models`' base and its way to move new tensors away from
their birth. Steps that `engines.other` tries too are its own; what is installed decides which of them run. Writes
results/engines_steps.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import surgeon
from benchmarks.engines import other
from benchmarks.engines.models import BASES, WIDE, prompts, tokenizer, trained
from benchmarks.engines.other import Tried, difference, installed, outcome
from tests import tiny

RESULT = Path(__file__).resolve().parents[1] / "results" / "engines_steps.md"
_ADAPTERS: dict[str, Any] = {"op": "gated_adapters", "size": 32}
_SLOTS = {"op": "pmoe_experts", "slots": 2, "threshold": 2}
_CONTROL = {"op": "control_llm", "layers": [1, 4], "interpolator": {"kind": "lerp", "alpha": 0.5}}
_STATES = {"op": "mixture_of_control", "rank": 4}
_GATE = {"op": "domain_gate"}
OUTPUTS: dict[str, list[dict[str, Any]]] = {
    "layers": [{"op": "insert_layers", "where": {"after": [1, 3]}, "init": {"kind": "copy"}}],
    "adapters": [_ADAPTERS],
    "slots": [_SLOTS],
    "control": [_CONTROL],
    "states": [_STATES],
    "gate": [_ADAPTERS, _GATE],
    "all": [_CONTROL, _ADAPTERS, _SLOTS, _STATES, _GATE],
}


class Output(Tried):
    """An output that steps are tried on; made where WORK does not have it."""

    def __init__(self, work: Path, name: str) -> None:
        self.native, self.base, self.folder = name == "layers", work / "base", work / name
        self.prompts = [prompt for prompt in prompts() if len(prompt) <= 64]
        if not self.base.exists():
            family, own = BASES["llama"]
            tiny.checkpoint(self.base, family, dtype="float32", shard="300KB", **{**WIDE, **own})
            tokenizer(self.base)
        if not self.folder.exists():
            plan = work / f"{name}.yaml"
            plan.write_text(json.dumps({"surgeon": 1, "operations": OUTPUTS[name]}), encoding="utf-8")
            surgeon.apply(str(plan), str(self.base), self.folder)
            if not self.native:
                trained(self.folder, seed=1)


def trainer(tried: Tried) -> str:
    """transformers' own, all parameters, 20 steps with accumulation and checkpointing of gradients."""
    import transformers

    model = tried.load()
    ids = [prompt + prompt for prompt in tried.prompts if len(prompt) > 2]
    texts = [{"input_ids": each, "labels": each, "attention_mask": [1] * len(each)} for each in ids]
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder,
            max_steps=20,
            learning_rate=3e-3,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        made = transformers.Trainer(model, settings, train_dataset=texts)
        made.train()
        losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder).float().eval()
        return f"loss {losses[0]:.2f} to {losses[-1]:.2f}; saved and loaded: {difference(again, model.eval(), tried)}"


def offloaded(tried: Tried) -> str:
    """Every weight and buffer on disk, by accelerate."""
    from accelerate import disk_offload

    model, plain = tried.load(), tried.load()
    with tempfile.TemporaryDirectory() as folder:
        return difference(disk_offload(model, folder, torch.device("cpu"), offload_buffers=True), plain, tried)


def compiled(tried: Tried) -> str:
    """One graph (`fullgraph`), by aot_eager."""
    return difference(torch.compile(tried.load(), fullgraph=True, backend="aot_eager"), tried.load(), tried)


# By name: the step, the package that it shows.
STEPS: dict[str, tuple[Callable[[Tried], str], str]] = {
    "Trainer": (trainer, "transformers"),
    "compiled as one graph": (compiled, "torch"),
    "offloaded to disk": (offloaded, "accelerate"),
    **{
        name: other.WAYS[name]
        for name in (
            "pipeline",
            "a batch padded on the left",
            "beams",
            "static cache, compiled",
            "assisted by the base",
            "prompt lookup",
            "prefill in pieces",
            "continuous batching",
            "PEFT LoRA over it",
            "TRL SFTTrainer",
            "torch.export",
            "ONNX",
            "quanto int8",
            "bitsandbytes 8 bits",
            "torchao int8",
        )
    },
}


def table(rows: dict[str, dict[str, str]]) -> str:
    """The page."""
    lines = [
        "# Grafts and steps",
        "",
        "`python -m benchmarks.engines.steps WORK`, with transformers"
        f" {version('transformers')} and torch {version('torch')} on a CPU, tiny random llamas in float32, new tensors"
        " moved away from their birth. States choose by `prefix_mean`; the gate switches adapters.",
        "",
        "| step | version | " + " | ".join(OUTPUTS) + " |",
        "|---" * (len(OUTPUTS) + 2) + "|",
    ]
    for step, found in rows.items():
        package = STEPS[step][1]
        lines.append(f"| {step} | {package} {installed(package)} | " + " | ".join(found.values()) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="*", default=list(STEPS), choices=list(STEPS))
    chosen = parser.parse_args(arguments)
    chosen.work.mkdir(parents=True, exist_ok=True)
    kept = chosen.work / "steps.json"
    rows: dict[str, dict[str, str]] = json.loads(kept.read_text()) if kept.exists() else {}
    for step in chosen.only:
        rows[step] = {name: outcome(STEPS[step][0], Output(chosen.work, name)) for name in OUTPUTS}
        print(step, rows[step], flush=True)
        kept.write_text(json.dumps(rows, indent=1))
    RESULT.write_text(table({step: rows[step] for step in STEPS if step in rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
