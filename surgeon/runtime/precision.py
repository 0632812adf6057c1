"""Where rounding would matter, at least fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, or as it is where it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
