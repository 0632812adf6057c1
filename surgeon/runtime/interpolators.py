"""Interpolators (Control LLM, arXiv:2501.10979, section 3.3): equations that combine two branches of a layer.

Each interpolator is one class with its key in plans, its tensors at birth and its equation. Previews read this file
without torch: equations use operators and methods of tensors, and import torch inside a method where they need more.

Shapes: B batch, T tokens, D hidden size; h is the layer's input, p the output of the pre-trained branch and e that of
the expanded branch, all B T D. α, the share of e, is a float or a tensor of shape (1,) or B T 1.
Computed as p + α (e − p) (`lerp`), the result is bit-exactly p where e equals p, whatever α is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .births import Birth, Fill, Normal, Values
from .precision import at_least_fp32

if TYPE_CHECKING:
    from torch import Tensor

# Below this angle (radians) slerp's share of e differs from α by less than the precision of fp32.
SMALL_ANGLE = 1e-3


@dataclass(frozen=True)
class InterpolatorSpec:
    """The settings of an interpolator: its kind, α in training and at inference (None: the same), learned or fixed."""

    kind: str = "lerp"
    alpha: float = 0.5
    inference_alpha: float | None = None
    learnable: bool = False


class Interpolation:
    """The base class of interpolators; its own methods compute lerp with one α, fixed or learned.

    `scalar_alpha`: α is one number, so that another number can replace it at inference. `projects`: its matrix is used
    only in the divergence loss, and never trains without this loss. `unmergeable`: why its two branches cannot be
    folded into one layer without a stated share; empty where they can. Folding reads a learned α from the tensor
    `logit`, as α = σ(logit); an interpolator that stores α in another way needs a stated share.
    """

    key: ClassVar[str]
    scalar_alpha: ClassVar[bool] = True
    projects: ClassVar[bool] = False
    unmergeable: ClassVar[str] = ""

    def matrices(self, width: int) -> dict[str, Birth]:
        """Return the births of its tensors other than α, for hidden states of size `width`."""
        return {}

    def learned(self, alpha: float) -> dict[str, Birth]:
        """Return the birth of the tensor that holds a learned α; shape (1,), as FSDP2 does not shard scalars."""
        return {"logit": Fill((1,), log_odds(alpha))}

    def share(self, tensors: Mapping[str, Tensor], alpha: float, h: Tensor, p: Tensor, e: Tensor) -> float | Tensor:
        """Return α of this forward, which also weighs the divergence.

        Args:
            tensors: the tensors of `births`, by name; those of `learned` are present only where α is learned.
            alpha: the stated share.
            h: the layer's input.
            p: the pre-trained branch.
            e: the expanded branch.
        """
        if "logit" not in tensors:
            return alpha
        return at_least_fp32(tensors["logit"]).sigmoid().to(p.dtype)

    def join(self, tensors: Mapping[str, Tensor], p: Tensor, e: Tensor, alpha: float | Tensor) -> Tensor:
        """Return the combined states, exactly p where p and e are equal.

        Args:
            tensors: as for `share`.
            p: the pre-trained branch.
            e: the expanded branch.
            alpha: what `share` returned, or `inference_alpha` in its place.
        """
        return p.lerp(e, alpha)

    def anchor(self, tensors: Mapping[str, Tensor], p: Tensor) -> Tensor:
        """Return the states towards which the divergence pulls the expanded branch; `p` is detached."""
        return p

    def births(self, spec: InterpolatorSpec, width: int) -> dict[str, Birth]:
        """Return the births of all its tensors, by name."""
        return self.matrices(width) | (self.learned(spec.alpha) if spec.learnable else {})


def log_odds(alpha: float) -> float:
    """Return the number whose sigmoid is α."""
    return math.log(alpha) - math.log1p(-alpha)


class Lerp(Interpolation):
    """Linear interpolation: (1 − α) p + α e."""

    key = "lerp"


class Dlerp(Interpolation):
    """Lerp with its own α for every token: (1 − α) p + α e, α = σ(W [p, e] + b); b stays logit α unless `learnable`."""

    key = "dlerp"
    scalar_alpha = False
    unmergeable = "chooses α for every token"
    # How many states the gate reads side by side.
    states: ClassVar[int] = 2

    def matrices(self, width: int) -> dict[str, Birth]:
        """Return the birth of W: zeros, so that every token begins with the stated α."""
        return {"weight": Fill((1, self.states * width))}

    def learned(self, alpha: float) -> dict[str, Birth]:
        """Return the birth of the bias b: logit α."""
        return {"bias": Fill((1,), log_odds(alpha))}

    def share(self, tensors: Mapping[str, Tensor], alpha: float, h: Tensor, p: Tensor, e: Tensor) -> float | Tensor:
        """Return α for every token, B T 1, from the outputs of both branches."""
        import torch

        return self.gate(tensors, alpha, torch.cat((p, e), dim=-1))

    def gate(self, tensors: Mapping[str, Tensor], alpha: float, features: Tensor) -> Tensor:
        """Return σ(W features + b), B T 1; the sigmoid is computed in at least fp32."""
        score = at_least_fp32(features @ tensors["weight"].T)
        bias = at_least_fp32(tensors["bias"]) if "bias" in tensors else log_odds(alpha)
        return (score + bias).sigmoid().to(features.dtype)


class DlerpIn(Dlerp):
    """Dlerp with α from the layer's input: α = σ(W h + b)."""

    key = "dlerp_in"
    states = 1

    def share(self, tensors: Mapping[str, Tensor], alpha: float, h: Tensor, p: Tensor, e: Tensor) -> float | Tensor:
        """Return α for every token, B T 1, from the layer's input."""
        return self.gate(tensors, alpha, h)


class MixtureOfTwo(Interpolation):
    """A hard choice for every token: the branch with the larger of softmax(W h + b); in a tie the expanded branch.

    argmax would give the gate no gradient. So the choice is a straight-through estimate: forward returns exactly one
    branch, and backward uses the probability of the expanded branch, which is also the divergence's α.
    """

    key = "moe"
    scalar_alpha = False
    unmergeable = "chooses α for every token"

    def matrices(self, width: int) -> dict[str, Birth]:
        """Return the birth of W: random, with a linear layer's variance, so that both branches get tokens at once."""
        return {"weight": Normal((2, width), 1 / math.sqrt(3 * width))}

    def learned(self, alpha: float) -> dict[str, Birth]:
        """Return the birth of the bias b: (0, logit α)."""
        return {"bias": Values((2,), values=(0.0, log_odds(alpha)))}

    def share(self, tensors: Mapping[str, Tensor], alpha: float, h: Tensor, p: Tensor, e: Tensor) -> float | Tensor:
        """Return the probability of the expanded branch, B T 1, in at least fp32."""
        scores = at_least_fp32(h @ tensors["weight"].T)
        fixed = scores.new_tensor((0.0, log_odds(alpha)))
        bias = at_least_fp32(tensors["bias"]) if "bias" in tensors else fixed
        return (scores + bias).softmax(dim=-1)[..., 1:]

    def join(self, tensors: Mapping[str, Tensor], p: Tensor, e: Tensor, alpha: float | Tensor) -> Tensor:
        """Return for every token the chosen branch, exactly."""
        assert not isinstance(alpha, float)
        choice = (alpha >= 0.5).to(alpha.dtype) + (alpha - alpha.detach())
        return p.lerp(e, choice.to(p.dtype))


class Lateral(Interpolation):
    """An interpolator with a square matrix W; its tensor `weight` holds W − I, so that zeros are the exact identity.

    W itself would lose small updates in bf16: added to the 1 of its diagonal, they round away.
    """

    def matrices(self, width: int) -> dict[str, Birth]:
        """Return the birth of W − I: zeros."""
        return {"weight": Fill((width, width))}


class Plerp(Lateral):
    """Lerp with a projection of the pre-trained branch: (1 − α) W p + α e."""

    key = "plerp"
    unmergeable = "projects the pre-trained branch, which no single layer can do"

    def join(self, tensors: Mapping[str, Tensor], p: Tensor, e: Tensor, alpha: float | Tensor) -> Tensor:
        """Return the linear interpolation of W p and the expanded branch."""
        return (p + p @ tensors["weight"].T).lerp(e, alpha)


class Slerp(Interpolation):
    """Spherical interpolation: sin((1−α)θ)/sin θ · p + sin(αθ)/sin θ · e, θ the angle between p and e.

    The equation is from the public code, not the paper. It is computed as (sum of the two factors) · lerp(p, e, second
    factor / sum). θ comes from the chord of the unit vectors, so that equal branches give θ = 0, a sum of 1 and exactly
    p.
    """

    key = "slerp"
    unmergeable = "goes along an arc; a straight mean is something else"

    def join(self, tensors: Mapping[str, Tensor], p: Tensor, e: Tensor, alpha: float | Tensor) -> Tensor:
        """Return the interpolation along the arc, computed in at least fp32."""
        import torch
        from torch.nn import functional as F

        dtype, p, e = p.dtype, at_least_fp32(p), at_least_fp32(e)
        unit_p, unit_e = F.normalize(p, dim=-1), F.normalize(e, dim=-1)
        chord = torch.linalg.vector_norm(unit_e - unit_p, dim=-1, keepdim=True)
        sagitta = torch.linalg.vector_norm(unit_e + unit_p, dim=-1, keepdim=True)
        # Opposite vectors have no unique arc between them; the angle is clamped just below a half turn.
        theta = (2 * torch.atan2(chord, sagitta)).clamp(max=math.pi - SMALL_ANGLE)
        small = theta < SMALL_ANGLE
        safe = torch.where(small, torch.ones_like(theta), theta)
        total = torch.cos((0.5 - alpha) * theta) / torch.cos(theta / 2)
        share = torch.sin(alpha * safe) / (2 * torch.sin(safe / 2) * torch.cos((0.5 - alpha) * safe))
        share = torch.where(small, torch.zeros_like(theta) + alpha, share)
        return (total * torch.lerp(p, e, share)).to(dtype)


class Proj(Lateral):
    """Lerp with a divergence between e and W p; from the public code, not the paper.

    W does not change the combined states; the divergence loss trains W and the expanded branch.
    """

    key = "proj"
    projects = True

    def anchor(self, tensors: Mapping[str, Tensor], p: Tensor) -> Tensor:
        """Return W p."""
        return p + p @ tensors["weight"].T


INTERPOLATORS = (Lerp(), Dlerp(), DlerpIn(), MixtureOfTwo(), Plerp(), Slerp(), Proj())
