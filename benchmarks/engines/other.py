"""Other ways to run outputs, each tried: generation of every kind, quantisers, exports, merges, adapters, lm-eval.

    python -m benchmarks.engines.models WORK
    python -m benchmarks.engines.other WORK [--only WAY …]

Each way is tried on a native output, on one with every graft (control states by token) and on one with control states
by the mean over a prefix, beside the same model run plainly: what it computes otherwise, or the line by which it does
not run. A way whose package is missing says so. It runs where surgeon and the packages are installed; the table, with
versions, goes to benchmarks/results/engines_other.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULT = Path(__file__).resolve().parents[1] / "results" / "engines_other.md"
OUTPUTS = {
    "native": "llama + layers",
    "grafts": "llama, all",
    "prefix_mean": "llama, mixture_of_control prefix_mean",
}
NEW = 12
# Seconds after which a way has failed.
PATIENCE = 300


class Tried:
    """An output that ways are tried on."""

    def __init__(self, work: Path, title: str) -> None:
        cases = json.loads((work / "cases.json").read_text())
        self.native = cases[title]["native"]
        self.folder, self.base = work / "outputs" / cases[title]["folder"], work / "bases" / cases[title]["base"]
        self.prompts = [prompt for prompt in json.loads((work / "prompts.json").read_text()) if len(prompt) <= 64]

    def load(self, **more: Any) -> Any:
        """The model, in float32."""
        from transformers import AutoModelForCausalLM

        given = {"dtype": torch.float32, "trust_remote_code": True} | more
        return AutoModelForCausalLM.from_pretrained(self.folder, **given).eval()

    def greedy(self, model: Any, prompt: list[int], **more: Any) -> list[int]:
        """Tokens that `generate` adds to a prompt."""
        ids = torch.tensor([prompt])
        how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
        made: list[int] = model.generate(ids, **{**how, **more})[0, len(prompt) :].tolist()
        return made


@torch.no_grad()
def difference(one: Any, other: Any, tried: Tried) -> str:
    """The largest difference of a logit, beside the largest logit."""
    ids = torch.tensor([tried.prompts[-1]])
    right = other(ids).logits
    return f"Δ logit {float((one(ids).logits - right).abs().max()):.1e} of {float(right.abs().max()):.1f}"


def same(found: list[list[int]], right: list[list[int]]) -> str:
    """How many of the sequences are the same."""
    return f"{sum(a == b for a, b in zip(found, right, strict=True))} of {len(right)} sequences the same"


def continuous_batching(tried: Tried) -> str:
    """transformers' own, beside prompt after prompt."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = tried.load()
    right = [tried.greedy(model, prompt) for prompt in tried.prompts]
    how = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Of its own accord it takes most of the memory for its cache.
    few = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    found = model.generate_batch(
        inputs=tried.prompts, generation_config=how, continuous_batching_config=few, progress_bar=False
    )
    errors = [one.error for one in found.values() if one.error]
    if errors:
        raise RuntimeError(errors[0])
    return same([one.generated_tokens for one in found.values()], right)


def static_cache_compiled(tried: Tried) -> str:
    """A static cache and a compiled forward (aot_eager), beside a dynamic cache and none."""
    model = tried.load()
    right = [tried.greedy(model, prompt) for prompt in tried.prompts[:3]]
    model.forward = torch.compile(model.forward, backend="aot_eager")
    return same([tried.greedy(model, prompt, cache_implementation="static") for prompt in tried.prompts[:3]], right)


def assisted(tried: Tried) -> str:
    """The base as draft model."""
    from transformers import AutoModelForCausalLM

    model = tried.load()
    draft = AutoModelForCausalLM.from_pretrained(tried.base, dtype=torch.float32).eval()
    right = [tried.greedy(model, prompt) for prompt in tried.prompts]
    return same([tried.greedy(model, prompt, assistant_model=draft) for prompt in tried.prompts], right)


def prompt_lookup(tried: Tried) -> str:
    """Drafts out of the prompt."""
    model = tried.load()
    right = [tried.greedy(model, prompt) for prompt in tried.prompts]
    return same([tried.greedy(model, prompt, prompt_lookup_num_tokens=4) for prompt in tried.prompts], right)


def beams(tried: Tried) -> str:
    """Three beams with a cache, beside three beams without."""
    model = tried.load()
    right = [tried.greedy(model, prompt, num_beams=3, use_cache=False) for prompt in tried.prompts]
    return same([tried.greedy(model, prompt, num_beams=3) for prompt in tried.prompts], right)


def pipeline(tried: Tried) -> str:
    """`pipeline("text-generation")`, texts in a batch."""
    from transformers import pipeline as make

    made = make("text-generation", str(tried.folder), trust_remote_code=True, dtype=torch.float32, batch_size=2)
    made.tokenizer.padding_side = "left"
    texts = ["surgeon grows a model", "a plan and a base become a checkpoint that loads as it is"]
    how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "return_full_text": False}
    found = [one[0]["generated_text"] for one in made(texts, **how)]
    alone = [made(text, **how)[0]["generated_text"] for text in texts]
    return same([list(text.encode()) for text in found], [list(text.encode()) for text in alone])


def padded_batch(tried: Tried) -> str:
    """Prompts of many lengths in one batch, padded on the left, beside prompt after prompt."""
    model = tried.load()
    right = [tried.greedy(model, prompt) for prompt in tried.prompts]
    longest = max(map(len, tried.prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in tried.prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in tried.prompts])
    how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    made = model.generate(ids, attention_mask=mask, **how)
    return same(made[:, longest:].tolist(), right)


def prefill_in_pieces(tried: Tried) -> str:
    """Prompts go in by 8 tokens at a time (`prefill_chunk_size`), beside prompts in one go."""
    model = tried.load()
    right = [tried.greedy(model, prompt) for prompt in tried.prompts]
    return same([tried.greedy(model, prompt, prefill_chunk_size=8) for prompt in tried.prompts], right)


def sampled(tried: Tried) -> str:
    """Drawn tokens with a cache, beside those of the same seed without one."""
    model = tried.load()

    def drawn(prompt: list[int], **more: Any) -> list[int]:
        torch.manual_seed(0)
        return tried.greedy(model, prompt, do_sample=True, top_k=50, **more)

    right = [drawn(prompt, use_cache=False) for prompt in tried.prompts]
    return same([drawn(prompt) for prompt in tried.prompts], right)


def guided(tried: Tried) -> str:
    """Classifier-free guidance (`guidance_scale`): with a cache, beside without one."""
    model = tried.load()
    right = [tried.greedy(model, prompt, guidance_scale=1.5, use_cache=False) for prompt in tried.prompts]
    return same([tried.greedy(model, prompt, guidance_scale=1.5) for prompt in tried.prompts], right)


def early_exit(tried: Tried) -> str:
    """The model's own first four layers as draft model (`assistant_early_exit`)."""
    model = tried.load()
    right = [tried.greedy(model, prompt) for prompt in tried.prompts]
    return same([tried.greedy(model, prompt, assistant_early_exit=4) for prompt in tried.prompts], right)


def torchao_int8(tried: Tried) -> str:
    """Weights in int8 by `quantize_`."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = tried.load()
    quantize_(model, Int8WeightOnlyConfig())
    return difference(model, tried.load(), tried)


def quanto_int8(tried: Tried) -> str:
    """Weights in int8 by optimum-quanto, at loading."""
    from transformers import QuantoConfig

    return difference(tried.load(quantization_config=QuantoConfig(weights="int8")), tried.load(), tried)


def bitsandbytes_8(tried: Tried) -> str:
    """LLM.int8 by bitsandbytes, at loading."""
    from transformers import BitsAndBytesConfig

    return difference(tried.load(quantization_config=BitsAndBytesConfig(load_in_8bit=True)), tried.load(), tried)


def bitsandbytes_4(tried: Tried) -> str:
    """NF4 by bitsandbytes, at loading."""
    from transformers import BitsAndBytesConfig

    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return difference(tried.load(quantization_config=quantised), tried.load(), tried)


def torch_export(tried: Tried) -> str:
    """`torch.export` without a cache."""
    model = tried.load()
    ids = torch.tensor([tried.prompts[-1]])

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits
            return made

    with torch.no_grad():
        exported = torch.export.export(Logits(), (ids,)).module()
        return f"Δ logit {float((exported(ids) - model(ids).logits).abs().max()):.1e}"


def onnx(tried: Tried) -> str:
    """`torch.onnx.export`, run by onnxruntime; onnx's own reference takes a GatherElements along axis -1 for wrong."""
    from onnxruntime import InferenceSession

    model = tried.load()

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits
            return made

    ids = torch.tensor([tried.prompts[-1]])
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        written = f"{folder}/model.onnx"
        torch.onnx.export(Logits(), (ids,), written, dynamo=True, verbose=False)
        made = InferenceSession(written, providers=["CPUExecutionProvider"])
        (logits,) = made.run(None, {"input_ids": ids.numpy()})
        return f"Δ logit {float((torch.tensor(logits) - model(ids).logits).abs().max()):.1e}"


def mergekit(tried: Tried) -> str:
    """A linear merge of the output with a copy of itself, by mergekit's command."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "merge.yaml"
        copied = shutil.copytree(tried.folder, Path(folder) / "copy")
        models = [{"model": str(each), "parameters": {"weight": 0.5}} for each in (tried.folder, copied)]
        config.write_text(json.dumps({"merge_method": "linear", "models": models, "dtype": "float32"}))
        command = [sys.executable, "-m", "mergekit.scripts.run_yaml", str(config), f"{folder}/merged"]
        ran = subprocess.run([*command, "--trust-remote-code"], capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(ran.stderr.strip().splitlines()[-1])
        from transformers import AutoModelForCausalLM

        merged = AutoModelForCausalLM.from_pretrained(f"{folder}/merged", trust_remote_code=True)
        return difference(merged.float().eval(), tried.load(), tried)


def peft(tried: Tried) -> str:
    """A LoRA over every `q_proj` and `down_proj`: the same at birth, and trained by one step."""
    import peft as library

    model = library.get_peft_model(tried.load(), library.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    told = difference(model, tried.load(), tried)
    ids = torch.tensor([tried.prompts[-1]])
    model.train()(input_ids=ids, labels=ids).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return f"{told}; {sum(one.grad is not None for one in trained)} of {len(trained)} matrices have a gradient"


def liger(tried: Tried) -> str:
    """liger-kernel over an existing model, its rotation and its fused head with loss: one training step beside none.

    Without a GPU Triton's interpreter runs the kernels; it does not run those of norms and MLPs.
    """
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    model = tried.load().train()
    ids = torch.tensor([tried.prompts[-1]])
    # The task's loss alone, and its gradients at what no auxiliary loss reaches otherwise.
    right = torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:])
    right.backward()
    before = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    full = float(model(input_ids=ids, labels=ids).loss)
    model.zero_grad()
    native = modeling_llama.apply_rotary_pos_emb
    chosen = {"rope": True, "fused_linear_cross_entropy": True}
    try:
        apply_liger_kernel_to_llama(model=model, cross_entropy=False, rms_norm=False, swiglu=False, **chosen)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    finally:
        modeling_llama.apply_rotary_pos_emb = native
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    apart = max(float((found[name] - grad).abs().max()) for name, grad in before.items())
    told = f"Δ task loss {abs(float(loss - right)):.1e} of {float(right):.1f}, Δ gradient {apart:.1e}"
    lost = full - float(right)
    return told if abs(lost) < 1e-4 else f"{told}; the auxiliary losses, {lost:.2f} here, are left out"


def flex_attention(tried: Tried) -> str:
    """`attn_implementation="flex_attention"`, not compiled: a prompt, and one padded on the left, beside SDPA."""
    torch.compiler.set_stance("force_eager")
    try:
        model, right = tried.load(attn_implementation="flex_attention"), tried.load()
        ids = torch.tensor([tried.prompts[-1]])
        mask = torch.ones_like(ids)
        mask[:, :5] = 0
        with torch.no_grad():
            apart = (model(ids, attention_mask=mask).logits - right(ids, attention_mask=mask).logits)[:, 5:]
        return f"{difference(model, right, tried)}; padded {float(apart.abs().max()):.1e}"
    finally:
        torch.compiler.set_stance("default")


def _new_alone(model: Any, tried: Tried) -> list[str]:
    """Freeze the base, as docs/how-to/training.md says; the names of what trains."""
    if hasattr(model, "freeze_base"):
        return list(model.freeze_base())
    new = set(json.loads((tried.folder / "surgery.json").read_text())["new_tensors"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in new)
    return sorted(new)


def _by_trl(tried: Tried, train: Callable[[Any, Any, dict[str, Any]], str]) -> str:
    """What `train` says of a model, its tokenizer and settings, and whether the base kept its bytes."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = tried.load(), AutoTokenizer.from_pretrained(tried.folder)
        names = set(_new_alone(model, tried))
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        common = {"output_dir": folder, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "use_cpu": True}
        common |= {"max_length": 24, "max_steps": 10, "logging_steps": 1, "disable_tqdm": True}
        torch.manual_seed(0)
        told = train(model, tokenizer, common | {"save_strategy": "no", "report_to": "none", "bf16": False})
        moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
        kept = "the base kept its bytes" if moved <= names else f"{len(moved - names)} tensors of the base changed"
        return f"{told}; {len(moved)} of {len(names)} new tensors moved, {kept}"


def trl_sft(tried: Tried, **more: Any) -> str:
    """Ten steps of TRL's SFTTrainer on what the surgery added."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    def train(model: Any, tokenizer: Any, common: dict[str, Any]) -> str:
        texts = Dataset.from_list([{"text": f"a plan and a base become a checkpoint {n}"} for n in range(32)])
        settings = SFTConfig(**common, **more)
        made = SFTTrainer(model=model, args=settings, train_dataset=texts, processing_class=tokenizer)
        made.train()
        losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        return f"loss {losses[0]:.2f} to {losses[-1]:.2f}"

    return _by_trl(tried, train)


def trl_packed(tried: Tried) -> str:
    """The same with its packing that cuts texts into whole rows; the other one needs flash attention."""
    return trl_sft(tried, packing=True, packing_strategy="wrapped")


def trl_dpo(tried: Tried) -> str:
    """Ten steps of TRL's DPOTrainer on what the surgery added; a second copy is the reference."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    def train(model: Any, tokenizer: Any, common: dict[str, Any]) -> str:
        pairs = Dataset.from_list(
            [{"prompt": f"a plan {n} and", "chosen": " a base", "rejected": " no verify"} for n in range(32)]
        )
        made = DPOTrainer(
            model=model,
            ref_model=tried.load(),
            args=DPOConfig(**common),
            train_dataset=pairs,
            processing_class=tokenizer,
        )
        made.train()
        margins = [entry["rewards/margins"] for entry in made.state.log_history if "rewards/margins" in entry]
        return f"margin of the chosen answer {margins[0]:.3f} to {margins[-1]:.3f}"

    return _by_trl(tried, train)


def lm_eval(tried: Tried) -> str:
    """`lm_eval --model hf` on a task of its own, a few lines of text."""
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        lines = [{"text": f"line {number} of a text that a model is measured on"} for number in range(4)]
        (room / "text.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
        task = {
            "task": "own_text",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(room / "text.jsonl")}},
            "test_split": "test",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        }
        (room / "own_text.yaml").write_text(json.dumps(task))
        given = f"pretrained={tried.folder},trust_remote_code=True,dtype=float32"
        command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", given, "--tasks", "own_text"]
        command += ["--include_path", folder, "--device", "cpu", "--batch_size", "2", "--output_path", f"{folder}/out"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(ran.stderr.strip().splitlines()[-1])
        (written,) = room.glob("out/**/results_*.json")
        found = json.loads(written.read_text())["results"]["own_text"]["word_perplexity,none"]
        return f"runs: word perplexity {found:.3g}"


def sglang(_: Tried) -> str:
    """Whether it is there at all: its wheels in the registry hold kernels for CUDA alone."""
    import sglang as library

    return f"sglang {library.__version__} imports; not run"


# By name: how it is tried, and the package whose version counts.
WAYS: dict[str, tuple[Callable[[Tried], str], str]] = {
    "continuous batching": (continuous_batching, "transformers"),
    "static cache, compiled": (static_cache_compiled, "transformers"),
    "assisted by the base": (assisted, "transformers"),
    "prompt lookup": (prompt_lookup, "transformers"),
    "beams": (beams, "transformers"),
    "drawn tokens": (sampled, "transformers"),
    "a batch padded on the left": (padded_batch, "transformers"),
    "prefill in pieces": (prefill_in_pieces, "transformers"),
    "guidance": (guided, "transformers"),
    "assisted by its own first layers": (early_exit, "transformers"),
    "pipeline": (pipeline, "transformers"),
    "torchao int8": (torchao_int8, "torchao"),
    "quanto int8": (quanto_int8, "optimum-quanto"),
    "bitsandbytes 8 bits": (bitsandbytes_8, "bitsandbytes"),
    "bitsandbytes 4 bits": (bitsandbytes_4, "bitsandbytes"),
    "torch.export": (torch_export, "torch"),
    "ONNX": (onnx, "onnxruntime"),
    "mergekit linear": (mergekit, "mergekit"),
    "PEFT LoRA over it": (peft, "peft"),
    "liger-kernel: rotation, head with loss": (liger, "liger-kernel"),
    "flex attention, not compiled": (flex_attention, "torch"),
    "TRL SFTTrainer": (trl_sft, "trl"),
    "TRL SFTTrainer, packed (`wrapped`)": (trl_packed, "trl"),
    "TRL DPOTrainer": (trl_dpo, "trl"),
    "lm-eval's command": (lm_eval, "lm-eval"),
    "SGLang": (sglang, "sglang"),
}


def outcome(way: Callable[[Tried], str], tried: Tried) -> str:
    """What a way gives, or the line by which it does not."""
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(PATIENCE)
    try:
        return way(tried)
    except ImportError as error:
        return f"not here: `{first_line(error)}`"
    except Exception as error:  # whatever it is, it is the row
        traceback.print_exc()
        return f"fails: `{type(error).__name__}: {first_line(error)}`"
    finally:
        signal.alarm(0)


def _late(_signal: int, _frame: Any) -> None:
    raise TimeoutError(f"nothing came of it in {PATIENCE} seconds")


def first_line(error: BaseException) -> str:
    """The first line of a message, short and without what would end a table's cell."""
    plain = re.sub(r"\x1b\[\d*m", "", str(error))
    text = next((line.strip() for line in plain.splitlines() if line.strip()), type(error).__name__)
    return text.replace("|", "\\|")[:240]


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "–"


def table(rows: dict[str, dict[str, str]]) -> str:
    """The page."""
    lines = [
        "# Outputs in other tools",
        "",
        "`python -m benchmarks.engines.models WORK`, then `python -m benchmarks.engines.other WORK`, with transformers"
        f" {version('transformers')} and torch {version('torch')} on a CPU, tiny random models in float32. Native:"
        f" {OUTPUTS['native']}; grafts: control blocks, gated adapters, PMoE slots in two groups and control states by"
        " token on one model, all moved away from their birth.",
        "",
        "| tried | version | native output | output with grafts | control states by `prefix_mean` |",
        "|---|---|---|---|---|",
    ]
    for way, found in rows.items():
        cells = " | ".join(found[kind] for kind in OUTPUTS)
        lines.append(f"| {way} | {WAYS[way][1]} {installed(WAYS[way][1])} | {cells} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.other", description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS))
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        # Triton reads it when it is first imported, which other packages do too.
        os.environ["TRITON_INTERPRET"] = "1"
    kept = chosen.work / "other.json"
    rows: dict[str, dict[str, str]] = json.loads(kept.read_text()) if kept.exists() else {}
    for way in chosen.only:
        rows[way] = {kind: outcome(WAYS[way][0], Tried(chosen.work, title)) for kind, title in OUTPUTS.items()}
        print(way, rows[way], flush=True)
        kept.write_text(json.dumps(rows, indent=1))
    RESULT.write_text(table({way: rows[way] for way in WAYS if way in rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
