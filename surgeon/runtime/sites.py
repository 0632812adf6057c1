"""A layer's blocks with something beside them: attention with a control state, MLP with an adapter and one."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .adapters import GatedAdapter
from .frames import AdapterRecord, current_frame
from .precision import at_least_fp32
from .specs import AdapterSpec


class AttentionSite(nn.Module):
    """Mixed in before a family's attention: adds a control state to what it puts out."""

    def __init__(self, config: Any, layer_idx: int, site: int) -> None:
        super().__init__(config, layer_idx)
        self.site = site

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The native output and weights, B T D the output."""
        output, *rest = super().forward(hidden_states, *args, **kwargs)
        return output + site_control(self.site, hidden_states), *rest


class FeedForwardSite(nn.Module):
    """Mixed in before a family's MLP: adds what an adapter and a control state put out to the FFN's output."""

    # The config field that names the backbone's activation.
    activation_field: ClassVar[str] = "hidden_act"

    def __init__(self, config: Any, spec: AdapterSpec | None, trunk_layers: int, site: int | None = None) -> None:
        super().__init__(config)
        self.adapter = None
        if spec is not None:
            activation = getattr(config, self.activation_field)
            self.adapter = GatedAdapter(spec, config.hidden_size, trunk_layers, activation)
        self.site = site

    def forward(self, x: Tensor) -> Tensor:
        """FFN(x) + adapter(x) + control(x)."""
        output: Tensor = super().forward(x)
        if self.adapter is not None:
            output = output + self._adapted(self.adapter, x)
        if self.site is not None:
            output = output + site_control(self.site, x)
        return output

    def _adapted(self, adapter: GatedAdapter, x: Tensor) -> Tensor:
        adapted: Tensor
        adapted, score = adapter(x)
        frame = current_frame()
        if frame is not None and frame.records is not None:
            precise = torch.promote_types(adapted.dtype, torch.float32)
            l1 = adapted.abs().sum(dim=-1, dtype=precise) / adapted.shape[-1]
            gate_logit = None if score is None else at_least_fp32(score).squeeze(-1)
            frame.records.append(AdapterRecord(l1, gate_logit))
        return adapted


def site_control(site: int, x: Tensor) -> Tensor:
    """What a site adds, in the layer that runs; B T D."""
    frame = current_frame()
    if frame is None or frame.mixing is None:
        raise RuntimeError("a block with a control state was called outside its layer, which brings the bank")
    return frame.mixing.control(site, x, frame)
