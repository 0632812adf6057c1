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
from tests.checkpoints import weights
from tests.elsewhere import WITHOUT_SURGEON, run_elsewhere
from tests.training.texts import add_tokenizer, text

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
# Everything that a gate can switch.
GATED: list[dict[str, Any]] = [
    {"op": "insert_layers", "where": {"after": [1]}, "init": {"kind": "copy"}},
    {"op": "control_llm", "layers": [3], "interpolator": {"kind": "dlerp", "learnable": True}},
    {"op": "gated_adapters", "layers": [1, 4], "size": 12, "gate": "sigmoid"},
    {"op": "pmoe_experts", "slots": 2, "threshold": 2},
    {"op": "mixture_of_control", "rank": 4},
    {"op": "domain_gate", "units": 8},
]
# What the loss in training holds besides the task's.
AUXILIARY = {
    "gated_adapters": {"local_l1_loss"},
    "control_llm": {"divergence_loss"},
    "insert_layers": set(),
    "pmoe_experts": {"router_loss"},
    "mixture_of_control": {"balance_loss"},
}

# As docs/how-to/training.md says: a grafted model knows what is new, a native one's surgery.json does.
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

OTHERS = (
    COMMON
    + """
import hashlib, os
from datetime import timedelta

import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

def rank_of_two(model, number, folder):
    store = "file://" + os.path.join(folder, "store")
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=2, timeout=timedelta(minutes=10))
    model.requires_grad_(True).train()
    wrapped = DistributedDataParallel(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        ids = rows(10 * step + number)
        wrapped(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    still = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    held = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()
    (Path(folder) / f"rank{number}.json").write_text(json.dumps({"still": still, "held": held}))
    dist.barrier()

def by_two_processes(out, saved):
    # Every process has the model already: to import all this again would take longer than the training.
    model, started = load(out, "float32"), []
    for number in (0, 1):
        pid = os.fork()
        if not pid:
            try:
                rank_of_two(model, number, saved)
                os._exit(0)
            finally:
                os._exit(1)
        started.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    told = [json.loads((Path(saved) / f"rank{number}.json").read_text()) for number in (0, 1) if not any(codes)]
    return {"codes": codes, "ranks": told}

def run(out, saved, how):
    if how == "ddp":
        os.mkdir(saved)
        return by_two_processes(out, saved)
    model = load(out, "float32")
    new = freeze(model, out)
    if how == "trainer":
        args = TrainingArguments(
            output_dir=saved + "-run", max_steps=20, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True,
            gradient_checkpointing=True, save_strategy="no", report_to="none", disable_tqdm=True,
            eval_strategy="steps", eval_steps=20,
        )
        texts = [{"input_ids": ids, "labels": ids} for seed in range(20) for ids in rows(seed)]
        trainer = Trainer(model=model, args=args, train_dataset=texts, eval_dataset=texts[:4])
        trainer.train()
        evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        model.eval()
        with torch.inference_mode():
            own = float(model(input_ids=rows(0), labels=rows(0)).loss)
        return {"new": new, "evaluated": evaluated, "own": own, "same": round_trip(model, saved)}
    accelerator = Accelerator(cpu=True)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    wrapped, optimiser = accelerator.prepare(model.train(), optimiser)
    for step in range(20):
        accelerator.backward(wrapped(input_ids=rows(step), labels=rows(step)).loss)
        optimiser.step()
        optimiser.zero_grad()
    return {"new": new, "same": round_trip(accelerator.unwrap_model(wrapped), saved)}

import contextlib
with contextlib.redirect_stdout(sys.stderr):
    told = [run(*job) for job in json.loads(sys.argv[1])]
json.dump(told, sys.stdout)
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
        **common, max_steps=20 if trainer_class == "plain" else 15, gradient_accumulation_steps=2,
        remove_unused_columns=trainer_class == "plain" or not grafted,
    )
    trainer = (ModelsOwnLoss if trainer_class == "own" else SFTTrainer)(
        model=model, args=args, train_dataset=texts, processing_class=tokenizer,
        data_collator=WithDomains(pad_token_id=tokenizer.pad_token_id) if not args.remove_unused_columns else None,
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
    operations = GATED if name == "gated" else [PLANS[name]]
    plan.write_text(json.dumps({"surgeon": 1, "operations": operations}), encoding="utf-8")
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


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A gated output in loops that know nothing of domains, all in one process, but for the two of DDP."""
    jobs = [("gated", how) for how in ("ddp", "trainer", "accelerate")]
    return train_all(tmp_path_factory.mktemp("gated"), OTHERS, jobs)


@pytest.mark.parametrize("how", ["trainer", "accelerate"])
def test_a_gate_opens_where_nobody_says_what_is_new(how: str, opened: Trained) -> None:
    """transformers' Trainer, with checkpointing, and accelerate: 20 steps teach everything that the gate switches."""
    told, out, saved, new = opened["gated", how]
    check_gated(out, saved, new, told["new"], torch.float32)
    assert told["same"]
    if how == "trainer":
        # It evaluates as the model then answers: a gate that nobody fitted is closed.
        assert told["evaluated"] == pytest.approx([told["own"]], abs=1e-4)


def test_two_processes_train_a_gated_output_whole(opened: Trained) -> None:
    """DDP, everything unfrozen: it waits for no gradient of the gate, which has none."""
    told = opened["gated", "ddp"][0]
    assert told["codes"] == [0, 0]
    assert [rank["still"] for rank in told["ranks"]] == [[], []]
    assert told["ranks"][0]["held"] == told["ranks"][1]["held"]


TRL_JOBS = [
    *(("gated_adapters", "own"), ("control_llm", "own"), ("insert_layers", "trl"), ("gated_adapters", "trl")),
    *(("insert_layers", "dpo"), ("gated_adapters", "dpo"), ("gated", "plain")),
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
    """bf16, checkpointing (TRL's default) and accumulation; the trainer of the docs where losses are added."""
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


def check_gated(out: Path, saved: Path, new: set[str], trained: list[str], dtype: torch.dtype) -> None:
    """All that a gate switches has moved, the gate and the base are what they were, under their names."""
    fitted = {name for name in new if ".domain_gate." in name}
    assert len(fitted) == 7 and set(trained) == new - fitted
    check_saved(out, saved, new - fitted, dtype)


@needs_trl
@pytest.mark.slow
def test_trl_opens_a_gate(by_trl: Trained) -> None:
    """As it is, and nobody says which text is new: 20 steps teach everything that the gate switches."""
    told, out, saved, new = by_trl["gated", "plain"]
    check_gated(out, saved, new, told["new"], torch.bfloat16)
    assert told["same"]


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
