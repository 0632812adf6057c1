"""Control LLM's interpolators (arXiv:2501.10979, section 3.3): two branches of a layer become one.

Shapes: B batch, T tokens, D hidden size. Every module maps (input, pre-trained, expanded), all B T D, to the
combined states and to α, the share of the expanded branch: a float, a tensor of shape (1,) or of B T 1.
Written as p + α (e − p) (`torch.lerp`), the result is bit-exactly p where e equals p, whatever α is.
"""

from __future__ import annotations

import math

import torch
import transformers.initialization as init
from torch import Tensor, nn
from torch.nn import functional as F

from .precision import at_least_fp32
from .specs import InterpolatorSpec

# Below this angle (radians) slerp's share differs from α by less than fp32 can hold.
SMALL_ANGLE = 1e-3


class Interpolator(nn.Module):
    """A leaf module: its tensors are direct parameters, so that every loader initialises it as a whole."""

    def __init__(self, spec: InterpolatorSpec) -> None:
        super().__init__()
        self.alpha = float(spec.alpha)
        self.inference_alpha = None if spec.inference_alpha is None else float(spec.inference_alpha)

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        """Combined states B T D, and α."""
        raise NotImplementedError

    def anchor(self, pretrained: Tensor) -> Tensor:
        """What the divergence pulls the expanded branch towards: the pre-trained states, detached."""
        return pretrained.detach()

    def initialise(self) -> None:
        """Set the values that the tensors are born with (a checkpoint's values replace them)."""


class ScalarInterpolator(Interpolator):
    """One α for all tokens: fixed, or the learned σ(`logit`); in eval, `inference_alpha` if one is given."""

    logit: nn.Parameter | None

    def __init__(self, spec: InterpolatorSpec) -> None:
        super().__init__(spec)
        # Shape (1,): FSDP2 does not shard scalars.
        self.register_parameter("logit", nn.Parameter(torch.empty(1)) if spec.learnable else None)

    def share(self, like: Tensor) -> float | Tensor:
        """α for this forward, in `like`'s dtype where it is a tensor."""
        if not self.training and self.inference_alpha is not None:
            return self.inference_alpha
        if self.logit is None:
            return self.alpha
        return torch.sigmoid(at_least_fp32(self.logit)).to(like.dtype)

    def initialise(self) -> None:
        """σ(logit) = α."""
        if self.logit is not None:
            init.constant_(self.logit, log_odds(self.alpha))


class Lerp(ScalarInterpolator):
    """h = (1 − α) p + α e."""

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        """Linear interpolation with one α."""
        alpha = self.share(pretrained)
        return torch.lerp(pretrained, expanded, alpha), alpha


class Plerp(ScalarInterpolator):
    """h = (1 − α) W p + α e; `weight` holds W − I, so that zeros are the exact identity.

    W itself would lose its updates in bf16: beside the 1 of its diagonal they round away.
    """

    def __init__(self, spec: InterpolatorSpec, width: int) -> None:
        super().__init__(spec)
        self.weight = nn.Parameter(torch.empty(width, width))

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        """Linear interpolation of the lateral layer's output and the expanded branch."""
        alpha = self.share(pretrained)
        return torch.lerp(pretrained + F.linear(pretrained, self.weight), expanded, alpha), alpha

    def initialise(self) -> None:
        """W = I."""
        super().initialise()
        init.zeros_(self.weight)


class Proj(ScalarInterpolator):
    """Lerp whose divergence compares e with W p; `weight` is W − I. From the public code, not the paper."""

    def __init__(self, spec: InterpolatorSpec, width: int) -> None:
        super().__init__(spec)
        self.weight = nn.Parameter(torch.empty(width, width))

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        """Linear interpolation with one α; W takes no part in it."""
        alpha = self.share(pretrained)
        return torch.lerp(pretrained, expanded, alpha), alpha

    def anchor(self, pretrained: Tensor) -> Tensor:
        """W p, with p detached: the loss trains W and the expanded branch."""
        fixed = pretrained.detach()
        return fixed + F.linear(fixed, self.weight)

    def initialise(self) -> None:
        """W = I."""
        super().initialise()
        init.zeros_(self.weight)


class Slerp(ScalarInterpolator):
    """Spherical interpolation: sin((1−α)θ)/sin θ · p + sin(αθ)/sin θ · e, θ the angle between p and e.

    From the public code, not the paper. Computed as (sum of the factors) · lerp(p, e, share of the second),
    with θ from the chord of the unit vectors, so that equal branches give θ = 0, a sum of 1 and exactly p.
    """

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

    bias: nn.Parameter | None

    def __init__(self, spec: InterpolatorSpec, features: int) -> None:
        super().__init__(spec)
        self.weight = nn.Parameter(torch.empty(1, features))
        self.register_parameter("bias", nn.Parameter(torch.empty(1)) if spec.learnable else None)

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        """Linear interpolation with an α for every token, from what both branches say."""
        alpha = self.share(torch.cat((pretrained, expanded), dim=-1))
        return torch.lerp(pretrained, expanded, alpha), alpha

    def share(self, features: Tensor) -> Tensor:
        """α, B T 1; the sigmoid in fp32."""
        score = at_least_fp32(F.linear(features, self.weight))
        bias = log_odds(self.alpha) if self.bias is None else at_least_fp32(self.bias)
        return torch.sigmoid(score + bias).to(features.dtype)

    def initialise(self) -> None:
        """W = 0: every token starts at α, as lerp does."""
        init.zeros_(self.weight)
        if self.bias is not None:
            init.constant_(self.bias, log_odds(self.alpha))


class DlerpIn(Dlerp):
    """Dlerp whose α comes from the layer's input: α = σ(W h + b)."""

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

    bias: nn.Parameter | None

    def __init__(self, spec: InterpolatorSpec, width: int) -> None:
        super().__init__(spec)
        self.weight = nn.Parameter(torch.empty(2, width))
        self.register_parameter("bias", nn.Parameter(torch.empty(2)) if spec.learnable else None)

    def forward(self, hidden: Tensor, pretrained: Tensor, expanded: Tensor) -> tuple[Tensor, float | Tensor]:
        """The chosen branch, and the probability of the expanded one, B T 1."""
        scores = at_least_fp32(F.linear(hidden, self.weight))
        fixed = scores.new_tensor((0.0, log_odds(self.alpha)))
        bias = fixed if self.bias is None else at_least_fp32(self.bias)
        probability = torch.softmax(scores + bias, dim=-1)[..., 1:]
        choice = (probability >= 0.5).to(probability.dtype) + (probability - probability.detach())
        return torch.lerp(pretrained, expanded, choice.to(pretrained.dtype)), probability

    def initialise(self) -> None:
        """Random scores, so that both branches get tokens from the first step; b = (0, logit α)."""
        init.normal_(self.weight, mean=0.0, std=gate_std(self.weight.shape[1]))
        if self.bias is not None:
            init.copy_(self.bias, torch.tensor((0.0, log_odds(self.alpha))))


def build_interpolator(spec: InterpolatorSpec, width: int) -> Interpolator:
    """The module that `spec` names, for hidden states of size `width`."""
    match spec.kind:
        case "lerp":
            return Lerp(spec)
        case "slerp":
            return Slerp(spec)
        case "plerp":
            return Plerp(spec, width)
        case "proj":
            return Proj(spec, width)
        case "dlerp":
            return Dlerp(spec, 2 * width)
        case "dlerp_in":
            return DlerpIn(spec, width)
        case "moe":
            return MixtureOfTwo(spec, width)
    raise ValueError(f"config.surgery: interpolator kind `{spec.kind}` is unknown")


def log_odds(alpha: float) -> float:
    """The number whose sigmoid is α."""
    return math.log(alpha / (1.0 - alpha))


def gate_std(width: int) -> float:
    """Standard deviation of a fresh MoE gate: that of a linear layer's default, 1/√(3 · width)."""
    return math.sqrt(1.0 / (3.0 * width))
