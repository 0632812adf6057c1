"""Gated adapters parallel to the FFN (Neutral Residues, arXiv:2410.02744, section 3, figure 2).

Shapes: B batch, T tokens, D hidden size, S adapter size.

The adapter's output joins the FFN's output inside the MLP module. Where a family normalises what the FFN adds
to the residual stream (Gemma 2 and 3, OLMo 2), it is normalised together with it: the adapter speaks in the
FFN's units, an adapter that is silent leaves the layer exactly as it was, and the zero output matrix does not
stand alone under a norm, which would blow its first gradients up.
"""

from __future__ import annotations

import math

import torch
import transformers.initialization as init
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .specs import AdapterSpec


class InputProjection(nn.Linear):
    """W_g or W_i: no bias, normal with standard deviation `std`."""

    def __init__(self, width: int, size: int, std: float) -> None:
        super().__init__(width, size, bias=False)
        self.std = std

    def initialise(self) -> None:
        """The variance of the paper's initialisation."""
        init.normal_(self.weight, mean=0.0, std=self.std)


class OutputProjection(nn.Linear):
    """W_o: no bias, zero at birth."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__(size, width, bias=False)

    def initialise(self) -> None:
        """Zero: the adapter starts silent."""
        init.zeros_(self.weight)


class BlockGate(nn.Module):
    """One scalar for each token and block, before its non-linearity: w · x."""

    def __init__(self, width: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width))
        self.std = std

    def forward(self, x: Tensor) -> Tensor:
        """B T D to B T 1."""
        return F.linear(x, self.weight)

    def initialise(self) -> None:
        """The variance of the paper's initialisation."""
        init.normal_(self.weight, mean=0.0, std=self.std)


class GatedAdapter(nn.Module):
    """g(w · x) · W_o (σ(W_g x) ⊙ W_i x), with σ the backbone's activation and g ReLU, sigmoid or 1."""

    def __init__(self, spec: AdapterSpec, width: int, trunk_layers: int, activation: str) -> None:
        super().__init__()
        std = input_std(spec.init, width, trunk_layers)
        self.gate_kind = spec.gate
        self.gate_proj = InputProjection(width, spec.size, std)
        self.up_proj = InputProjection(width, spec.size, std)
        self.down_proj = OutputProjection(spec.size, width)
        self.gate = None if spec.gate == "none" else BlockGate(width, std)
        self.act_fn = ACT2FN[activation]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """B T D to the adapter's output, B T D, and the gate before its non-linearity, B T 1."""
        output = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        if self.gate is None:
            return output, None
        score = self.gate(x)
        gate = F.relu(score) if self.gate_kind == "relu" else torch.sigmoid(score)
        return gate * output, score


def input_std(kind: str, width: int, trunk_layers: int) -> float:
    """Standard deviation of W_g, W_i and the gate: variance 1/(d·L), or He's 2/d."""
    return math.sqrt(1.0 / (width * trunk_layers)) if kind == "low_variance" else math.sqrt(2.0 / width)
