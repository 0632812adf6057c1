"""Every graft under torch.compile, as one graph: logits and gradients beside those of the model as it is.

    python -m benchmarks.engines.models WORK
    python -m benchmarks.engines.compiled WORK [--only TITLE …] [--backend aot_eager]

`fullgraph=True` ends in an error where a graph would break in two. `aot_eager` draws the graphs of forward and backward
and runs them with torch's own kernels; `inductor` compiles them too. A row each, in
benchmarks/results/engines_compiled.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines.other import Tried, first_line

RESULT = Path(__file__).resolve().parents[1] / "results" / "engines_compiled.md"


def run(model: Any, called: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of `called`, which is `model` or a compiled form of it, and the gradients of the loss that they give."""
    model.zero_grad()
    logits = called(input_ids=ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return logits.detach(), gradients


def outcome(tried: Tried, backend: str) -> str:
    """The largest differences, or the line by which it does not run."""
    model, ids = tried.load(), torch.tensor([tried.prompts[-1]])
    logits, gradients = run(model, model, ids)
    torch.compiler.reset()
    try:
        found, given = run(model, torch.compile(model, fullgraph=True, backend=backend), ids)
    except Exception as error:  # whatever it is, it is the row
        return f"fails: `{type(error).__name__}: {first_line(error)}` | "
    if given.keys() != gradients.keys():
        return f"fails: {len(given)} gradients, not {len(gradients)} | "
    apart = max(float((given[name] - gradient).abs().max()) for name, gradient in gradients.items())
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    logit = f"{float((found - logits).abs().max()):.1e} of {float(logits.abs().max()):.1f}"
    return f"{logit} | {apart:.1e} of {largest:.1e}"


def table(rows: dict[str, dict[str, str]]) -> str:
    """The page."""
    lines = [
        "# Outputs under torch.compile",
        "",
        "`python -m benchmarks.engines.models WORK`, then `python -m benchmarks.engines.compiled WORK`, with"
        f" transformers {version('transformers')} and torch {version('torch')} on a CPU, tiny random models in float32,"
        " new tensors moved away from their birth. Each in eval mode as one graph (`fullgraph=True`), one prompt,"
        " without a cache.",
        "",
        "| output | backend | Δ logit | Δ gradient |",
        "|---|---|---|---|",
    ]
    lines += [f"| {title} | {backend} | {told} |" for title, found in rows.items() for backend, told in found.items()]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.compiled", description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="titles of outputs; all by default")
    parser.add_argument("--backend", default="aot_eager", choices=["aot_eager", "inductor"])
    chosen = parser.parse_args(arguments)
    kept = chosen.work / "compiled.json"
    rows: dict[str, dict[str, str]] = json.loads(kept.read_text()) if kept.exists() else {}
    titles = list(json.loads((chosen.work / "cases.json").read_text()))
    for title in titles:
        if chosen.only and title not in chosen.only:
            continue
        rows.setdefault(title, {})[chosen.backend] = outcome(Tried(chosen.work, title), chosen.backend)
        print(title, rows[title], flush=True)
        kept.write_text(json.dumps(rows, indent=1))
        RESULT.write_text(table({title: rows[title] for title in titles if title in rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
