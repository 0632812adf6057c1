"""Gated adapters parallel to the FFN (Neutral Residues, arXiv:2410.02744, section 3, figure 2).

Shapes: B batch, T tokens, D hidden size. The adapter's output joins the FFN's inside the MLP module. Where a family
normalises what the FFN adds to the residual stream (Gemma 2 and 3, OLMo 2), it is normalised together with it: then a
silent adapter leaves the layer exactly as it was, and the zero output matrix does not stand alone under a norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers.initialization as init
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .adapters_rules import AdapterRules, AdapterSpec
from .graft import Flow, Graft
from .losses import masked_mean
from .newborn import Leaf
from .rules import Surgery


class SilentLinear(Leaf, nn.Linear):
    """A matrix that writes."""


class BlockGate(Leaf):
    """One scalar for each token and block, before its non-linearity: w · x. No `nn.Linear`, which quantisers take."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width))

    def initialise(self) -> None:
        """As transformers fills matrices."""
        init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """B T D to B T 1."""
        return F.linear(x, self.weight)


class GatedAdapter(nn.Module):
    """g(w · x) · W_o (σ(W_g x) ⊙ W_i x), with σ the backbone's activation and g ReLU, sigmoid or 1."""

    def __init__(self, spec: AdapterSpec, width: int, activation: str) -> None:
        super().__init__()
        self.spec = spec
        self.gate_proj = nn.Linear(width, spec.size, bias=False)
        self.up_proj = nn.Linear(width, spec.size, bias=False)
        self.down_proj = SilentLinear(spec.size, width, bias=False)
        self.gate = None if spec.gate == "none" else BlockGate(width)
        self.act_fn = ACT2FN[activation]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """B T D to the adapter's output, B T D, and the gate before its non-linearity, B T 1."""
        output = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        score = None if self.gate is None else self.gate(x)
        return output if score is None else self.opening(score) * output, score

    def opening(self, score: Tensor) -> Tensor:
        """How open the gate is for a score."""
        return F.relu(score) if self.spec.gate == "relu" else torch.sigmoid(score)


class AdapterGraft(Graft, AdapterRules):
    """Gated adapters."""

    remembers_nothing = True

    def blocks(self, surgery: Surgery, index: int) -> tuple[str, ...]:
        """The MLP."""
        return ("mlp",) if index in surgery.of[self.name] else ()

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """The adapter stands in the MLP."""
        spec: AdapterSpec | None = surgery.of[self.name].get(index)
        if spec is not None:
            activation = spec.activation or getattr(config, layer.activation_field)
            layer.mlp.adapter = GatedAdapter(spec, config.hidden_size, activation)
            layer.loss_weights |= {"local_l1_loss": spec.l1, "local_cross_entropy_loss": spec.cross_entropy}
        return spec is not None

    def beside(self, block: Any, x: Tensor, output: Tensor, frame: Flow | None) -> Tensor:
        """FFN(x) + adapter(x)."""
        made: tuple[Tensor, Tensor | None] = block.adapter(x)
        if frame is not None and frame.valid is not None and frame.domains is not None:
            measure(block.adapter.spec, made[0], made[1], frame, frame.valid, frame.domains)
        return output + made[0]

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """Adapters."""
        return {"adapters": (GatedAdapter, len(surgery.of[self.name]))}


def measure(spec: AdapterSpec, adapted: Tensor, score: Any, frame: Flow, valid: Tensor, domains: Tensor) -> None:
    """The local losses of an adapter, of its output (B T D) and the gate before its sigmoid (B T 1)."""
    valid, domains = valid.to(adapted.device), domains.to(adapted.device)
    precise = torch.promote_types(adapted.dtype, torch.float32)
    if spec.l1 > 0:
        # ‖output‖₁ / D on tokens of the original domain.
        l1 = adapted.abs().sum(dim=-1, dtype=precise) / adapted.shape[-1]
        frame.measure("local_l1_loss", masked_mean(l1, valid & (domains == 0)))
    if spec.cross_entropy > 0 and score is not None:
        # The gate classifies domains, on all tokens.
        new = (domains > 0).to(precise)
        crossed = F.binary_cross_entropy_with_logits(score.squeeze(-1).to(precise), new, reduction="none")
        frame.measure("local_cross_entropy_loss", masked_mean(crossed, valid))
