"""Control blocks (Control LLM, arXiv:2501.10979, sections 3.2 and 3.3): a layer and its expanded twin, interpolated.

The twin is a layer of the tail, moved beside its trunk layer: both read the same input, and an interpolator makes one
of the two branches.

Shapes: B batch, T tokens, D hidden size. Every interpolator maps (input, pre-trained, expanded), all B T D, to the
combined states and to α, the share of the expanded branch: a float, a tensor of shape (1,) or of B T 1.
Written as p + α (e − p) (`torch.lerp`), the result is bit-exactly p where e equals p, whatever α is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .control_rules import INTERPOLATORS, ControlRules, ControlSpec, InterpolatorRule, InterpolatorSpec, log_odds
from .graft import Frame, Graft
from .layers import BranchLayer
from .losses import masked_mean
from .newborn import Newborn, at_least_fp32
from .rules import Surgery

_RULES = {rule.key: rule for rule in INTERPOLATORS}

# Below this angle (radians) slerp's share differs from α by less than fp32 can hold.
SMALL_ANGLE = 1e-3


class Interpolator(Newborn):
    """Two branches become one; its tensors and their values at birth are those of its `rule`."""

    rule: ClassVar[InterpolatorRule]

    def __init__(self, spec: InterpolatorSpec, width: int) -> None:
        super().__init__()
        self.alpha = float(spec.alpha)
        self.inference_alpha = None if spec.inference_alpha is None else float(spec.inference_alpha)
        self.bear(self.rule.births(spec, width), absent=tuple(self.rule.learned(0.5)))

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        """Combined states B T D, and α."""
        raise NotImplementedError

    def anchor(self, pretrained: Tensor) -> Tensor:
        """What the divergence pulls the expanded branch towards: the pre-trained states, detached."""
        return pretrained.detach()


class ScalarInterpolator(Interpolator):
    """One α for all tokens: fixed, or the learned σ(`logit`); in eval, `inference_alpha` if one is given."""

    logit: nn.Parameter | None

    def share(self, like: Tensor) -> float | Tensor:
        """α for this forward, in `like`'s dtype where it is a tensor."""
        if not self.training and self.inference_alpha is not None:
            return self.inference_alpha
        if self.logit is None:
            return self.alpha
        return torch.sigmoid(at_least_fp32(self.logit)).to(like.dtype)


class Lerp(ScalarInterpolator):
    """h = (1 − α) p + α e."""

    rule = _RULES["lerp"]

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        """Linear interpolation with one α."""
        alpha = self.share(pretrained)
        return torch.lerp(pretrained, expanded, alpha), alpha


class Plerp(ScalarInterpolator):
    """h = (1 − α) W p + α e; `weight` holds W − I, so that zeros are the exact identity.

    W itself would lose its updates in bf16: beside the 1 of its diagonal they round away.
    """

    rule = _RULES["plerp"]
    weight: nn.Parameter

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        """Linear interpolation of the lateral layer's output and the expanded branch."""
        alpha = self.share(pretrained)
        return torch.lerp(pretrained + F.linear(pretrained, self.weight), expanded, alpha), alpha


class Proj(Lerp):
    """Lerp whose divergence compares e with W p; `weight` is W − I. From the public code, not the paper.

    W takes no part in the combined states.
    """

    rule = _RULES["proj"]
    weight: nn.Parameter

    def anchor(self, pretrained: Tensor) -> Tensor:
        """W p, with p detached: the loss trains W and the expanded branch."""
        fixed = pretrained.detach()
        return fixed + F.linear(fixed, self.weight)


class Slerp(ScalarInterpolator):
    """Spherical interpolation: sin((1−α)θ)/sin θ · p + sin(αθ)/sin θ · e, θ the angle between p and e.

    From the public code, not the paper. Computed as (sum of the factors) · lerp(p, e, share of the second),
    with θ from the chord of the unit vectors, so that equal branches give θ = 0, a sum of 1 and exactly p.
    """

    rule = _RULES["slerp"]

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        """Interpolation along the arc, in at least fp32."""
        alpha = self.share(pretrained)
        p, e = at_least_fp32(pretrained), at_least_fp32(expanded)
        unit_p, unit_e = F.normalize(p, dim=-1), F.normalize(e, dim=-1)
        chord = torch.linalg.vector_norm(unit_e - unit_p, dim=-1, keepdim=True)
        sagitta = torch.linalg.vector_norm(unit_e + unit_p, dim=-1, keepdim=True)
        # Opposite vectors have no arc between them; stop just short of a half turn.
        theta = (2 * torch.atan2(chord, sagitta)).clamp(max=math.pi - SMALL_ANGLE)
        small = theta < SMALL_ANGLE
        safe = torch.where(small, torch.ones_like(theta), theta)
        total = torch.cos((0.5 - alpha) * theta) / torch.cos(theta / 2)
        share = torch.sin(alpha * safe) / (2 * torch.sin(safe / 2) * torch.cos((0.5 - alpha) * safe))
        share = torch.where(small, torch.zeros_like(theta) + alpha, share)
        return (total * torch.lerp(p, e, share)).to(pretrained.dtype), alpha


class Dlerp(Interpolator):
    """h = (1 − α) p + α e, α = σ(W [p, e] + b) for every token; b stays at logit α unless `learnable`."""

    rule = _RULES["dlerp"]
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        """Linear interpolation with an α for every token, from what both branches say."""
        alpha = self.share(torch.cat((pretrained, expanded), dim=-1))
        return torch.lerp(pretrained, expanded, alpha), alpha

    def share(self, features: Tensor) -> Tensor:
        """α, B T 1; the sigmoid in fp32."""
        score = at_least_fp32(F.linear(features, self.weight))
        bias = log_odds(self.alpha) if self.bias is None else at_least_fp32(self.bias)
        return torch.sigmoid(score + bias).to(features.dtype)


class DlerpIn(Dlerp):
    """Dlerp whose α comes from the layer's input: α = σ(W h + b)."""

    rule = _RULES["dlerp_in"]

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        """Linear interpolation with an α for every token, from the layer's input."""
        alpha = self.share(hidden)
        return torch.lerp(pretrained, expanded, alpha), alpha


class MixtureOfTwo(Interpolator):
    """Hard choice for every token: the larger of softmax(W h + b) takes all; a tie is the expanded branch's.

    argmax alone would leave the gate without a gradient. The choice is therefore passed straight through:
    forward takes one branch exactly, backward sees the probability of the expanded branch, which is also the
    divergence's α.
    """

    rule = _RULES["moe"]
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        """The chosen branch, and the probability of the expanded one, B T 1."""
        scores = at_least_fp32(F.linear(hidden, self.weight))
        fixed = scores.new_tensor((0.0, log_odds(self.alpha)))
        bias = fixed if self.bias is None else at_least_fp32(self.bias)
        probability = torch.softmax(scores + bias, dim=-1)[..., 1:]
        choice = (probability >= 0.5).to(probability.dtype) + (probability - probability.detach())
        return torch.lerp(pretrained, expanded, choice.to(pretrained.dtype)), probability


class ControlGraft(Graft, ControlRules):
    """Control blocks; `interpolators` are the classes of those that the config names."""

    def __init__(self, interpolators: Mapping[str, type[Interpolator]]) -> None:
        super().__init__({key: kind.rule for key, kind in interpolators.items()})
        self.classes = dict(interpolators)

    def attach(self, layer: Any, config: Any, index: int, surgery: Surgery) -> bool:
        """The twin and the interpolator."""
        block: ControlSpec | None = surgery.of[self.name].get(index)
        if block is None:
            return False
        layer.control = block
        layer.expanded = layer.twin
        layer.interpolator = self.classes[block.interpolator.kind](block.interpolator, config.hidden_size)
        return True

    def after(self, layer: Any, hidden_states: Tensor, output: Tensor, frame: Frame, run: Any) -> Tensor:
        """The two branches combined, B T D."""
        expanded = run(layer.expanded)
        combined: Tensor
        combined, alpha = layer.interpolator(hidden_states, output, expanded)
        kind = layer.control.divergence.kind
        if frame.valid is not None and kind != "none":
            anchor = layer.interpolator.anchor(output)
            frame.measure("divergence_loss", divergence(kind, anchor, expanded, alpha, frame.valid))
        return combined

    def weights(self, surgery: Surgery, index: int) -> Mapping[str, float]:
        """The divergence's λ."""
        block: ControlSpec | None = surgery.of[self.name].get(index)
        return {} if block is None else {"divergence_loss": block.divergence.weight}

    def counted(self, surgery: Surgery) -> Mapping[str, tuple[type[nn.Module], int]]:
        """Twins and interpolators."""
        count = len(surgery.of[self.name])
        return {"branches": (BranchLayer, count), "interpolators": (Interpolator, count)}


def squared_error(anchor: Tensor, expanded: Tensor) -> Tensor:
    """Mean over D of the squared difference."""
    return (expanded - anchor).square().mean(dim=-1)


def cosine_distance(anchor: Tensor, expanded: Tensor) -> Tensor:
    """1 − cos, computed as ½‖ê − p̂‖², which is exactly zero for equal states."""
    return (F.normalize(expanded, dim=-1) - F.normalize(anchor, dim=-1)).square().sum(dim=-1) / 2


# By the divergence's kind: the distance Δ of two states, B T D each, for every token.
DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": squared_error, "cosine": cosine_distance}


def divergence(kind: str, anchor: Tensor, expanded: Tensor, alpha: float | Tensor, valid: Tensor) -> Tensor:
    """E[α Δ(anchor, expanded)] over valid tokens (Control LLM, section 3.3), shape (1,)."""
    distance = DISTANCES[kind](at_least_fp32(anchor), at_least_fp32(expanded))
    if isinstance(alpha, Tensor):
        alpha = alpha.squeeze(-1) if alpha.dim() > 1 else alpha
    return masked_mean(alpha * distance, valid).reshape(1)
