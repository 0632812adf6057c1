"""`init: lesa` beside an independent run of the algorithm of LESA's authors (their notebook train_LESA.ipynb).

    python benchmarks/lesa.py --base DIR --text FILE [--seeds N] [--windows N]

For each seed the base grows once by surgeon's plan `lesa`, and once by the code below, which shares nothing with it:
the singular value decomposition is torch's, of the matrices side by side, the network torch's own layers. Both are
compared by the loss on the text and by the norms of the new matrices over the mean norm of their neighbours' (the
average init is there too, for scale); beside them how much variance the networks explain, and the cosine of what they
predict with what is there. Results go to benchmarks/results/lesa_BASE.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import surgeon
from benchmarks.measuring import machine

RESULTS = Path(__file__).resolve().parent / "results"
PLAN = """\
surgeon: 1
seed: {seed}
operations:
  - {{op: insert_layers, where: top_half, init: {init}, zero_init: false}}
"""
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOLERANCE = 0.05
# Of the notebook.
HIDDEN, EPOCHS, BATCH, RATE, NORM_WEIGHT = 256, 10, 64, 1e-3, 5e-4


@dataclass(frozen=True)
class Grown:
    """A grown model: its loss, the norm of each new matrix over its neighbours', and how its networks fit."""

    loss: float
    norms: Mapping[str, list[float]]
    explained: Mapping[str, float]
    cosine: Mapping[str, float]


def by_notebook(matrices: list[Tensor], gaps: list[int]) -> tuple[list[Tensor], float, float]:
    """The matrices for the gaps, the share of variance explained, and the cosine; torch's global generator draws."""
    left, singular, right = torch.linalg.svd(torch.cat(matrices, dim=1), full_matrices=False)
    parts = right.chunk(len(matrices), dim=1)
    inputs = torch.cat([torch.cat([low, high], dim=1) for low, high in zip(parts[:-2], parts[2:], strict=True)])
    wanted = torch.cat(parts[1:-1])
    network = nn.Sequential(
        nn.Linear(inputs.shape[1], HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, wanted.shape[1]),
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs)).split(BATCH):
            made, true = network(inputs[rows]), wanted[rows]
            off = (1 - NORM_WEIGHT) * functional.mse_loss(made, true)
            off = off + NORM_WEIGHT * (made.norm() - true.norm()).square()
            optimizer.zero_grad()
            off.backward()
            optimizer.step()
    with torch.no_grad():
        weights = singular.repeat(len(matrices) - 2)[:, None]
        made, true = network(inputs) * weights, wanted * weights
        explained = 1 - (made - true).square().sum() / true.square().sum()
        cosine = (made * true).sum() / (made.norm() * true.norm())
        new = [(left * singular) @ network(torch.cat([parts[gap], parts[gap + 1]], dim=1)) for gap in gaps]
    return new, float(explained), float(cosine)


def grow_independently(base: Path, gaps: list[int], windows: Tensor, seed: int) -> Grown:
    """The base with layers by `by_notebook` above the layers `gaps`; their norms are their neighbours' average."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    layers = list(model.model.layers)
    new = [type(layers[0])(model.config, gap) for gap in gaps]
    norms: dict[str, list[float]] = {}
    explained, cosine = {}, {}
    with torch.no_grad():
        for name, tensor in layers[0].state_dict().items():
            stack = [layer.state_dict()[name] for layer in layers]
            if tensor.ndim == 1:
                made = [(stack[gap] + stack[gap + 1]) / 2 for gap in gaps]
            else:
                with torch.enable_grad():
                    made, fit, likeness = by_notebook(stack, gaps)
                module = name.split(".")[1]
                norms[module], explained[module], cosine[module] = ratios(made, stack, gaps), fit, likeness
            for layer, matrix in zip(new, made, strict=True):
                # What apply writes is rounded to the checkpoint's dtype too.
                layer.state_dict()[name].copy_(matrix.to(torch.bfloat16))
    for gap, layer in reversed(list(zip(gaps, new, strict=True))):
        layers.insert(gap + 1, layer)
    return Grown(loss_of(with_layers(model, layers), windows), norms, explained, cosine)


def grow_by_surgeon(base: Path, gaps: list[int], windows: Tensor, seed: int, init: str) -> Grown:
    """The base with layers of `init` by `surgeon apply`, loaded as anybody loads it."""
    with tempfile.TemporaryDirectory() as folder:
        plan, out = Path(folder) / "plan.yaml", Path(folder) / "out"
        plan.write_text(PLAN.format(seed=seed, init=init), encoding="utf-8")
        applied = surgeon.apply(plan, base, out)
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        fits = {name.split(".")[-2]: fit for name, fit in applied.manifest.fits.items()}
        layers = list(model.model.layers)
        assert len(layers) - len(gaps) == applied.manifest.base.layers
        # Each new layer below moves the next one up.
        places = [gap + 1 + nth for nth, gap in enumerate(gaps)]
        old = [layer for number, layer in enumerate(layers) if number not in places]
        norms = {}
        for name, tensor in layers[0].state_dict().items():
            if tensor.ndim == 2:
                stack = [layer.state_dict()[name] for layer in old]
                made = [layers[place].state_dict()[name] for place in places]
                norms[name.split(".")[1]] = ratios(made, stack, gaps)
        explained = {module: fit.explained for module, fit in fits.items()}
        return Grown(loss_of(model, windows), norms, explained, {module: fit.cosine for module, fit in fits.items()})


def ratios(made: list[Tensor], stack: list[Tensor], gaps: list[int]) -> list[float]:
    """Norms of new matrices over the mean norm of the two beside them."""
    pairs = [(stack[gap].float().norm() + stack[gap + 1].float().norm()) / 2 for gap in gaps]
    return [float(each.float().norm() / beside) for each, beside in zip(made, pairs, strict=True)]


def with_layers(model: Any, layers: list[nn.Module]) -> Any:
    """The model with these layers, numbered anew."""
    model.model.layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    return model


@torch.no_grad()
def loss_of(model: Any, windows: Tensor) -> float:
    """Nats a token."""
    logits = model.eval()(windows, use_cache=False).logits
    return float(functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), windows[:, 1:].flatten()))


def windows_of(base: Path, text: Path, count: int, length: int = 256) -> Tensor:
    """The first tokens of a JSON-lines text, in `count` windows."""
    tokenizer, ids = AutoTokenizer.from_pretrained(base), []
    for line in text.read_text(encoding="utf-8").splitlines():
        ids += tokenizer.encode(json.loads(line)["text"], verbose=False)
    return torch.tensor(ids[: count * length]).view(count, length)


def row(seed: str, how: str, grown: Grown) -> str:
    """One line of the table."""
    norms = [norm for module in grown.norms.values() for norm in module]
    fits = [f"{min(f.values()):.2f} to {max(f.values()):.2f}" if f else "" for f in (grown.explained, grown.cosine)]
    return f"| {seed} | {how} | {grown.loss:.4f} | {min(norms):.2f}–{max(norms):.2f} | {fits[0]} | {fits[1]} |"


def module_row(module: str, runs: Mapping[str, list[Grown]]) -> tuple[str, float]:
    """Mean norms of one module's new matrices over all seeds, and how far surgeon's lie from the notebook's."""
    means = {how: statistics.mean(n for g in found for n in g.norms[module]) for how, found in runs.items()}
    apart = means["surgeon"] / means["notebook"] - 1
    cells = " | ".join(f"{means[how]:.3f}" for how in ("notebook", "surgeon", "average"))
    return f"| {module} | {cells} | {apart:+.1%} |", apart


def main() -> int:
    """Grow, measure and write the table; 1 where surgeon lies further from the notebook than `TOLERANCE`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="JSON lines with a `text` each")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--windows", type=int, default=16)
    given = parser.parse_args()
    windows = windows_of(given.base, given.text, given.windows)
    layers = json.loads((given.base / "config.json").read_text())["num_hidden_layers"]
    # Between layers 15 and 31 of 32 in the notebook, the gaps of `top_half`.
    gaps = list(range(layers // 2 - 1, layers - 1))
    model = AutoModelForCausalLM.from_pretrained(given.base, dtype=torch.float32)
    runs: dict[str, list[Grown]] = {"notebook": [], "surgeon": [], "average": []}
    lines = [f"| | the base | {loss_of(model, windows):.4f} | | | |"]
    for seed in range(given.seeds):
        runs["notebook"].append(grow_independently(given.base, gaps, windows, seed))
        runs["surgeon"].append(
            grow_by_surgeon(given.base, gaps, windows, seed, "{kind: lesa, poor_fit: keep}"),
        )
        lines += [row(str(seed), how, runs[how][-1]) for how in ("notebook", "surgeon")]
    runs["average"].append(grow_by_surgeon(given.base, gaps, windows, 0, "{kind: average}"))
    lines.append(row("", "`init: average`", runs["average"][0]))
    losses = {how: statistics.mean(g.loss for g in found) for how, found in runs.items()}
    apart = losses["surgeon"] / losses["notebook"] - 1
    modules = [module_row(module, runs) for module in MODULES]
    furthest = max([apart, *(off for _, off in modules)], key=abs)
    holds = abs(furthest) <= TOLERANCE
    report = [
        f"# LESA on {given.base.name}, beside the authors' algorithm run independently",
        "",
        f"{len(gaps)} layers after layers {gaps[0]}-{gaps[-1]} of {layers}; loss in nats a token on the first"
        f" {windows.numel():,} tokens of {given.text.name}; float32. {machine()}.",
        "",
        "| seed | | loss | norms of new matrices over their neighbours' | variance explained | cosine |",
        "|---|---|---|---|---|---|",
        *lines,
        "",
        f"Mean loss {losses['notebook']:.4f} by the notebook, {losses['surgeon']:.4f} by surgeon ({apart:+.2%}). Mean"
        " norms over their neighbours', over all seeds and gaps:",
        "",
        "| module | notebook | surgeon | average | surgeon over notebook |",
        "|---|---|---|---|---|",
        *(line for line, _ in modules),
        "",
        f"Furthest apart: {furthest:+.2%}, {'within' if holds else 'NOT within'} {TOLERANCE:.0%}.",
    ]
    (RESULTS / f"lesa_{given.base.name}.md").write_text("\n".join(report) + "\n", encoding="utf-8")
    print("\n".join(report))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
