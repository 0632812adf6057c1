"""Control blocks (Control LLM, arXiv:2501.10979, sections 3.2 and 3.3): a layer and its expanded twin, interpolated.

The twin is a layer of the tail that lies inside its trunk layer. Both read the same input, and an interpolator
combines the two outputs. A divergence loss keeps the twin's output near the trunk layer's.

Shapes: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .control_rules import ControlRules, ControlSpec
from .graft import Flow, Graft
from .interpolators import Interpolation, InterpolatorSpec
from .losses import masked_mean
from .newborn import Newborn
from .precision import at_least_fp32
from .rules import Surgery
from .twins import BranchLayer


class Interpolator(Newborn):
    """A module that combines two branches by the equation of `rule`, and holds the rule's tensors."""

    def __init__(self, rule: Interpolation, spec: InterpolatorSpec, width: int) -> None:
        super().__init__()
        self.rule = rule
        self.alpha = float(spec.alpha)
        self.inference_alpha = None if spec.inference_alpha is None else float(spec.inference_alpha)
        self.bear(rule.births(spec, width))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the rule by name."""
        return {name: getattr(self, name) for name in self.births}

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        """Return the combined states, B T D, and α; outside of training α is `inference_alpha`, if one is given."""
        tensors = self.tensors
        if self.training or self.inference_alpha is None:
            share = self.rule.share(tensors, self.alpha, hidden, pretrained, expanded)
        else:
            share = self.inference_alpha
        return self.rule.join(tensors, pretrained, expanded, share), share

    def anchor(self, pretrained: Tensor) -> Tensor:
        """Return the states towards which the divergence pulls the expanded branch, B T D."""
        return self.rule.anchor(self.tensors, pretrained.detach())


class ControlGraft(Graft, ControlRules):
    """The graft that makes control blocks; `interpolators` maps names in the config to interpolators."""

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """Add the twin and the interpolator to a layer with a control block; return whether it has one."""
        block: ControlSpec | None = surgery.of[self.name].get(index)
        if block is None:
            return False
        layer.control = block
        layer.expanded = layer.twin
        rule = self.interpolators[block.interpolator.kind]
        layer.interpolator = Interpolator(rule, block.interpolator, config.hidden_size)
        # The layer also passes on the losses of the twin's own grafts.
        layer.loss_weights |= {"divergence_loss": block.divergence.weight} | layer.expanded.loss_weights
        return True

    def after(self, layer: Any, hidden_states: Tensor, output: Tensor, frame: Flow, run: Any) -> Tensor:
        """Return the combined output of layer and twin, B T D; measure the divergence, where losses are asked for."""
        expanded = run(layer.expanded)
        combined: Tensor
        combined, alpha = layer.interpolator(hidden_states, output, expanded)
        kind = layer.control.divergence.kind
        if frame.valid is not None and kind != "none":
            anchor = layer.interpolator.anchor(output)
            frame.measure("divergence_loss", divergence(kind, anchor, expanded, alpha, frame.valid))
        return combined

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """Return the classes and numbers of twins and interpolators."""
        count = len(surgery.of[self.name])
        return {"branches": (BranchLayer, count), "interpolators": (Interpolator, count)}


def squared_error(anchor: Tensor, expanded: Tensor) -> Tensor:
    """Return the mean over D of the squared difference: B T."""
    return (expanded - anchor).square().mean(dim=-1)


def cosine_distance(anchor: Tensor, expanded: Tensor) -> Tensor:
    """Return 1 − cos, computed as ½‖ê − p̂‖², which is exactly zero for equal states: B T."""
    return (F.normalize(expanded, dim=-1) - F.normalize(anchor, dim=-1)).square().sum(dim=-1) / 2


# For each kind of divergence the distance Δ of two states: B T D each, to B T.
DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": squared_error, "cosine": cosine_distance}


def divergence(kind: str, anchor: Tensor, expanded: Tensor, alpha: float | Tensor, valid: Tensor) -> Tensor:
    """Return E[α Δ(anchor, expanded)] over valid tokens (Control LLM, section 3.3), shape (1,)."""
    distance = DISTANCES[kind](at_least_fp32(anchor), at_least_fp32(expanded))
    if isinstance(alpha, Tensor):
        alpha = alpha.squeeze(-1) if alpha.dim() > 1 else alpha
    return masked_mean(alpha * distance, valid).reshape(1)
