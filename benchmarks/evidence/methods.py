"""What is compared: every method, what its paper says of it, and at which rates it is swept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Rates are a factor √10 apart; a sweep whose best lies at an end goes on beyond it.
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


@dataclass(frozen=True)
class Method:
    """One row of the table.

    `how` is `plan` (a surgery: `plan` names a shipped one), or a peer: `full`, `partial`, `lora`. `family` shares one
    sweep, made with its first method, whose middle rate is `middle`. `headline` rows have several seeds.
    """

    name: str
    label: str
    family: str
    middle: float
    how: Literal["plan", "full", "partial", "lora"] = "plan"
    plan: str = ""
    headline: bool = False


METHODS: tuple[Method, ...] = (
    Method("full", "full fine-tuning", "full", 3e-4, how="full", headline=True),
    Method(
        "lora", "LoRA on the FFN (PEFT), as many numbers as Neutral Residues", "lora", 3e-3, how="lora", headline=True
    ),
    Method("vanilla", "vanilla adapters", "vanilla", 3e-3, plan="neutral-residues/adapters", headline=True),
    Method("nr", "Neutral Residues (ReLU, ℓ1)", "nr", 3e-3, plan="neutral-residues/relu-l1", headline=True),
    Method("ot", "OpT-DeUS, marginal rescale", "insert", 1e-3, plan="opt-deus", headline=True),
    Method("copy", "copied layers, zero-init", "insert", 1e-3, plan="copy", headline=True),
    Method("average", "averaged layers, zero-init", "insert", 1e-3, plan="average", headline=True),
    Method("random", "random layers, zero-init", "insert", 1e-3, plan="random", headline=True),
    Method(
        "lerp-mse", "Control LLM, Lerp with MSE (Concat)", "control", 1e-3, plan="control-llm/lerp8-mse", headline=True
    ),
    Method("lerp", "Control LLM, Lerp without divergence", "control", 1e-3, plan="control-llm/lerp8", headline=True),
    Method("moc", "Mixture-of-Control", "moc", 3e-3, plan="mixture-of-control"),
    Method("pc", "Parallel Control", "moc", 3e-3, plan="mixture-of-control/parallel-control"),
    Method("pmoe", "PMoE, one slot", "pmoe", 3e-3, plan="pmoe"),
    Method("partial", "partial tuning, every 4th layer", "partial", 1e-3, how="partial"),
    Method("llama-pro", "LLaMA PRO stack", "insert", 1e-3, plan="llama-pro"),
    Method("nr-he", "Neutral Residues, He's initialisation", "nr", 3e-3, plan="neutral-residues/relu-l1-he"),
    Method("nr-ce", "Neutral Residues (sigmoid, CE)", "nr", 3e-3, plan="neutral-residues/sigmoid-ce"),
    Method(
        "nr-ce-he",
        "Neutral Residues (sigmoid, CE), He's initialisation",
        "nr",
        3e-3,
        plan="neutral-residues/sigmoid-ce-he",
    ),
    Method("ot-paper", "OpT-DeUS, rescale as its code", "insert", 1e-3, plan="opt-deus/paper-rescale"),
    Method("ot-heads", "OpT-DeUS, whole heads", "insert", 1e-3, plan="opt-deus/head-blocks"),
    Method("dlerp", "Control LLM, Dlerp", "control", 1e-3, plan="control-llm/dlerp8"),
    Method("dlerp-in", "Control LLM, DlerpIn", "control", 1e-3, plan="control-llm/dlerp-in8"),
    Method("moe", "Control LLM, MoE", "control", 1e-3, plan="control-llm/moe8"),
    Method("plerp", "Control LLM, Plerp", "control", 1e-3, plan="control-llm/plerp8"),
    Method("stack", "Control LLM, Stack", "control", 1e-3, plan="control-llm/stack"),
    Method("hybrid", "Control LLM, Hybrid (MSE)", "control", 1e-3, plan="control-llm/hybrid"),
)

SHARES = (0.1, 0.0)
# Of the headline rows; the others have one.
SEEDS = 3
# Method, share of replay and seed of every full run.
PLANNED = tuple(
    (method.name, share, seed)
    for share in SHARES
    for method in METHODS
    for seed in range(SEEDS if method.headline else 1)
)

BY_NAME = {method.name: method for method in METHODS}


def leader(family: str) -> Method:
    """The method whose sweep sets the rate of a family."""
    return next(method for method in METHODS if method.family == family)
