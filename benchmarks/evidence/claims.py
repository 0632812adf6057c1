"""What the papers say, as comparisons of two rows each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Claim:
    """`better` beats `worse`: `forgets` is English loss at equal French loss, `learns` French loss at the end."""

    paper: str
    says: str
    better: str
    worse: str
    on: Literal["forgets", "learns"]


NEUTRAL, CONTROL, DEUS, MOC = "Neutral Residues", "Control LLM", "OpT-DeUS", "Mixture-of-Control"

CLAIMS: tuple[Claim, ...] = (
    Claim(NEUTRAL, "forgets less than vanilla adapters (Table 2)", "nr", "vanilla", "forgets"),
    Claim(NEUTRAL, "learns more than vanilla adapters (Table 2)", "nr", "vanilla", "learns"),
    Claim(NEUTRAL, "forgets less than LoRA (Table 2)", "nr", "lora", "forgets"),
    Claim(NEUTRAL, "learns more than LoRA (Table 2)", "nr", "lora", "learns"),
    Claim(NEUTRAL, "forgets less than full fine-tuning (Table 2)", "nr", "full", "forgets"),
    Claim(NEUTRAL, "full fine-tuning learns most (Table 2)", "full", "nr", "learns"),
    Claim(NEUTRAL, "vanilla adapters forget less than LoRA (Table 2)", "vanilla", "lora", "forgets"),
    Claim(NEUTRAL, "ReLU with ℓ1 forgets less than sigmoid with CE (Table 4)", "nr", "nr-ce", "forgets"),
    Claim(NEUTRAL, "ReLU with ℓ1 learns more than sigmoid with CE (Table 4)", "nr", "nr-ce", "learns"),
    Claim(NEUTRAL, "low variance learns more than He's (Table 5)", "nr", "nr-he", "learns"),
    Claim(NEUTRAL, "low variance learns more than He's, sigmoid (Table 5)", "nr-ce", "nr-ce-he", "learns"),
    Claim(CONTROL, "Lerp with MSE forgets less than Lerp alone (Table 5)", "lerp-mse", "lerp", "forgets"),
    Claim(CONTROL, "Lerp with MSE forgets less than full fine-tuning (Table 1)", "lerp-mse", "full", "forgets"),
    Claim(CONTROL, "Lerp with MSE forgets less than partial tuning (Table 1)", "lerp-mse", "partial", "forgets"),
    Claim(CONTROL, "Lerp with MSE forgets less than Stack (Table 1)", "lerp-mse", "stack", "forgets"),
    Claim(CONTROL, "Hybrid forgets less than Stack (Table 1)", "hybrid", "stack", "forgets"),
    Claim(CONTROL, "Stack forgets less than partial tuning (Table 1)", "stack", "partial", "forgets"),
    Claim(CONTROL, "Dlerp forgets less than Lerp, both without divergence (Table 5)", "dlerp", "lerp", "forgets"),
    Claim(CONTROL, "DlerpIn learns less than Dlerp (Table 5)", "dlerp", "dlerp-in", "learns"),
    Claim(CONTROL, "Plerp forgets more than Lerp (Table 5)", "lerp", "plerp", "forgets"),
    Claim(CONTROL, "DlerpIn forgets less than MoE (Table 5)", "dlerp-in", "moe", "forgets"),
    Claim(DEUS, "fused learns more than averaged (Table 7)", "ot", "average", "learns"),
    Claim(DEUS, "fused learns more than copied (Table 7)", "ot", "copy", "learns"),
    Claim(DEUS, "fused learns more than random (Table 7)", "ot", "random", "learns"),
    Claim(DEUS, "fused at the top learns more than LLaMA PRO (Table 2)", "ot", "llama-pro", "learns"),
    Claim(MOC, "learns more than Parallel Control (Table 1)", "moc", "pc", "learns"),
    Claim(MOC, "learns more than LoRA (Table 1)", "moc", "lora", "learns"),
)
