"""Routed experts beside the FFN: the base's FFN as the expert that every token passes, others that a router chooses.

Sparse upcycling (Komatsuzaki et al., 2023) with a shared expert, routed as in DeepSeek-V3 (arXiv:2412.19437, section
2.1.2) without its bias: for model types that no class of transformers with experts holds. In training a loss spreads
tokens over experts (equations 17 to 20 there, over a batch's tokens together instead of a sequence's).

Shapes: B batch, T tokens, D hidden size, S neurons of an expert, E experts, N all tokens of a batch.

What experts add joins the FFN's output inside the MLP module, as adapters' output does: where a family normalises
what the FFN adds (Gemma 2 and 3, GLM-4), it is normalised together with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .graft import Flow, Graft
from .losses import balance_loss
from .newborn import Newborn
from .precision import at_least_fp32
from .routed_rules import Routed, RoutedRules, RoutedSpec
from .rules import Surgery

Matrix = tuple[Tensor, Tensor | None]
# Against a sum of zero, as the classes of transformers have it.
_LEAST = 1e-20


class RoutedExperts(Newborn):
    """Σ over the chosen experts e of w_e · W_down,e (σ(W_gate,e x) ⊙ W_up,e x), σ being the backbone's activation.

    Beside an FFN without a gate it is w_e · W_down,e σ(W_up,e x); where the FFN has biases, W x stands for W x + b.

    Scores are sigmoids of the router's rows; the weights w_e are the scores of those chosen divided by their sum, and
    with one expert a token its score itself, else the router would get no gradient.
    """

    router: nn.Parameter
    up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, spec: RoutedSpec, width: int, activation: str) -> None:
        super().__init__()
        self.bear(spec.births(width))
        self.top_k = spec.top_k
        self.act_fn = ACT2FN[activation]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the experts add to the FFN's output for x, B T D both; all scores, those chosen and their weights.

        Scores are B T E, the numbers of the chosen experts and their weights B T top_k.
        """
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen, weights = self.route(tokens)
        added = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts()):
            mine = torch.where(chosen == number, weights, 0.0).sum(-1, keepdim=True).to(tokens.dtype)
            if torch.compiler.is_compiling():
                # How many tokens an expert gets is not known to a compiler: it computes all of them.
                added = added + torch.where(mine > 0, mine * self.expert(tokens, *expert), 0.0)
            else:
                # None too: then the expert gets gradients of zero, as other processes may wait for some.
                rows = (chosen == number).any(-1).nonzero().squeeze(-1)
                made = mine[rows] * self.expert(tokens[rows], *expert)
                added = added.index_add(0, rows, made)
        scores, chosen, weights = (each.view(*x.shape[:-1], -1) for each in (scores, chosen, weights))
        return added.view_as(x), scores, chosen, weights

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """N D to scores, N E in at least fp32, the numbers of the chosen experts and their weights, N top_k both."""
        scores = F.linear(at_least_fp32(tokens), at_least_fp32(self.router)).sigmoid()
        weights, chosen = torch.topk(scores, self.top_k, dim=-1, sorted=False)
        if self.top_k > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST)
        return scores, chosen, weights

    def experts(self) -> Iterator[tuple[list[Matrix], Tensor]]:
        """Of one expert after the other what reads, each a matrix and a bias or none, and what writes."""
        none = [None] * len(self.down_proj)
        reading = [
            zip(getattr(self, f"{name}_proj"), getattr(self, f"{name}_bias", none), strict=True)
            for name in ("gate", "up")
            if hasattr(self, f"{name}_proj")
        ]
        for *inner, down in zip(*reading, self.down_proj, strict=True):
            yield inner, down

    def expert(self, tokens: Tensor, reading: list[Matrix], down: Tensor) -> Tensor:
        """What one expert makes of tokens, N D both."""
        first, *more = (F.linear(tokens, matrix, bias) for matrix, bias in reading)
        inner = self.act_fn(first)
        return F.linear(inner * more[0] if more else inner, down)


class RoutedGraft(Graft, RoutedRules):
    """Routed experts."""

    remembers_nothing = True

    def blocks(self, surgery: Surgery, index: int) -> tuple[str, ...]:
        """The MLP."""
        return ("mlp",) if index in surgery.of[self.name].by_layer else ()

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """The experts stand in the MLP."""
        found: Routed = surgery.of[self.name]
        if index in found.by_layer:
            spec = found.by_layer[index]
            activation = spec.activation or getattr(config, layer.activation_field)
            layer.mlp.routed = RoutedExperts(spec, config.hidden_size, activation)
            layer.mlp.balanced = found.balanced(index)
            if layer.mlp.balanced:
                layer.loss_weights["routed_balance_loss"] = found.loss.balance
        return index in found.by_layer

    def beside(self, block: Any, x: Tensor, output: Tensor, frame: Flow | None) -> Tensor:
        """FFN(x) + experts(x)."""
        added: Tensor
        added, scores, *_ = block.routed(x)
        if block.balanced and frame is not None and frame.valid is not None:
            valid = frame.valid
            if self.name in frame.gated and frame.on is not None:
                valid = valid & frame.on.to(valid.device)
            shares = scores / (scores.sum(dim=-1, keepdim=True) + _LEAST)
            frame.measure("routed_balance_loss", balance_loss(shares, valid, block.routed.top_k))
        return output + added

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """Experts of layers."""
        return {"layers with routed experts": (RoutedExperts, len(surgery.of[self.name].by_layer))}
