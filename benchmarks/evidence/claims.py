"""What the papers say, as comparisons of two rows each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Claim:
    """`better` beats `worse`: `forgets` is English loss at equal French loss, `learns` French loss at the end.

    `tried` tells what was done before a result against the paper was believed; it is shown where there is one.
    """

    paper: str
    says: str
    better: str
    worse: str
    on: Literal["forgets", "learns"]
    tried: str = ""


_INITS = (
    "the rate was swept with fused layers themselves; with and without replay; rescaled as the paper's code does, and"
    " with whole heads matched (rows of their own). Fused layers are within a few hundredths, and forget less (New"
    " layers by their start)."
)
_PRO = (
    "both at the rate swept with fused layers. LLaMA PRO's four layers are spread over the stack, OpT-DeUS's stand in"
    " its top half. LLaMA PRO forgets more in turn (the tables above)."
)
_FULL = (
    "both rates were swept. Neutral Residues never comes to full fine-tuning's French, so that one is read in the first"
    " half of its run; where both have ended, Neutral Residues has forgotten less. At three times its swept rate full"
    " fine-tuning has lost more English (the sweep's row, with replay) than Neutral Residues at that French."
)
_ONE_SEED = "at the rate swept for its family; one seed, and little beside what seeds differ by in other rows."
_ADAPTERS = "five rates of adapters and four of LoRA were swept; at p = 0.1 three seeds do not tell them apart."
_CONTROLS = "both at the rate swept with Mixture-of-Control; small beside what seeds differ by in other rows."
_CONTROLS_LORA = (
    "five rates were swept: the one with the best sum of both losses learns little, and at none had it learned as much"
    " French as LoRA after 400 steps; it has a third of LoRA's numbers here."
)

NEUTRAL, CONTROL, DEUS, MOC = "Neutral Residues", "Control LLM", "OpT-DeUS", "Mixture-of-Control"

CLAIMS: tuple[Claim, ...] = (
    Claim(NEUTRAL, "forgets less than vanilla adapters (Table 2)", "nr", "vanilla", "forgets"),
    Claim(NEUTRAL, "learns more than vanilla adapters (Table 2)", "nr", "vanilla", "learns"),
    Claim(NEUTRAL, "forgets less than LoRA (Table 2)", "nr", "lora", "forgets"),
    Claim(NEUTRAL, "learns more than LoRA (Table 2)", "nr", "lora", "learns"),
    Claim(NEUTRAL, "forgets less than full fine-tuning (Table 2)", "nr", "full", "forgets", _FULL),
    Claim(NEUTRAL, "full fine-tuning learns most (Table 2)", "full", "nr", "learns"),
    Claim(NEUTRAL, "vanilla adapters forget less than LoRA (Table 2)", "vanilla", "lora", "forgets", _ADAPTERS),
    Claim(NEUTRAL, "ReLU with ℓ1 forgets less than sigmoid with CE (Table 4)", "nr", "nr-ce", "forgets", _ONE_SEED),
    Claim(NEUTRAL, "ReLU with ℓ1 learns more than sigmoid with CE (Table 4)", "nr", "nr-ce", "learns", _ONE_SEED),
    Claim(NEUTRAL, "low variance learns more than He's (Table 5)", "nr", "nr-he", "learns"),
    Claim(NEUTRAL, "low variance learns more than He's, sigmoid (Table 5)", "nr-ce", "nr-ce-he", "learns"),
    Claim(CONTROL, "Lerp with MSE forgets less than Lerp alone (Table 5)", "lerp-mse", "lerp", "forgets"),
    Claim(CONTROL, "Lerp with MSE forgets less than full fine-tuning (Table 1)", "lerp-mse", "full", "forgets"),
    Claim(CONTROL, "Lerp with MSE forgets less than partial tuning (Table 1)", "lerp-mse", "partial", "forgets"),
    Claim(CONTROL, "Lerp with MSE forgets less than Stack (Table 1)", "lerp-mse", "stack", "forgets"),
    Claim(CONTROL, "Hybrid forgets less than Stack (Table 1)", "hybrid", "stack", "forgets"),
    Claim(CONTROL, "Stack forgets less than partial tuning (Table 1)", "stack", "partial", "forgets"),
    Claim(
        CONTROL,
        "Dlerp forgets less than Lerp, both without divergence (Table 5)",
        "dlerp",
        "lerp",
        "forgets",
        _ONE_SEED,
    ),
    Claim(CONTROL, "DlerpIn learns less than Dlerp (Table 5)", "dlerp", "dlerp-in", "learns"),
    Claim(CONTROL, "Plerp forgets more than Lerp (Table 5)", "lerp", "plerp", "forgets"),
    Claim(CONTROL, "DlerpIn forgets less than MoE (Table 5)", "dlerp-in", "moe", "forgets"),
    Claim(DEUS, "fused learns more than averaged (Table 7)", "ot", "average", "learns", _INITS),
    Claim(DEUS, "fused learns more than copied (Table 7)", "ot", "copy", "learns", _INITS),
    Claim(DEUS, "fused learns more than random (Table 7)", "ot", "random", "learns", _INITS),
    Claim(DEUS, "fused at the top learns more than LLaMA PRO (Table 2)", "ot", "llama-pro", "learns", _PRO),
    Claim(MOC, "learns more than Parallel Control (Table 1)", "moc", "pc", "learns", _CONTROLS),
    Claim(MOC, "learns more than LoRA (Table 1)", "moc", "lora", "learns", _CONTROLS_LORA),
)
