"""The precision in which sums and exponentials are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Return `x` in fp32, or unchanged where its dtype is wider."""
    import torch

    return x.to(torch.promote_types(x.dtype, torch.float32))
