"""What each paper trained its operation with. Everything here can be overridden in train.yaml.

Where a paper does not say, the value is transformers' or, for warm-up, 3 % of the steps; `source` tells which is which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class Defaults:
    """Of one operation: the optimizer's settings, and the share of original text mixed in (p).

    `lr` is the peak, `min_lr` what it ends at; `warmup` is a number of steps or a share (0 to 1) of them; `betas` are
    AdamW's; `weight_decay` is AdamW's coefficient, to which `decay_of_rate` · `lr` is added; `clip` bounds the
    gradient's norm; `batch` counts sequences of `length` tokens.
    """

    source: str
    lr: float
    min_lr: float = 0.0
    schedule: Schedule = "cosine"
    warmup: int | float = 0.03
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    decay_of_rate: float = 0.0
    clip: float = 1.0
    batch: int = 64
    length: int = 2048
    original_share: float = 0.0


_OPT_DEUS = Defaults("OpT-DeUS, section 5.5: 1e-4 (1.7B models; 5e-5 for 11.5B), 64 sequences of 2048", lr=1e-4)


# The operation's key in plans → its paper's values.
DEFAULTS: dict[str, Defaults] = {
    "insert_layers": _OPT_DEUS,
    "stack_layers": _OPT_DEUS,
    "control_llm": Defaults(
        "Control LLM, section 3.3: AdamW, 5e-5 to 1e-5, cosine, 1000 warm-up steps; weight decay 10 % of the rate",
        lr=5e-5,
        min_lr=1e-5,
        warmup=1000,
        decay_of_rate=0.1,
        batch=512,
    ),
    "gated_adapters": Defaults(
        "Neutral Residues, section 4.1 and Table 8: 2e-4, betas 0.9 and 0.95, 64 sequences of 4096, p = 0.1",
        lr=2e-4,
        betas=(0.9, 0.95),
        length=4096,
        original_share=0.1,
    ),
    "mixture_of_control": Defaults(
        "Mixture-of-Control, Tables 4 and 5: 3e-4, linear, warm-up 6 %, weight decay 0.01, 32 sequences of 256",
        lr=3e-4,
        schedule="linear",
        warmup=0.06,
        weight_decay=0.01,
        batch=32,
        length=256,
    ),
    "pmoe_experts": Defaults(
        "PMoE, section 3.2.3: 3e-4, cosine, batches of 128, 1 % replay", lr=3e-4, batch=128, original_share=0.01
    ),
    "merge_branches": Defaults("Control LLM's rate, as for control_llm", lr=5e-5, min_lr=1e-5, decay_of_rate=0.1),
}


def defaults_for(operations: Sequence[str]) -> Defaults:
    """Those of the last operation whose tensors train. `operations` are keys in plans, at least one."""
    return DEFAULTS[operations[-1]]
