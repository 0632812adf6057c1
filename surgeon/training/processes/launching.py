"""The way a run was launched: the sharding that it requests, and options of `accelerate launch` that are rejected."""

from __future__ import annotations

import os
from dataclasses import dataclass

from surgeon.errors import BadInput, printable
from surgeon.training.config.schema import TrainConfig

# The environment variable by which `accelerate launch` requests FSDP.
USE_FSDP = "ACCELERATE_USE_FSDP"

_REFUSED = {
    "FSDP_OFFLOAD_PARAMS": "parameters stay on their device; launch without `fsdp_offload_params`",
    "FSDP_ACTIVATION_CHECKPOINTING": "say `checkpointing: true` in the training config instead",
}


@dataclass(frozen=True)
class Sharding:
    """How to shard. `reshard`: a layer's weights are freed after its forward, and gathered again for its backward."""

    reshard: bool = True


def requested_sharding(config: TrainConfig) -> Sharding | None:
    """Return the sharding that the config or `accelerate launch` requests; None: neither requests one.

    Raises BadInput for options of `accelerate launch` that are not supported.
    """
    _check_launcher()
    if not _says_yes(USE_FSDP):
        return Sharding() if config.sharding == "fsdp" else None
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise BadInput(
            f"{USE_FSDP} is set, with FSDP_VERSION {printable(version)}: `surgeon train` runs under FSDP2; launch with"
            " `--fsdp_version 2`, or say `sharding: fsdp` in the training config and use torchrun"
        )
    for variable, instead in _REFUSED.items():
        if _says_yes(variable):
            raise BadInput(f"{variable} is set: `surgeon train` does not do this under FSDP2; {instead}")
    return Sharding(reshard=os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false")


def _check_launcher() -> None:
    """Raise BadInput where `accelerate launch` requests DeepSpeed or mixed precision."""
    if _says_yes("ACCELERATE_USE_DEEPSPEED"):
        raise BadInput(
            "ACCELERATE_USE_DEEPSPEED is set: `surgeon train` does not run under DeepSpeed; use torchrun, with"
            " `sharding: fsdp` in the training config where the model is to be sharded"
        )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision != "no":
        raise BadInput(
            f"ACCELERATE_MIXED_PRECISION is {printable(precision)}: the model would compute in another dtype than it"
            " has; launch with `--mixed_precision no`, and say `dtype: bfloat16` in the training config"
        )


def _says_yes(variable: str) -> bool:
    """Return whether an environment variable is 1, true or yes."""
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")
