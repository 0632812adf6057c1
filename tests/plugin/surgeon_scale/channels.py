"""An interpolator in one file: it ships in outputs, and previews read it without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from surgeon.runtime.births import Birth, Fill
from surgeon.runtime.interpolators import Interpolation, log_odds

if TYPE_CHECKING:
    from torch import Tensor


class Channels(Interpolation):
    """h = (1 − σ(l)) p + σ(l) e, channel by channel, learned always."""

    key = "channels"
    scalar_alpha = False
    unmergeable = "has an α for every channel"

    def matrices(self, width: int) -> dict[str, Birth]:
        """σ(l) = ½ in every channel."""
        return {"logits": Fill((width,), log_odds(0.5))}

    def learned(self, alpha: float) -> dict[str, Birth]:
        """Nothing more."""
        return {}

    def share(self, tensors: Mapping[str, Tensor], alpha: float, h: Tensor, p: Tensor, e: Tensor) -> float | Tensor:
        """The channels' mean."""
        return tensors["logits"].sigmoid().mean().reshape(1)

    def join(self, tensors: Mapping[str, Tensor], p: Tensor, e: Tensor, alpha: float | Tensor) -> Tensor:
        """Linear interpolation, channel by channel."""
        return p.lerp(e, tensors["logits"].sigmoid().to(p.dtype))


CHANNELS = Channels()
