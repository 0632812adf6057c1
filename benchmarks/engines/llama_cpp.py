"""Native outputs in llama.cpp: logits beside the base's GGUF, and beside transformers.

    python -m benchmarks.engines.models WORK                                # where surgeon is installed
    python -m benchmarks.engines.llama_cpp WORK --source LLAMA_CPP [--only TITLE …]

LLAMA_CPP is the source of llama.cpp with its converter, as the sdist of llama-cpp-python holds it; this environment has
torch, transformers and llama-cpp-python. Every base and output of WORK goes through the converter to a float32
GGUF (without a vocabulary, which has no part in logits) and is run over the prompts of WORK. A row: the largest
difference of a logit to the base's GGUF and to transformers, beside what the base itself differs by from transformers;
or the line by which the converter refuses. The table goes to benchmarks/results/engines_llama_cpp.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch

RESULT = Path(__file__).resolve().parents[1] / "results" / "engines_llama_cpp.md"


# Kept for as long as llama.cpp may call it.
_SILENT = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)


def convert(source: Path, folder: Path, file: Path) -> str | None:
    """Write `file`, as `convert_hf_to_gguf.py --outtype f32` does; the line of refusal, or None."""
    for path in (source / "gguf-py", source):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    hparams = ModelBase.load_hparams(folder, False)
    architecture = get_model_architecture(hparams, ModelType.TEXT)
    try:
        found = get_model_class(architecture)
    except NotImplementedError:
        return f"Model {architecture} is not supported"

    def without_words(self: Any) -> None:
        self._set_vocab_none()
        if f"{gguf.MODEL_ARCH_NAMES[self.model_arch]}.vocab_size" not in self.gguf_writer.kv_data[0]:
            self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    kind = type(found.__name__, (found,), {"set_vocab": without_words, "model_arch": found.model_arch})
    with torch.inference_mode():
        kind(folder, gguf.LlamaFileType.ALL_F32, file).write()
    return None


def logits(file: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    """llama.cpp's logits of every token of every prompt, T V each, in float32 without a quantised cache."""
    llama_cpp.llama_log_set(_SILENT, None)
    llama_cpp.llama_backend_init()
    asked = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), asked)
    if not model:
        raise SystemExit(f"{file}: llama.cpp does not load it")
    how = llama_cpp.llama_context_default_params()
    how.n_ctx = how.n_batch = how.n_ubatch = 256
    how.n_threads = how.n_threads_batch = 1
    how.type_k = how.type_v = llama_cpp.GGML_TYPE_F32
    how.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, how)
    width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    made = []
    for prompt in prompts:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch = llama_cpp.llama_batch_init(len(prompt), 0, 1)
        batch.n_tokens = len(prompt)
        for place, token in enumerate(prompt):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit(f"{file}: llama.cpp does not run it")
        found = llama_cpp.llama_get_logits(context)
        made.append(np.ctypeslib.as_array(found, shape=(len(prompt), width)).copy())
        llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return made


@torch.no_grad()
def in_transformers(folder: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    """The same by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [model(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts]


def furthest(ones: list[np.ndarray], others: list[np.ndarray]) -> float:
    """The largest difference, over the tokens that both have."""
    width = min(ones[0].shape[1], others[0].shape[1])
    pairs = zip(ones, others, strict=True)
    return max(float(np.abs(one[:, :width] - other[:, :width]).max()) for one, other in pairs)


class Runs:
    """What is run of WORK, each thing once."""

    def __init__(self, work: Path, source: Path) -> None:
        self.work, self.source = work, source
        self.prompts = json.loads((work / "prompts.json").read_text())
        self.bases: dict[str, tuple[list[np.ndarray], float, float]] = {}
        (work / "gguf").mkdir(exist_ok=True)

    def base(self, name: str) -> tuple[list[np.ndarray], float, float]:
        """A base's logits in llama.cpp, how far they are from transformers', and the largest of them."""
        if name not in self.bases:
            folder, file = self.work / "bases" / name, self.work / "gguf" / f"{name}.gguf"
            refused = convert(self.source, folder, file)
            assert refused is None, refused
            found, right = logits(file, self.prompts), in_transformers(folder, self.prompts)
            self.bases[name] = found, furthest(found, right), max(float(np.abs(one).max()) for one in right)
        return self.bases[name]

    def row(self, title: str, case: dict[str, Any]) -> dict[str, Any]:
        """An output's row."""
        folder, file = self.work / "outputs" / case["folder"], self.work / "gguf" / f"{case['folder']}.gguf"
        refused = convert(self.source, folder, file)
        if refused is not None:
            return {"title": title, "refused": refused}
        base, own, scale = self.base(case["base"])
        right = in_transformers(folder, self.prompts)
        found = logits(file, self.prompts)
        return {
            "title": title,
            "to_base": furthest(found, base),
            "to_transformers": furthest(found, right),
            "base": own,
            "scale": scale,
        }


def table(rows: list[dict[str, Any]]) -> str:
    """The page."""
    packages = ("transformers", "torch")
    lines = [
        "# Native outputs in llama.cpp",
        "",
        "`python -m benchmarks.engines.models WORK`, then `python -m benchmarks.engines.llama_cpp WORK --source"
        f" LLAMA_CPP`, with llama-cpp-python {llama_cpp.__version__} and the llama.cpp in its sdist,"
        f" {', '.join(f'{name} {version(name)}' for name in packages)}. Tiny random models, float32 GGUF, on a CPU.",
        "",
        "Largest differences of a logit. Every output promises the base's function, exactly or but for rounding, but"
        " those of stack_layers, drop_layers and fold_adapters (of trained adapters): for them transformers is the"
        " measure. Of a grown vocabulary the base's tokens are compared.",
        "",
        "| output | to the base's GGUF | to transformers | base's GGUF to transformers | largest logit |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if "refused" in row:
            lines.append(f"| {row['title']} | refused: `{row['refused']}` | – | – | – |")
            continue
        numbers = (row["to_base"], row["to_transformers"], row["base"])
        lines.append(f"| {row['title']} | {' | '.join(f'{n:.1e}' for n in numbers)} | {row['scale']:.1f} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.llama_cpp", description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    chosen = parser.parse_args(arguments)
    cases = json.loads((chosen.work / "cases.json").read_text())
    runs, rows = Runs(chosen.work, chosen.source), []
    grafts = [title for title, case in cases.items() if not case["native"]]
    asked = chosen.only or [title for title in cases if title not in grafts[1:]]
    for title in asked:
        rows.append(runs.row(title, cases[title]))
        print(json.dumps(rows[-1]), flush=True)
    if not chosen.only:
        RESULT.write_text(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
