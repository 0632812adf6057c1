"""Gated adapters parallel to the FFN (Neutral Residues, arXiv:2410.02744, section 3, figure 2).

Shapes: B batch, T tokens, D hidden size. The adapter's output is added to the FFN's output inside the MLP module.
Where a model type normalises what the FFN adds to the residual stream (Gemma 2 and 3, OLMo 2), the sum is normalised.
So a silent adapter leaves the layer exactly as it was, and no norm gets only the zeros of a silent adapter.
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
    """An adapter's output matrix; zero at birth."""


class BlockGate(Leaf):
    """A gate score for each token, w · x, before the non-linearity; no `nn.Linear`, as quantisers replace those."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width))

    def initialise(self) -> None:
        """Fill w with normal values of std 0.02, as transformers fills matrices."""
        init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the score w · x: B T D to B T 1."""
        return F.linear(x, self.weight)


class GatedAdapter(nn.Module):
    """A gated adapter, g(w · x) · W_o (σ(W_g x) ⊙ W_i x), with σ the backbone's activation and g ReLU, sigmoid or 1."""

    def __init__(self, spec: AdapterSpec, width: int, activation: str) -> None:
        super().__init__()
        self.spec = spec
        self.gate_proj = nn.Linear(width, spec.size, bias=False)
        self.up_proj = nn.Linear(width, spec.size, bias=False)
        self.down_proj = SilentLinear(spec.size, width, bias=False)
        self.gate = None if spec.gate == "none" else BlockGate(width)
        self.act_fn = ACT2FN[activation]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the adapter's output for x, B T D both, and the gate's score, B T 1; None: there is no gate."""
        output = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        score = None if self.gate is None else self.gate(x)
        return output if score is None else self.opening(score) * output, score

    def opening(self, score: Tensor) -> Tensor:
        """Return g(score), by which the adapter's output is multiplied."""
        return F.relu(score) if self.spec.gate == "relu" else torch.sigmoid(score)


class AdapterGraft(Graft, AdapterRules):
    """The graft that adds gated adapters to the outputs of FFNs."""

    remembers_nothing = True

    def blocks(self, surgery: Surgery, index: int) -> tuple[str, ...]:
        """Return the MLP, where layer `index` has an adapter."""
        return ("mlp",) if index in surgery.of[self.name] else ()

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """Put the layer's adapter into its MLP module; return whether the layer has one."""
        spec: AdapterSpec | None = surgery.of[self.name].get(index)
        if spec is not None:
            activation = spec.activation or getattr(config, layer.activation_field)
            layer.mlp.adapter = GatedAdapter(spec, config.hidden_size, activation)
            layer.loss_weights |= {"local_l1_loss": spec.l1, "local_cross_entropy_loss": spec.cross_entropy}
        return spec is not None

    def beside(self, block: Any, x: Tensor, output: Tensor, frame: Flow | None) -> Tensor:
        """Return FFN(x) + adapter(x); measure the local losses, where losses are asked for and domains are known."""
        made: tuple[Tensor, Tensor | None] = block.adapter(x)
        if frame is not None and frame.valid is not None and frame.domains is not None:
            measure(block.adapter.spec, made[0], made[1], frame, frame.valid, frame.domains)
        return output + made[0]

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """Return the class and the number of adapters."""
        return {"adapters": (GatedAdapter, len(surgery.of[self.name]))}


def measure(spec: AdapterSpec, adapted: Tensor, score: Any, frame: Flow, valid: Tensor, domains: Tensor) -> None:
    """Add an adapter's local losses to the frame, from its output (B T D) and its gate's score (B T 1; None: no gate).

    `valid` (B T, bool): the tokens that count. `domains` (B T): 0 is the original domain.
    """
    valid, domains = valid.to(adapted.device), domains.to(adapted.device)
    precise = torch.promote_types(adapted.dtype, torch.float32)
    if spec.l1 > 0:
        # The mean of ‖output‖₁ / D over tokens of the original domain.
        l1 = adapted.abs().sum(dim=-1, dtype=precise) / adapted.shape[-1]
        frame.measure("local_l1_loss", masked_mean(l1, valid & (domains == 0)))
    if spec.cross_entropy > 0 and score is not None:
        # The gate as a classifier of new domains, over all tokens.
        new = (domains > 0).to(precise)
        crossed = F.binary_cross_entropy_with_logits(score.squeeze(-1).to(precise), new, reduction="none")
        frame.measure("local_cross_entropy_loss", masked_mean(crossed, valid))
