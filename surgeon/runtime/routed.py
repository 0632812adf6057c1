"""Routed experts parallel to the FFN: the base's FFN is the shared expert, and a router chooses others for each token.

This is sparse upcycling (Komatsuzaki et al., 2023) with a shared expert, for model types that transformers has no
class with experts for. The routing is that of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2) without its bias. In
training a loss spreads tokens over experts (equations 17 to 20 there, over all tokens of a batch instead of a
sequence).

Shapes: B batch, T tokens, D hidden size, S neurons of an expert, E experts, N all tokens of a batch.

The experts' output is added to the FFN's output inside the MLP module, as adapters' output is. Where a model type
normalises what the FFN adds to the residual stream (Gemma 2 and 3, GLM-4), the sum is normalised.
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
# Added to a sum before a division by it, as in the classes of transformers.
_LEAST = 1e-20


class RoutedExperts(Newborn):
    """The experts of a layer: Σ over the chosen experts e of w_e · W_down,e (σ(W_gate,e x) ⊙ W_up,e x).

    σ is the backbone's activation. For an FFN without a gate a term is w_e · W_down,e σ(W_up,e x). Where the matrices
    that read in the FFN have biases, W x means W x + b.

    An expert's score is the sigmoid of its row of the router times x. The weights w_e are the scores of the chosen
    experts divided by their sum. With one expert a token, w_e is the score itself, else the router would get no
    gradient.
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
        """Return what the experts add to the FFN's output for x (B T D both), and how they were chosen.

        That is: the scores (B T E), the numbers of the chosen experts and their weights (B T top_k both).
        """
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen, weights = self.route(tokens)
        added = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts()):
            mine = torch.where(chosen == number, weights, 0.0).sum(-1, keepdim=True).to(tokens.dtype)
            if torch.compiler.is_compiling():
                # A compiler does not know how many tokens an expert gets: each expert computes all tokens.
                added = added + torch.where(mine > 0, mine * self.expert(tokens, *expert), 0.0)
            else:
                # Run an expert without tokens too: its gradients are then zero, not missing; other processes may wait.
                rows = (chosen == number).any(-1).nonzero().squeeze(-1)
                made = mine[rows] * self.expert(tokens[rows], *expert)
                added = added.index_add(0, rows, made)
        scores, chosen, weights = (each.view(*x.shape[:-1], -1) for each in (scores, chosen, weights))
        return added.view_as(x), scores, chosen, weights

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores, N E in at least fp32, and the chosen experts' numbers and weights, N top_k; tokens are N D."""
        scores = F.linear(at_least_fp32(tokens), at_least_fp32(self.router)).sigmoid()
        weights, chosen = torch.topk(scores, self.top_k, dim=-1, sorted=False)
        if self.top_k > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST)
        return scores, chosen, weights

    def experts(self) -> Iterator[tuple[list[Matrix], Tensor]]:
        """Yield for each expert the matrices that read, each with its bias or None, and the matrix that writes."""
        none = [None] * len(self.down_proj)
        reading = [
            zip(getattr(self, f"{name}_proj"), getattr(self, f"{name}_bias", none), strict=True)
            for name in ("gate", "up")
            if hasattr(self, f"{name}_proj")
        ]
        for *inner, down in zip(*reading, self.down_proj, strict=True):
            yield inner, down

    def expert(self, tokens: Tensor, reading: list[Matrix], down: Tensor) -> Tensor:
        """Return one expert's output for tokens, N D both."""
        first, *more = (F.linear(tokens, matrix, bias) for matrix, bias in reading)
        inner = self.act_fn(first)
        return F.linear(inner * more[0] if more else inner, down)


class RoutedGraft(Graft, RoutedRules):
    """The graft that adds routed experts to the outputs of FFNs."""

    remembers_nothing = True

    def blocks(self, surgery: Surgery, index: int) -> tuple[str, ...]:
        """Return the MLP, where layer `index` has routed experts."""
        return ("mlp",) if index in surgery.of[self.name].by_layer else ()

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """Put the layer's experts into its MLP module; return whether the layer has any."""
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
        """Return FFN(x) + experts(x); measure the loss that spreads tokens, where losses are asked for."""
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
        """Return the class of a layer's experts and the number of layers with experts."""
        return {"layers with routed experts": (RoutedExperts, len(surgery.of[self.name].by_layer))}
