"""Gated adapters parallel to the FFN (Neutral Residues, arXiv:2410.02744, section 3, figure 2).

Shapes: B batch, T tokens, D hidden size, S adapter size.

The adapter's output joins the FFN's output inside the MLP module. Where a family normalises what the FFN adds
to the residual stream (Gemma 2 and 3, OLMo 2), it is normalised together with it: the adapter speaks in the
FFN's units, an adapter that is silent leaves the layer exactly as it was, and the zero output matrix does not
stand alone under a norm, which would blow its first gradients up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .adapters_rules import AdapterRules, Adapters, AdapterSpec, LocalLossSpec
from .births import Birth
from .graft import Frame, Graft
from .losses import masked_mean
from .newborn import Newborn, Projection
from .present import GATES
from .rules import Surgery

# By the gate's kind: how open it is for its score.
OPENINGS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "sigmoid": torch.sigmoid}


class BlockGate(Newborn):
    """One scalar for each token and block, before its non-linearity: w · x."""

    weight: nn.Parameter

    def __init__(self, birth: Birth) -> None:
        super().__init__()
        self.bear({"weight": birth})

    def forward(self, x: Tensor) -> Tensor:
        """B T D to B T 1."""
        return F.linear(x, self.weight)


class GatedAdapter(nn.Module):
    """g(w · x) · W_o (σ(W_g x) ⊙ W_i x), with σ the backbone's activation and g ReLU, sigmoid or 1."""

    def __init__(self, spec: AdapterSpec, width: int, trunk_layers: int, activation: str) -> None:
        super().__init__()
        births = spec.births(width, trunk_layers)
        self.gate_kind = spec.gate
        self.gate_proj = Projection(births["gate_proj.weight"])
        self.up_proj = Projection(births["up_proj.weight"])
        self.down_proj = Projection(births["down_proj.weight"])
        self.gate = BlockGate(births["gate.weight"]) if "gate.weight" in births else None
        self.act_fn = ACT2FN[activation]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """B T D to the adapter's output, B T D, and the gate before its non-linearity, B T 1."""
        output = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        if self.gate is None:
            return output, None
        score = self.gate(x)
        return self.opening(score) * output, score

    def opening(self, score: Tensor) -> Tensor:
        """How open the gate is."""
        return OPENINGS[self.gate_kind](score)


class AdapterGraft(Graft, AdapterRules):
    """Gated adapters."""

    if GATES:
        remembers_nothing = True

    def blocks(self, surgery: Surgery, index: int) -> tuple[str, ...]:
        """The MLP."""
        return ("mlp",) if index in surgery.of[self.name].by_layer else ()

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """The adapter stands in the MLP. A trunk layer has a part in what its twin's adapter measures."""
        found: Adapters = surgery.of[self.name]
        if index in found.by_layer:
            spec = found.by_layer[index]
            activation = spec.activation or getattr(config, layer.activation_field)
            adapter = GatedAdapter(spec, config.hidden_size, surgery.trunk_layers, activation)
            layer.mlp.adapter, layer.mlp.local_loss = adapter, found.local_loss
        return index in found.by_layer

    def beside(self, block: Any, x: Tensor, output: Tensor, frame: Frame | None) -> Tensor:
        """FFN(x) + adapter(x)."""
        adapted: Tensor
        adapted, score = block.adapter(x)
        if frame is not None and frame.valid is not None and frame.domains is not None:
            measure(block.local_loss, adapted, score, frame, frame.valid, frame.domains)
        return output + adapted

    def weights(self, surgery: Surgery, index: int) -> Mapping[str, float]:
        """The local losses', of adapters in the layer or its twin."""
        found: Adapters = surgery.of[self.name]
        if not any(surgery.homes.get(layer, layer) == index for layer in found.by_layer):
            return {}
        return {"local_l1_loss": found.local_loss.l1, "local_cross_entropy_loss": found.local_loss.cross_entropy}

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """Adapters."""
        return {"adapters": (GatedAdapter, len(surgery.of[self.name].by_layer))}


def measure(
    spec: LocalLossSpec, adapted: Tensor, score: Tensor | None, frame: Frame, valid: Tensor, domains: Tensor
) -> None:
    """One adapter's local losses: ‖output‖₁ / D on original-domain tokens, and its gate's domain cross-entropy on all.

    `adapted` is B T D, `score` the gate before its sigmoid, B T 1; `valid` and `domains` are B T.
    """
    precise = torch.promote_types(adapted.dtype, torch.float32)
    if spec.l1 > 0:
        l1 = adapted.abs().sum(dim=-1, dtype=precise) / adapted.shape[-1]
        frame.measure("local_l1_loss", masked_mean(l1, valid & (domains == 0)))
    if spec.cross_entropy > 0 and score is not None:
        new = (domains > 0).to(precise)
        crossed = F.binary_cross_entropy_with_logits(score.squeeze(-1).to(precise), new, reduction="none")
        frame.measure("local_cross_entropy_loss", masked_mean(crossed, valid))
