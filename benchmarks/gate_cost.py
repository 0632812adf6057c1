"""What a domain gate costs where it is closed and where it is open, beside the base: time and cache.

    python -m benchmarks.gate_cost --base DIR --work DIR

The surgeries of `benchmarks.gate` behind a gate, as `apply` writes them, in float32, one thread. A fitted classifier
costs what one at zero does; the threshold alone decides here. Processor time, base and output in turn: the least of
`PREFILLS` of a prefill of 4 × 384 tokens; of 96 tokens one at a time over a cache the sum, each the least of `DECODES`;
the one token that opens the gate after 96 closed ones. And the bytes that the cache then holds, with what it holds in
the place of keys and values that are not made yet. Results go to benchmarks/results/gate_cost_<base>.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import surgeon
from benchmarks.gate import SURGERIES
from benchmarks.measuring import machine
from tests.caches import CACHE, cache_in

RESULTS = Path(__file__).resolve().parent / "results"
PREFILLS, DECODES = 7, 21
TOKENS, ROWS, LENGTH = 96, 4, 384
# A threshold that no evidence passes, and one that all does.
CLOSED, OPEN = 1e5, -1.0


def decode(model: Any, ids: Tensor) -> tuple[list[float], Any]:
    """Seconds of each of the tokens, one at a time, and the cache behind them."""
    cache, seconds = None, []
    for at in range(ids.shape[1]):
        begun = time.process_time()
        cache = cache_in(model(ids[:, at : at + 1], **{CACHE: cache}, use_cache=True))
        seconds.append(time.process_time() - begun)
    return seconds, cache


def one(model: Any, ids: Tensor, **given: Any) -> float:
    """Seconds of one forward."""
    begun = time.process_time()
    model(ids, use_cache=True, **given)
    return time.process_time() - begun


def held(value: Any, seen: dict[int, int] | None = None) -> int:
    """Bytes of all tensors in a cache, each storage once."""
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, dict):
        for each in value.values():
            held(each, seen)
    elif isinstance(value, list | tuple):
        for each in value:
            held(each, seen)
    elif hasattr(value, "__dict__") and "functools" not in type(value).__module__:
        held(vars(value), seen)
    return sum(seen.values())


@torch.no_grad()
def measure(base: Any, model: Any) -> dict[str, float]:
    """Ratios to the base's, and bytes of caches."""
    gate = next(module for module in model.modules() if hasattr(module, "threshold"))
    ids = torch.randint(3, base.config.vocab_size - 1, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    found: dict[str, float] = {}
    for how, threshold in (("closed", CLOSED), ("open", OPEN)):
        gate.threshold.fill_(threshold)
        least: dict[str, list[float]] = {}
        for nth in range(DECODES):
            for name, each in (("base", base), ("grown", model)):
                seconds, cache = decode(each, ids[:1, :TOKENS])
                least[name] = list(map(min, least.get(name, seconds), seconds))
                found[f"bytes {name if name == 'base' else how}"] = held(cache.layers)
                if nth < PREFILLS:
                    seconds = [one(each, ids)]
                    least[f"{name} prefill"] = list(map(min, least.get(f"{name} prefill", seconds), seconds))
        whole = {name: sum(each) for name, each in least.items()}
        found |= {how: whole["grown"] / whole["base"], f"prefill {how}": whole["grown prefill"] / whole["base prefill"]}
        found["step"] = whole["base"] / TOKENS
    gate.threshold.fill_(CLOSED)
    opening = []
    for _ in range(3):
        _, cache = decode(model, ids[:1, :TOKENS])
        gate.threshold.fill_(OPEN)
        opening.append(one(model, ids[:1, :1], **{CACHE: cache}) / found["step"])
        gate.threshold.fill_(CLOSED)
    return found | {"opening": min(opening)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--base", "--work"):
        parser.add_argument(option, type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.work.mkdir(exist_ok=True)
    base = surgeon.open_checkpoint(asked.base).load(dtype="float32").eval()
    lines = [
        f"# What a domain gate costs: {asked.base.name}",
        "",
        f"`python -m benchmarks.gate_cost` ({machine()}, one thread, float32). Processor time beside the base's: a"
        f" prefill of {ROWS} × {LENGTH} tokens (least of {PREFILLS}), {TOKENS} one at a time over a cache (each the"
        f" least of {DECODES}), and the token that opens the gate after {TOKENS} closed ones, in tokens of the base."
        f" Bytes of the cache after those {TOKENS}, beside the base's;"
        " what stands in the place of keys and values that are not made yet counts.",
        "",
        "| surgery | prefill closed | open | a token closed | open | the token that opens | cache closed | open |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, operation in SURGERIES.items():
        out = asked.work / f"{name.replace(' ', '-')}-cost"
        plan = asked.work / f"{out.name}.plan.yaml"
        plan.write_text(json.dumps({"surgeon": 1, "operations": [operation, {"op": "domain_gate"}]}), encoding="utf-8")
        if not out.exists():
            surgeon.apply(plan, str(asked.base), out)
        found = measure(base, surgeon.open_checkpoint(out).load(dtype="float32").eval())
        caches = (f"{found[f'bytes {how}'] / found['bytes base']:.2f}" for how in ("closed", "open"))
        lines.append(
            f"| {name} | {found['prefill closed']:.2f} | {found['prefill open']:.2f} | {found['closed']:.2f} |"
            f" {found['open']:.2f} | {found['opening']:.1f} | {' | '.join(caches)} |"
        )
        print(lines[-1], flush=True)
    (RESULTS / f"gate_cost_{asked.base.name}.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
