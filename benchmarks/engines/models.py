"""Tiny outputs of every kind for the engines to run, beside what transformers makes of them.

    python -m benchmarks.engines.models WORK [--only llama …]

WORK gets `bases/NAME` and `outputs/NAME`: random bases wide enough for the engines' kernels, and plans applied to them,
every new tensor of an output moved away from its birth as training would. `cases.json` lists the outputs with the base
each was made of; `prompts.json` holds token ids of prompts of many lengths; `expected/NAME.json` is what transformers
computes of each, one prompt at a time in float32: the log-probability of every next token of a prompt, and 16 greedy
tokens with theirs.

It runs where surgeon is installed. The other scripts read WORK and run where an engine is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import surgeon
from tests import tiny

# Heads of 32: vLLM's attention on CPUs has no smaller ones.
WIDE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "max_position_embeddings": 512,
}
WINDOWED = {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", {**WINDOWED, "num_hidden_layers": 8}),
    "gemma3_text": ("gemma3_text", {**WINDOWED, "num_hidden_layers": 12}),
    # Of the depth of Gemma 3 27B, by which llama.cpp chooses how it scales queries.
    "gemma3_62": ("gemma3_text", {**WINDOWED, "head_dim": 64, "num_hidden_layers": 62}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    # No family of its own in surgeon: what a derived model type gets.
    "glm4": ("glm4", {"head_dim": 32}),
}
GREEDY = 16
# They keep something of a sequence in transformers' cache, which other engines do not have.
_BY_SEQUENCE = ("prefix_mean", "domain_gate")


def _control(kind: str) -> dict[str, Any]:
    # By another share two equal branches of `moe` do not sum to the same in bfloat16.
    alpha = 0.5 if kind == "moe" else 0.3
    return {"op": "control_llm", "layers": [1, 4], "interpolator": {"kind": kind, "alpha": alpha}}


def _mixture(**more: Any) -> dict[str, Any]:
    return {"op": "mixture_of_control", "rank": 4, "routing": {"inference": "token"}, **more}


_INSERTED = {"op": "insert_layers", "where": {"after": [1, 3]}, "init": {"kind": "copy"}}
_PERIODS = {"op": "insert_layers", "where": {"every_period": 1}, "init": {"kind": "copy"}}
_ADAPTERS = {"op": "gated_adapters", "size": 32}
_SLOTS = {"op": "pmoe_experts", "slots": 2, "threshold": 2}
_EVERY_TARGET = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_ALL = [_control("dlerp"), _ADAPTERS, _SLOTS, {"op": "pmoe_experts", "rank": 3}, _mixture(top_k=2)]

# The other operations with native outputs, by what their rows are called.
_NATIVE: dict[str, list[dict[str, Any]]] = {
    "stack_layers": [{"op": "stack_layers", "bottom": 0.75, "top": 0.75}],
    "drop_layers": [{"op": "drop_layers", "layers": [4]}],
    "widen_ffn": [{"op": "widen_ffn", "by": 64}],
    "widen_attention": [{"op": "widen_attention", "groups": "double"}],
    "widen_hidden": [{"op": "widen_hidden", "times": 2}],
    "grow_vocabulary": [{"op": "grow_vocabulary", "tokens": [" hérisson", "châtaigne"], "pad_to_multiple_of": 64}],
    "fold_adapters": [{**_ADAPTERS, "gate": "none"}, {"op": "fold_adapters"}],
    "merge_branches": [_control("lerp"), {"op": "merge_branches"}],
    "control_llm as a stack": [{"op": "control_llm", "expansion": "stack", "layers": [1, 4]}],
}
_COPIES = {"op": "upcycle_experts", "form": "copies", "experts": 4}
_BESIDE = [{"op": "upcycle_experts", "form": "shared", "experts": 4}]
# They fold what another plan brought.
_FOLD = ("fold_adapters", "merge_branches")

# By name: the base, the operations, whether only the base's own class is needed (native).
OUTPUTS: dict[str, tuple[str, list[dict[str, Any]], bool]] = {
    **{f"{base} + layers": (base, [_INSERTED], True) for base in BASES if base not in ("gemma3_62", "glm4")},
    "gemma3_62 + periods": ("gemma3_62", [_PERIODS], True),
    "gemma2 + periods": ("gemma2", [_PERIODS], True),
    "gemma3_text + periods": ("gemma3_text", [_PERIODS], True),
    "llama upcycled to mixtral": ("llama", [_COPIES], True),
    "qwen3 upcycled to qwen3_moe": ("qwen3", [_COPIES], True),
    "olmo2 upcycled to flex_olmo": ("olmo2", [_COPIES], True),
    "llama upcycled to glm4_moe": ("llama", _BESIDE, True),
    **{f"llama, {what}": ("llama", operations, True) for what, operations in _NATIVE.items()},
    **{f"{base}, upcycle_experts beside": (base, _BESIDE, False) for base in ("gemma", "gemma2", "glm4", "olmo2")},
    "gemma, upcycle_experts beside, top 1": ("gemma", [{**_BESIDE[0], "top_k": 1}], False),
    **{f"llama, control_llm {kind}": ("llama", [_control(kind)], False) for kind in ("lerp", "dlerp", "moe", "slerp")},
    "llama, gated_adapters": ("llama", [_ADAPTERS], False),
    "llama, gated_adapters sigmoid": ("llama", [{**_ADAPTERS, "gate": "sigmoid"}], False),
    "llama, pmoe_experts": ("llama", [_SLOTS], False),
    "llama, pmoe_experts everywhere": ("llama", [{**_SLOTS, "targets": _EVERY_TARGET}], False),
    "llama, an adapter of two layers": ("llama", [{"op": "pmoe_experts", "from_peft": "adapter"}], False),
    "llama, mixture_of_control by token": ("llama", [_mixture(top_k=2)], False),
    "llama, Parallel Control": ("llama", [{"op": "mixture_of_control", "rank": 4, "top_k": 0}], False),
    "llama, mixture_of_control prefix_mean": ("llama", [{"op": "mixture_of_control", "rank": 4}], False),
    "llama, domain_gate": ("llama", [_ADAPTERS, {"op": "domain_gate"}], False),
    **{f"{base}, all": (base, _ALL, False) for base in BASES if base != "gemma3_62"},
    "qwen3 upcycled to qwen3_moe, all": ("qwen3", [_COPIES, *_ALL], False),
    "gemma2, all and experts": ("gemma2", [*_BESIDE, *_ALL], False),
}


def name_of(title: str) -> str:
    """A folder's name for a title."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", title)


def trained(folder: Path, seed: int, amount: float = 0.05) -> None:
    """Move every new tensor of an output away from its birth."""
    manifest = surgeon.inspect(folder).manifest
    assert manifest is not None
    new = set(manifest.new_tensors)
    generator = torch.Generator().manual_seed(seed)
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        for name in sorted(new & set(tensors)):
            value = tensors[name]
            tensors[name] = (value + amount * torch.randn(value.shape, generator=generator)).to(value.dtype)
        save_file(tensors, shard, metadata={"format": "pt"})


def tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 512 tokens, so that engines that want text can be given some."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WIDE["vocab_size"],
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = (Path(surgeon.__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    made.train_from_iterator([text], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def adapter(base: Path, to: Path) -> None:
    """A LoRA of two layers, in PEFT's format."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[2, 3], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(to)


def prompts() -> list[list[int]]:
    """Token ids of prompts of 2 to 180 tokens; three share their first 96."""
    generator = torch.Generator().manual_seed(7)

    def some(count: int) -> list[int]:
        drawn: list[int] = torch.randint(3, WIDE["vocab_size"], (count,), generator=generator).tolist()
        return drawn

    shared = some(96)
    return [some(count) for count in (2, 3, 7, 19, 40, 64, 130, 180)] + [shared + some(count) for count in (1, 20, 60)]


@torch.no_grad()
def expected(folder: Path, given: list[list[int]]) -> list[dict[str, Any]]:
    """What transformers computes, prompt by prompt: log-probabilities of the prompt's tokens, and greedy tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
    found = []
    for prompt in given:
        ids = torch.tensor([prompt])
        asked = {"max_new_tokens": GREEDY, "min_new_tokens": GREEDY, "do_sample": False, "eos_token_id": None}
        # A chat may have the padding token in it, which a mask that is guessed leaves out.
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        logs = torch.log_softmax(model(made).logits.double(), -1)[0, :-1]
        chosen = logs.gather(-1, made[0, 1:, None])[:, 0]
        cut = len(prompt) - 1
        # How far the runner-up is behind: where it is as near as rounding, engines may choose either.
        best = logs[cut:].topk(2).values
        found.append(
            {
                "prompt": chosen[:cut].tolist(),
                "tokens": made[0, len(prompt) :].tolist(),
                "greedy": chosen[cut:].tolist(),
                "margin": float((best[:, 0] - best[:, 1]).min()),
            }
        )
    return found


def plans(operations: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The operations of a plan to apply first, if any, and those of the one to apply to its output, trained."""
    if operations[-1]["op"] in _FOLD:
        return operations[:-1], operations[-1:]
    # What makes a model of another class stands in a plan of its own.
    cut = 1 if operations[0] == _COPIES and len(operations) > 1 else 0
    return operations[:cut], operations[cut:]


def written(work: Path, title: str, operations: list[dict[str, Any]]) -> Path:
    """A plan's file."""
    plan = work / f"{name_of(title)}.yaml"
    plan.write_text(json.dumps({"surgeon": 1, "operations": operations}))
    return plan


def make(work: Path, only: list[str]) -> None:
    """Fill WORK."""
    given = prompts()
    for folder in ("bases", "outputs", "expected"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    (work / "prompts.json").write_text(json.dumps(given))
    cases: dict[str, dict[str, Any]] = {}
    for title, (base, operations, native) in OUTPUTS.items():
        if only and base not in only:
            continue
        source, out = work / "bases" / base, work / "outputs" / name_of(title)
        if not source.exists():
            family, own = BASES[base]
            tiny.checkpoint(source, family, dtype="float32", shard="300KB", **{**WIDE, **own})
            tokenizer(source)
            (work / "expected" / f"{base}.json").write_text(json.dumps(expected(source, given)))
            if base == "llama":
                adapter(source, work / "adapter")
        if not out.exists():
            before, last = plans(operations)
            if before:
                source = work / f"{name_of(title)}-before"
                surgeon.apply(written(work, f"{title} before", before), str(work / "bases" / base), source)
                trained(source, seed=1)
            surgeon.apply(written(work, title, last), str(source), out)
            if not native:
                trained(out, seed=1)
            (work / "expected" / f"{out.name}.json").write_text(json.dumps(expected(out, given)))
        cases[title] = {
            "base": base,
            "folder": out.name,
            "native": native,
            "operations": [operation["op"] for operation in operations],
            "by_sequence": title.endswith(_BY_SEQUENCE),
        }
        print(title, flush=True)
    (work / "cases.json").write_text(json.dumps(cases, indent=1))


def main(arguments: list[str]) -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.models", description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="bases to make outputs of; all by default")
    chosen = parser.parse_args(arguments)
    make(chosen.work, chosen.only)


if __name__ == "__main__":
    main(sys.argv[1:])
