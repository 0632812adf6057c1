"""The way a run was launched: `accelerate launch` may start its processes, and decides nothing else about it."""

from __future__ import annotations

import os

from surgeon.errors import BadInput, printable

# Variables by which `accelerate launch` requests what the training config decides, and what to do instead.
_REFUSED = {
    "ACCELERATE_USE_FSDP": "launch without `--use_fsdp`, and say `sharding: fsdp` in the training config",
    "ACCELERATE_USE_DEEPSPEED": "launch without `--use_deepspeed`, and say `sharding: fsdp` in the training config"
    " where the model is to be sharded",
}


def check_launcher() -> None:
    """Raise BadInput where `accelerate launch` requests FSDP, DeepSpeed or mixed precision."""
    for variable, instead in _REFUSED.items():
        if os.environ.get(variable, "").lower() in ("1", "true", "yes"):
            raise BadInput(f"{variable} is set, and `surgeon train` does not run under it; {instead}")
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision != "no":
        raise BadInput(
            f"ACCELERATE_MIXED_PRECISION is {printable(precision)}: the model would compute in another dtype than it"
            " has; launch with `--mixed_precision no`, and say `dtype: bfloat16` in the training config"
        )
