"""Auxiliary losses are live under `surgeon train`: each changes the gradients, and brings down what it is about.

Each is measured on the finished run by a formula of its own, over what passes through the modules in a forward.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional as F

import surgeon
from surgeon.grafts.registry import GRAFTS
from surgeon.models.load import load_model
from tests import tiny
from tests.training.texts import add_tokenizer, corpus, text

STEPS = 15
# Words 0 to 49 are what the base "knows", 50 to 99 are new.
FIRST = {0: 0, 1: 50, 2: 25}


@dataclass(frozen=True)
class Live:
    """A loss: the plan with a weight for it, its field of the output, and how a run is measured."""

    field: str
    operation: Callable[[float], dict[str, Any]]
    weight: float
    measure: Callable[[Any], float]
    # The quantity with the loss is below this share of that without.
    share: float
    roles: tuple[str, str] = ("original", "new")
    # Switched off: the plan's smallest weight that it takes.
    off: float = 0.0
    family: str = "llama"


def ids_of(domain: int) -> Tensor:
    """Sequences of a domain that no run has trained on."""
    rows = [text(24, 9000 + n, first=FIRST[domain], count=50).split() for n in range(8)]
    return torch.tensor([[10 + int(word[1:]) for word in row] for row in rows])


def passed(model: Any, ends: str, domain: int, *, inputs: bool = False) -> list[Any]:
    """What modules whose names end so, or whose class is called so, take or give for a domain's text."""
    seen: list[Any] = []
    hooks = [
        module.register_forward_hook(lambda _, args, out: seen.append(args if inputs else out))
        for name, module in model.named_modules()
        if name.endswith(ends) or type(module).__name__ == ends
    ]
    with torch.inference_mode():
        model(ids_of(domain))
    for hook in hooks:
        hook.remove()
    assert seen
    return seen


def mean(values: list[Tensor]) -> float:
    return float(torch.stack(values).mean())


def squared_distance(model: Any) -> float:
    return mean([(e - p).square().mean() for _, p, e in passed(model, ".interpolator", 1, inputs=True)])


def loudness(model: Any) -> float:
    """Mean |output| of the adapters on original text."""
    return mean([output.abs().mean() for output, _ in passed(model, ".adapter", 0)])


def misjudged(model: Any) -> float:
    """Cross-entropy of the adapters' gates as classifiers of the domain."""
    return mean(
        [
            F.binary_cross_entropy(score.sigmoid(), torch.full_like(score, float(domain)))
            for domain in (0, 1)
            for _, score in passed(model, ".adapter", domain)
        ]
    )


def misrouted(model: Any) -> float:
    """Mean −log of the router's probability for the slot of the text's task."""
    return mean(
        [-routing[..., task - 1].log().mean() for task in (1, 2) for routing, _ in passed(model, "router", task)]
    )


def imbalance(model: Any) -> float:
    """Greatest share of tokens that choose one control state, over the gates: 1 where all choose the same."""
    greatest = []
    for scores in passed(model, "MixtureGate", 1):
        chosen = scores.argmax(dim=-1).flatten()
        greatest.append(torch.bincount(chosen, minlength=scores.shape[-1]).max() / chosen.numel())
    return mean(greatest)


def crowding(model: Any) -> float:
    """Greatest share of tokens that one expert of a layer takes, over the layers."""
    routers = [value.detach() for name, value in model.named_parameters() if name.endswith(".routed.router")]
    greatest = []
    read = zip(*(passed(model, "RoutedExperts", domain, inputs=True) for domain in (0, 1)), strict=True)
    for router, both in zip(routers, read, strict=True):
        chosen = (torch.cat([tokens.flatten(0, 1) for (tokens,) in both]) @ router.T).argmax(dim=-1)
        greatest.append(torch.bincount(chosen).max() / chosen.numel())
    return mean(greatest)


def control(weight: float) -> dict[str, Any]:
    return {"op": "control_llm", "layers": {"every": 2}, "divergence": {"kind": "mse", "weight": weight}}


def adapters(gate: str, kind: str) -> Callable[[float], dict[str, Any]]:
    return lambda weight: {
        "op": "gated_adapters",
        "layers": "all",
        "size": 12,
        "gate": gate,
        "local_loss": {"kind": kind, "weight": weight},
    }


def experts(weight: float) -> dict[str, Any]:
    loss = {"kind": "task_id", "weight": weight} if weight else "none"
    return {"op": "pmoe_experts", "threshold": 3, "slots": 2, "router_loss": loss}


def states(weight: float) -> dict[str, Any]:
    return {"op": "mixture_of_control", "rank": 4, "balance_weight": weight}


def routed(weight: float) -> dict[str, Any]:
    # Equal rows: at birth every token takes the same expert.
    prompts = [[text(4, 1)]] * 4
    return {"op": "upcycle_experts", "experts": 4, "top_k": 1, "balance": weight, "router": {"prompts": prompts}}


LIVE = {
    "divergence, mse": Live("divergence_loss", control, 10.0, squared_distance, 0.5),
    "l1": Live("local_l1_loss", adapters("relu", "l1"), 5.0, loudness, 0.5, off=1e-9),
    "cross-entropy": Live(
        "local_cross_entropy_loss", adapters("sigmoid", "cross_entropy"), 1.0, misjudged, 0.7, off=1e-9
    ),
    "task id": Live("router_loss", experts, 4.0, misrouted, 0.85, roles=("task:one", "task:two")),
    "balance": Live("balance_loss", states, 1.0, imbalance, 0.8),
    "experts": Live("routed_balance_loss", routed, 1.0, crowding, 0.8, family="gemma2"),
}


def trained(folder: Path, live: Live, weight: float) -> tuple[Path, list[float]]:
    """A run of the plan with this weight, and the gradient's norm at each step."""
    base = add_tokenizer(tiny.checkpoint(folder / "base", live.family, dtype="float32", num_hidden_layers=4))
    (folder / "plan.yaml").write_text(json.dumps({"surgeon": 1, "operations": [live.operation(weight)]}))
    surgeon.apply(folder / "plan.yaml", str(base), folder / "out")
    first, second = (1, 2) if live.roles[0].startswith("task") else (0, 1)
    corpus(folder / "first.jsonl", seed=1, first=FIRST[first], count=50)
    corpus(folder / "second.jsonl", seed=2, first=FIRST[second], count=50)
    sources = [
        {"name": name, "path": f"{name}.jsonl", "share": 0.5, "role": role, "validation": 0}
        for name, role in zip(("first", "second"), live.roles, strict=True)
    ]
    settings = {"surgeon_train": 1, "steps": STEPS, "batch": 8, "length": 24, "log_every": 1, "sources": sources}
    optimizer = {"lr": 1e-2, "warmup": 2, "schedule": "constant", "weight_decay": 0.0}
    (folder / "train.yaml").write_text(yaml.safe_dump(settings | {"optimizer": optimizer}))
    run = surgeon.train(folder / "out", folder / "train.yaml", folder / "run", device="cpu")
    assert run is not None
    return folder / "run", [entry["grad_norm"] for entry in run.log if "grad_norm" in entry]


def gradients(model: Any, domains: tuple[int, int]) -> tuple[dict[str, Tensor], Any]:
    model.train()
    model.freeze_base()
    ids = torch.cat([ids_of(domain)[:2] for domain in domains])
    output = model(input_ids=ids, labels=ids, domain_ids=torch.tensor(domains).repeat_interleave(2))
    output.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.eval()
    return found, output


@pytest.mark.parametrize("name", LIVE)
def test_a_loss_changes_gradients_and_brings_its_quantity_down(name: str, tmp_path: Path) -> None:
    live = LIVE[name]
    models, norms = {}, {}
    for weight in (live.off, live.weight):
        folder = tmp_path / str(weight)
        folder.mkdir()
        run, norms[weight] = trained(folder, live, weight)
        models[weight] = load_model(run)
    off, on = models[live.off], models[live.weight]

    # The two runs began as one model on the same data, and the loss has turned the steps.
    assert len(norms[live.off]) == len(norms[live.weight]) == STEPS
    assert norms[live.off] != norms[live.weight]

    # Beside each other at the same weights, those of the run without.
    domains = (1, 2) if live.roles[0].startswith("task") else (0, 1)
    without, output = gradients(off, domains)
    assert live.off or getattr(output, live.field, None) is None
    with_it = type(on)(on.config)
    with_it.load_state_dict(off.state_dict())
    turned, output = gradients(with_it, domains)
    assert float(getattr(output, live.field)) > 0
    assert without.keys() == turned.keys()
    changed = [key for key in without if (turned[key] - without[key]).norm() > 1e-2 * without[key].norm()]
    assert changed

    assert live.measure(on) < live.share * live.measure(off)


def test_every_auxiliary_loss_is_here() -> None:
    assert {live.field for live in LIVE.values()} == {name for rules in GRAFTS.values() for name in rules.losses}
