"""Outputs train in other people's loops, in a process that cannot import surgeon: plain PyTorch and TRL."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from tests import tiny
from tests.end_to_end.conftest import WITHOUT_SURGEON, run_elsewhere, weights
from tests.train.texts import add_tokenizer, text

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")

PLANS: dict[str, dict[str, Any]] = {
    "gated_adapters": {
        "op": "gated_adapters",
        "layers": "all",
        "size": 12,
        "local_loss": {"kind": "l1", "weight": 1.0},
    },
    "control_llm": {"op": "control_llm", "layers": {"every": 2}, "interpolator": {"kind": "dlerp", "learnable": True}},
    "insert_layers": {"op": "insert_layers", "where": {"after": [0, 2]}, "init": {"kind": "average"}},
    "pmoe_experts": {"op": "pmoe_experts", "slots": 2, "router_loss": {"kind": "task_id", "weight": 0.5}},
    "mixture_of_control": {"op": "mixture_of_control", "rank": 4},
}
# What the loss in training holds besides the task's.
AUXILIARY = {
    "gated_adapters": {"local_l1_loss"},
    "control_llm": {"divergence_loss"},
    "insert_layers": set(),
    "pmoe_experts": {"router_loss"},
    "mixture_of_control": {"balance_loss"},
}

# As docs/training.md tells it: a grafted model knows what is new, a native one's surgery.json does.
COMMON = (
    WITHOUT_SURGEON
    + """
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM

def load(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype)

def freeze(model, out):
    if hasattr(model, "freeze_base"):
        return model.freeze_base()
    new = json.loads((Path(out) / "surgery.json").read_text())["new_tensors"]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in new)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]

def rows(seed):
    made = torch.Generator().manual_seed(seed)
    begin = torch.randint(0, 50, (4, 1), generator=made)
    return 10 + (begin + torch.arange(16)) % 50

def held_out(model):
    training = model.training
    with torch.inference_mode():
        loss = float(model.eval()(input_ids=rows(-1), labels=rows(-1)).loss)
    model.train(training)
    return loss

def round_trip(model, saved):
    model.eval().save_pretrained(saved)
    again = load(saved, "auto").eval()
    for parameter in again.parameters():
        # A matrix product rounds by where its operands begin, which in a mapped file is anywhere.
        parameter.data = parameter.data.clone()
    with torch.inference_mode():
        return bool(torch.equal(model(rows(-1)).logits, again(rows(-1)).logits))

def auxiliary_losses(result):
    return {key: float(value) for key, value in result.items() if key.endswith("_loss") and value is not None}
"""
)

LOOP = (
    COMMON
    + """
def run(out, saved, dtype):
    model = load(out, dtype)
    new = freeze(model, out)
    if dtype == "bfloat16":
        # What a PEFT user does before training in little memory.
        model.config.use_cache = False
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    before = held_out(model)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    model.train()
    domains = {"domain_ids": torch.tensor([0, 1, 1, 2])} if hasattr(model, "freeze_base") else {}
    for step in range(15):
        ids = rows(step)
        result = model(input_ids=ids, labels=ids, **domains)
        result.loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    told = {"new": new, "class": type(model).__name__, "auxiliary": auxiliary_losses(result)}
    return told | {"before": before, "after": held_out(model), "same": round_trip(model, saved)}

json.dump([run(*job) for job in json.loads(sys.argv[1])], sys.stdout)
"""
)

TRL = (
    COMMON
    + """
import contextlib, logging

from datasets import Dataset
from transformers import AutoTokenizer
from transformers.utils.logging import warning_once
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

preferences = Dataset.from_list(
    [{"prompt": f"w{n} w{n + 1}", "chosen": " w60 w61", "rejected": " w70 w71"} for n in range(32)]
)
texts = Dataset.from_list(json.loads(Path(sys.argv[2]).read_text()))
heard = []

class Listener(logging.Handler):
    def emit(self, record):
        heard.append(record.getMessage())

logging.getLogger().addHandler(Listener(logging.WARNING))

class WithDomains(DataCollatorForLanguageModeling):
    def torch_call(self, examples):
        domains = torch.tensor([example["domain_ids"] for example in examples])
        return super().torch_call(examples) | {"domain_ids": domains}

class ModelsOwnLoss(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super(SFTTrainer, self).compute_loss(model, inputs, return_outputs, num_items_in_batch)

def run(out, saved, trainer_class):
    heard.clear()
    warning_once.cache_clear()
    model = load(out, "bfloat16")
    new = freeze(model, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    grafted = hasattr(model, "freeze_base")
    common = dict(
        output_dir=saved + "-trl", per_device_train_batch_size=4, learning_rate=1e-2, bf16=True, use_cpu=True,
        max_length=24, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )
    if trainer_class == "dpo":
        # Born identical, the output is its own reference: a second copy, or the base.
        trainer = DPOTrainer(
            model=model, ref_model=load(out, "bfloat16"), args=DPOConfig(**common, max_steps=10),
            train_dataset=preferences, processing_class=tokenizer,
        )
        trainer.train()
        margins = [entry["rewards/margins"] for entry in trainer.state.log_history if "rewards/margins" in entry]
        return {"new": new, "margins": margins, "same": round_trip(model, saved)}
    args = SFTConfig(
        **common, max_steps=15, gradient_accumulation_steps=2, remove_unused_columns=not grafted,
    )
    trainer = {"own": ModelsOwnLoss, "trl": SFTTrainer}[trainer_class](
        model=model, args=args, train_dataset=texts, processing_class=tokenizer,
        data_collator=WithDomains(pad_token_id=tokenizer.pad_token_id) if grafted else None,
    )
    before = held_out(model)
    trainer.train()
    told = {"new": new, "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
    told["heard"] = [message for message in heard if "losses" in message]
    if grafted:
        ids = rows(-1)
        result = model.train()(input_ids=ids, labels=ids, domain_ids=torch.zeros(4, dtype=torch.long))
        told["auxiliary"] = auxiliary_losses(result)
    return told | {"before": before, "after": held_out(model), "same": round_trip(model, saved)}

with contextlib.redirect_stdout(sys.stderr):
    told = [run(*job) for job in json.loads(sys.argv[1])]
json.dump(told, sys.stdout)
"""
)


def grown(folder: Path, name: str) -> tuple[Path, set[str]]:
    """An output with a tokenizer, and the names of what its surgery added."""
    base = add_tokenizer(tiny.checkpoint(folder / "base", "llama", num_hidden_layers=4))
    plan = folder / "plan.yaml"
    plan.write_text(json.dumps({"surgeon": 1, "operations": [PLANS[name]]}), encoding="utf-8")
    applied = surgeon.apply(plan, str(base), folder / "out")
    return folder / "out", set(applied.manifest.new_tensors)


# By plan and how it was trained: what the process told, the output, what was saved, names of what is new.
Trained = dict[tuple[str, str], tuple[dict[str, Any], Path, Path, set[str]]]


def train_all(folder: Path, script: str, jobs: list[tuple[str, str]], *more: str) -> Trained:
    """Run the jobs (plan, argument) in one process that cannot import surgeon."""
    outs: dict[str, tuple[Path, set[str]]] = {}
    for name, _ in jobs:
        if name not in outs:
            outs[name] = grown(folder / name, name)
    saved = [folder / name / f"saved-{how}" for name, how in jobs]
    given = [(str(outs[name][0]), str(to), how) for (name, how), to in zip(jobs, saved, strict=True)]
    told = run_elsewhere(script, json.dumps(given), *more, cache=folder)
    return {
        job: (each, *outs[job[0]][:1], to, outs[job[0]][1]) for job, each, to in zip(jobs, told, saved, strict=True)
    }


def check_saved(out: Path, saved: Path, new: set[str], dtype: torch.dtype) -> None:
    """Every new tensor has moved, and every other has the bytes it had."""
    before, after = weights(out), weights(saved)
    assert before.keys() == after.keys()
    assert {value.dtype for value in after.values()} == {dtype}
    moved = {name for name, value in before.items() if not torch.equal(value.to(dtype), after[name])}
    assert moved == new
    for name in before.keys() - new:
        assert after[name].to(before[name].dtype).view(torch.uint8).equal(before[name].view(torch.uint8)), name


LOOP_JOBS = [(name, "bfloat16") for name in PLANS] + [("gated_adapters", "float32"), ("insert_layers", "float32")]


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Every plan trained in a plain loop, all in one process: to start one costs more than the training."""
    return train_all(tmp_path_factory.mktemp("loops"), LOOP, LOOP_JOBS)


@pytest.mark.parametrize("name, dtype", LOOP_JOBS)
def test_a_plain_loop(name: str, dtype: str, looped: Trained) -> None:
    """In bfloat16 with gradient checkpointing, use_cache off and gradients at the embeddings' output."""
    told, out, saved, new = looped[name, dtype]
    assert set(told["new"]) == new
    assert told["class"] == ("LlamaForCausalLM" if name == "insert_layers" else "UpcycledLlamaForCausalLM")
    assert told["same"]
    assert told["after"] < told["before"] - 0.15
    assert told["auxiliary"].keys() == AUXILIARY[name]
    check_saved(out, saved, new, getattr(torch, dtype))


TRL_JOBS = [
    *(("gated_adapters", "own"), ("control_llm", "own"), ("insert_layers", "trl"), ("gated_adapters", "trl")),
    *(("insert_layers", "dpo"), ("gated_adapters", "dpo")),
]


@pytest.fixture(scope="module")
def by_trl(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trained by TRL's SFTTrainer as it is (`trl`), or with the model's own loss (`own`), on texts of two domains."""
    folder = tmp_path_factory.mktemp("trl")
    texts = [{"text": text(20, seed, count=50), "domain_ids": seed % 2} for seed in range(32)]
    (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    return train_all(folder, TRL, TRL_JOBS, str(folder / "texts.json"))


@needs_trl
@pytest.mark.slow
@pytest.mark.parametrize("name, trainer", TRL_JOBS[:3])
def test_trls_trainer(name: str, trainer: str, by_trl: Trained) -> None:
    """bf16, checkpointing (TRL's default) and accumulation; the trainer of docs/training.md where losses are added."""
    told, out, saved, new = by_trl[name, trainer]
    assert set(told["new"]) == new
    assert told["same"]
    assert len(told["losses"]) == 15
    assert told["after"] < told["before"] - 0.15
    assert not told["heard"]
    check_saved(out, saved, new, torch.bfloat16)


@needs_trl
@pytest.mark.slow
def test_trl_as_it_is_drops_the_auxiliary_losses_and_the_model_says_so(by_trl: Trained) -> None:
    """It asks the base model alone, to spare the logits. With the model's own loss ℓ1 holds the adapters down."""
    told, out, saved, new = by_trl["gated_adapters", "trl"]
    check_saved(out, saved, new, torch.bfloat16)
    assert len(told["heard"]) == 1
    assert "auxiliary losses have no part in this training" in told["heard"][0]
    own = by_trl["gated_adapters", "own"][0]["auxiliary"]["local_l1_loss"]
    assert 0 < own < 0.8 * told["auxiliary"]["local_l1_loss"]


@needs_trl
@pytest.mark.slow
@pytest.mark.parametrize("name", ["insert_layers", "gated_adapters"])
def test_trls_preferences(name: str, by_trl: Trained) -> None:
    """DPO: the chosen answers gain on the rejected ones, from the reference's own difference, by what is new alone."""
    told, out, saved, new = by_trl[name, "dpo"]
    assert set(told["new"]) == new
    assert told["same"]
    assert abs(told["margins"][0]) < 0.01
    assert min(told["margins"][-3:]) > 0.03
    check_saved(out, saved, new, torch.bfloat16)
