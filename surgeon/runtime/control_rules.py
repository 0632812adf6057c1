"""Control blocks (Control LLM, arXiv:2501.10979): what `config.surgery` says of them, and what they are born with.

    "control": [{"layer": 3, "branch": 8,
                 "interpolator": {"kind": "lerp", "alpha": 0.5, "inference_alpha": null, "learnable": false},
                 "divergence": {"kind": "mse", "weight": 1.0}}]

`branch` is a layer of the tail, which exists so that caches and masks are allocated for it; in the model it stands at
`layers[layer].expanded`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .births import Birth, Fill, Normal, Values
from .rules import (
    BRANCH,
    GraftRules,
    Kind,
    Surgery,
    built,
    by_layer,
    check_layers,
    fraction,
    one_of,
    refuse_pipeline,
    weight,
)

INTERPOLATOR = "interpolator."
DIVERGENCES = ("mse", "cosine", "none")


@dataclass(frozen=True)
class InterpolatorSpec:
    """How two branches become one: α in training and at inference (None: the same), learned or fixed."""

    kind: str = "lerp"
    alpha: float = 0.5
    inference_alpha: float | None = None
    learnable: bool = False

    def __post_init__(self) -> None:
        fraction("alpha", self.alpha)
        if self.inference_alpha is not None:
            fraction("inference_alpha", self.inference_alpha)


@dataclass(frozen=True)
class InterpolatorRule:
    """One interpolator: its key in plans, the module and the name of its class, and what its tensors are born with.

    `scalar_alpha`: its α is one number, so that another can take its place at inference. `projects`: it projects for
    the divergence, without which its matrix would never train. `unmergeable` says why two branches that it joins
    cannot be folded into one layer without a stated share; empty where they can. A learned α that is folded stands in
    a tensor `logit`, as α = σ(logit); where it stands otherwise, the share must be stated.
    """

    key: str
    module: str
    part: str = "surgeon.runtime.control"
    scalar_alpha: bool = True
    projects: bool = False
    unmergeable: str = ""

    def matrices(self, width: int) -> dict[str, Birth]:
        """Its tensors beside α, for hidden states of size `width`."""
        return {}

    def learned(self, alpha: float) -> dict[str, Birth]:
        """The tensor that holds α where it is learned; shape (1,), as FSDP2 does not shard scalars."""
        return {"logit": Fill((1,), log_odds(alpha))}

    def births(self, spec: InterpolatorSpec, width: int) -> dict[str, Birth]:
        """All its tensors at birth, by name."""
        return self.matrices(width) | (self.learned(spec.alpha) if spec.learnable else {})

    def check(self, spec: InterpolatorSpec, known: Iterable[InterpolatorRule]) -> None:
        """ValueError where the spec asks for what this interpolator has not; `known` are those to choose from."""
        if spec.inference_alpha is not None and not self.scalar_alpha:
            others = ", ".join(rule.key for rule in known if rule.scalar_alpha)
            raise ValueError(
                f"config.surgery: inference_alpha needs an interpolator with one α for all tokens "
                f"({others}), not `{self.key}`"
            )
        # A logit holds α where it is learned or added to a gate's output; 0 and 1 have none.
        if (spec.learnable or not self.scalar_alpha) and not 0.0 < spec.alpha < 1.0:
            raise ValueError(
                f"config.surgery: alpha is {spec.alpha}; where `{self.key}` learns it must lie "
                "between 0 and 1, exclusive"
            )


class LateralRule(InterpolatorRule):
    """One with a square matrix of which only the difference from the identity is kept, so that zeros are exact."""

    def matrices(self, width: int) -> dict[str, Birth]:
        """W − I = 0."""
        return {"weight": Fill((width, width))}


@dataclass(frozen=True)
class TokenRule(InterpolatorRule):
    """One α for every token, σ(W x + b) of `branches` states side by side; b = logit α, trained where α is learned."""

    scalar_alpha: bool = False
    branches: int = 1

    def matrices(self, width: int) -> dict[str, Birth]:
        """W = 0: every token starts at α."""
        return {"weight": Fill((1, self.branches * width))}

    def learned(self, alpha: float) -> dict[str, Birth]:
        """b."""
        return {"bias": Fill((1,), log_odds(alpha))}


@dataclass(frozen=True)
class ChoiceRule(InterpolatorRule):
    """A hard choice between two scores for every token."""

    scalar_alpha: bool = False

    def matrices(self, width: int) -> dict[str, Birth]:
        """Random scores, of the variance of a linear layer's default, so that both branches get tokens at once."""
        return {"weight": Normal((2, width), 1 / math.sqrt(3 * width))}

    def learned(self, alpha: float) -> dict[str, Birth]:
        """b = (0, logit α)."""
        return {"bias": Values((2,), (0.0, log_odds(alpha)))}


_BY_TOKEN = "chooses α for every token"

INTERPOLATORS = (
    InterpolatorRule("lerp", "Lerp"),
    TokenRule("dlerp", "Dlerp", branches=2, unmergeable=_BY_TOKEN),
    TokenRule("dlerp_in", "DlerpIn", unmergeable=_BY_TOKEN),
    ChoiceRule("moe", "MixtureOfTwo", unmergeable=_BY_TOKEN),
    LateralRule("plerp", "Plerp", unmergeable="projects the pre-trained branch, which no single layer can do"),
    InterpolatorRule("slerp", "Slerp", unmergeable="goes along an arc; a straight mean is something else"),
    LateralRule("proj", "Proj", projects=True),
)


def log_odds(alpha: float) -> float:
    """The number whose sigmoid is α."""
    return math.log(alpha) - math.log1p(-alpha)


@dataclass(frozen=True)
class DivergenceSpec:
    """The loss that keeps the expanded branch near the pre-trained one, and its weight λ."""

    kind: str = "none"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.kind == "attention":
            raise ValueError(f"config.surgery: {NO_ATTENTION}")
        one_of("divergence kind", self.kind, DIVERGENCES)
        weight("divergence weight", self.weight)


NO_ATTENTION = (
    "divergence `attention` compares attention maps, which sdpa, flash and flex attention never form;"
    " use `mse` or `cosine`"
)


@dataclass(frozen=True)
class ControlSpec:
    """One control block: trunk layer `layer` gets the tail layer `branch` as its expanded twin."""

    layer: int
    branch: int
    interpolator: InterpolatorSpec = field(default_factory=InterpolatorSpec)
    divergence: DivergenceSpec = field(default_factory=DivergenceSpec)
    frozen: bool = False


class ControlKind(Kind):
    """A control block: an expanded twin of the layer, and an interpolator."""

    key = "control"
    mark = "C"
    in_twin = "refused"
    branching = True

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """`control block, lerp`."""
        return f"control block, {entry['interpolator']['kind']}"

    def claims(self, suffix: str) -> bool:
        """All of a twin that no other graft claims, and the interpolator."""
        return suffix.startswith((BRANCH, INTERPOLATOR))


class ControlRules(GraftRules):
    """Control blocks; `interpolators` are those that can be named."""

    name = "control"
    kinds = (ControlKind(),)
    losses: ClassVar[Mapping[str, str]] = {"divergence_loss": "mean over control blocks"}
    part = "surgeon.runtime.control"
    module = "ControlGraft"

    def __init__(self, interpolators: Mapping[str, InterpolatorRule]) -> None:
        self.interpolators = interpolators

    def uses(self, raw: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
        """The interpolators that its entries name."""
        entries = raw.get("control")
        stated = [entry.get("interpolator") for entry in entries if isinstance(entry, Mapping)] if entries else []
        named = {str(told.get("kind", "lerp")) if isinstance(told, Mapping) else "lerp" for told in stated}
        return tuple((key, rule.part, rule.module) for key, rule in self.interpolators.items() if key in named)

    def read(self, raw: Mapping[str, Any]) -> dict[int, ControlSpec]:
        """Control blocks by trunk layer."""
        return by_layer([self._block(entry) for entry in raw.get("control", ())], "control")

    def _block(self, entry: Mapping[str, Any]) -> ControlSpec:
        interpolator = built(InterpolatorSpec, entry.get("interpolator", {}), "interpolator")
        one_of("interpolator kind", interpolator.kind, self.interpolators)
        self.interpolators[interpolator.kind].check(interpolator, self.interpolators.values())
        divergence = built(DivergenceSpec, entry.get("divergence", {}), "divergence")
        return built(ControlSpec, {**entry, "interpolator": interpolator, "divergence": divergence}, "control")

    def branches(self, found: Any) -> list[tuple[int, int]]:
        """Each block's."""
        return [(block.branch, block.layer) for block in found.values()]

    def check(self, surgery: Surgery, config: Any) -> None:
        """Layers exist, and what projects has something to project for."""
        blocks: dict[int, ControlSpec] = surgery.of[self.name]
        check_layers(blocks, surgery.trunk_layers, "control")
        refuse_pipeline(config, "an expanded twin stands beside its layer and is counted as one behind the last")
        for block in blocks.values():
            if self.interpolators[block.interpolator.kind].projects and block.divergence.kind == "none":
                raise ValueError(
                    f"config.surgery: layer {block.layer} projects for a divergence that is `none`; "
                    "its matrix would never train: use `lerp`"
                )

    def trains(self, surgery: Surgery) -> list[str]:
        """The twin and the interpolator of every block that is not frozen."""
        return [
            f"layers.{block.layer}.{part}"
            for block in surgery.of[self.name].values()
            if not block.frozen
            for part in (BRANCH, INTERPOLATOR)
        ]

    def measures(self, surgery: Surgery) -> bool:
        """Whether a divergence has a weight."""
        return any(b.divergence.kind != "none" and b.divergence.weight > 0 for b in surgery.of[self.name].values())
