"""Tokens a second of outputs in vLLM, beside their base's and beside what they compute.

    python -m benchmarks.engines.models WORK           # where surgeon is installed
    python -m benchmarks.engines.vllm_speed WORK [--only TITLE …] [--rounds 7] [--compiled]    # where vLLM is
    python -m benchmarks.engines.vllm_speed BASE OUT [OUT …]       # folders of your own, wide enough to tell something

A base and one output at a time, each in a process of its own, generate in turns: one batch of prompts, as many tokens
for each, `--rounds` times after one that is not counted. A row has the median of tokens a second (by the clock) and of
tokens a processor second (of all threads), the median over rounds of the output's share of the base's, with the
smallest and largest, and the ratio of floating-point operations of the matrix products in one forward of transformers,
as torch's counter finds them. Where the smallest and largest share are far apart the machine was busy and the row says
nothing: run it again. Prints a table in Markdown; on a CPU and for tiny models it measures an engine's own work, so no
results of it are kept here.
"""

from __future__ import annotations

import argparse
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

_LAST = "RESULT "
PROMPTS, LONG, NEW = 8, 64, 32


def inner(folder: str, compiled: bool) -> None:
    """Generate once for every line that comes in; how long it took is a line of what this process prints."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype="auto",
        trust_remote_code=True,
        max_model_len=LONG + NEW + 1,
        max_num_seqs=PROMPTS,
        enable_prefix_caching=False,
        enforce_eager=not compiled,
        seed=0,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    prompts = [{"prompt_token_ids": [3 + (7 * at + 11 * row) % 400 for at in range(LONG)]} for row in range(PROMPTS)]
    print(_LAST + json.dumps({}), flush=True)
    for _ in sys.stdin:
        wall, processor = time.perf_counter(), time.process_time()
        made = engine.generate(prompts, sampling, use_tqdm=False)
        found = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}
        print(_LAST + json.dumps(found | {"tokens": sum(len(one.outputs[0].token_ids) for one in made)}), flush=True)


@contextmanager
def server(folder: Path, compiled: bool) -> Iterator[subprocess.Popen[str]]:
    """A process that generates with a model when it is asked."""
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "benchmarks.engines.vllm_speed", str(folder), "--inner"]
    command += ["--compiled"] if compiled else []
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


def answer(process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    """The next result that a process prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(_LAST):
            found: dict[str, Any] = json.loads(line.removeprefix(_LAST))
            return found
    raise SystemExit(f"{folder}: vLLM ended; run `python -m benchmarks.engines.vllm_speed {folder} --inner` to see why")


def ask(process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
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


def row(title: str, base: Path, out: Path, rounds: int, compiled: bool) -> str:
    """An output's row."""
    taken: dict[Path, list[dict[str, Any]]] = {base: [], out: []}
    with server(base, compiled) as one, server(out, compiled) as other:
        for count in range(rounds + 1):
            for process, folder in ((one, base), (other, out)):
                found = ask(process, folder)
                if count:
                    taken[folder].append(found)
    cells = [title]
    for clock in ("wall", "processor"):
        speeds = [[one["tokens"] / one[clock] for one in taken[folder]] for folder in (base, out)]
        shares = [grown / plain for plain, grown in zip(*speeds, strict=True)]
        cells += [f"{statistics.median(each):.0f}" for each in speeds]
        cells.append(f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})")
    return f"| {' | '.join(cells)} | {operations(out) / operations(base):.2f} |"


def pairs(folders: list[Path], only: list[str]) -> list[tuple[str, Path, Path]]:
    """Title, base and output of every row."""
    if len(folders) > 1:
        return [(out.name, folders[0], out) for out in folders[1:]]
    work = folders[0]
    cases = json.loads((work / "cases.json").read_text())
    chosen = only or [title for title, case in cases.items() if not case["native"] and not case["by_sequence"]]
    return [
        (title, work / "bases" / cases[title]["base"], work / "outputs" / cases[title]["folder"]) for title in chosen
    ]


def main(arguments: list[str]) -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.vllm_speed", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="WORK | BASE OUT")
    parser.add_argument("--only", nargs="*", default=[], help="titles of outputs; all with grafts by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.inner:
        inner(str(chosen.folders[0]), chosen.compiled)
        return
    clocks = [f"tokens/s {by}: base | output | share" for by in ("by the clock", "of the processor")]
    print(f"| output | {' | '.join(clocks)} | FLOPs, share |")
    print("|---" * 8 + "|")
    for title, base, out in pairs(chosen.folders, chosen.only):
        print(row(title, base, out, chosen.rounds, chosen.compiled), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
