"""What one graft's entry in `config.surgery` says, checked by itself; `surgery` reads the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

INTERPOLATORS = ("lerp", "dlerp", "dlerp_in", "moe", "plerp", "slerp", "proj")
# Those whose α is one number, so that another can take its place at inference.
SCALAR_ALPHA = ("lerp", "plerp", "slerp", "proj")
DIVERGENCES = ("mse", "cosine", "none")
GATES = ("relu", "sigmoid", "none")
INITS = ("low_variance", "he")
SITES = ("attention", "ffn")
MIXTURE_GATES = ("linear", "cosine")
GATE_SHARING = ("all", "by_kind", "none")
TRAIN_ROUTINGS = ("batch_mean", "batch_mode", "token")
# A mean over a prefix is for decoders, over the whole sequence for encoders.
INFERENCE_ROUTINGS = ("prefix_mean", "sequence_mean", "token")


@dataclass(frozen=True)
class InterpolatorSpec:
    """How two branches become one: α in training and at inference (None: the same), learned or fixed."""

    kind: str = "lerp"
    alpha: float = 0.5
    inference_alpha: float | None = None
    learnable: bool = False

    def __post_init__(self) -> None:
        one_of("interpolator kind", self.kind, INTERPOLATORS)
        fraction("alpha", self.alpha)
        if self.inference_alpha is not None:
            fraction("inference_alpha", self.inference_alpha)
            if self.kind not in SCALAR_ALPHA:
                raise ValueError(
                    f"config.surgery: inference_alpha needs an interpolator with one α for all tokens "
                    f"({', '.join(SCALAR_ALPHA)}), not `{self.kind}`"
                )
        # A logit holds α where it is learned or added to a gate's output; 0 and 1 have none.
        if (self.learnable or self.kind not in SCALAR_ALPHA) and not 0.0 < self.alpha < 1.0:
            raise ValueError(
                f"config.surgery: alpha is {self.alpha}; where `{self.kind}` learns it must lie "
                "between 0 and 1, exclusive"
            )


@dataclass(frozen=True)
class DivergenceSpec:
    """The loss that keeps the expanded branch near the pre-trained one, and its weight λ."""

    kind: str = "none"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.kind == "attention":
            raise ValueError(
                "config.surgery: divergence `attention` compares attention maps, which sdpa, flash and flex "
                "attention never form; use `mse` or `cosine`"
            )
        one_of("divergence kind", self.kind, DIVERGENCES)
        weight("divergence weight", self.weight)


@dataclass(frozen=True)
class ControlSpec:
    """One control block: trunk layer `layer` gets the tail layer `branch` as its expanded twin."""

    layer: int
    branch: int
    interpolator: InterpolatorSpec = field(default_factory=InterpolatorSpec)
    divergence: DivergenceSpec = field(default_factory=DivergenceSpec)
    frozen: bool = False


@dataclass(frozen=True)
class AdapterSpec:
    """One gated adapter of hidden size `size` parallel to the FFN of `layer`."""

    layer: int
    size: int
    gate: str = "relu"
    init: str = "low_variance"
    frozen: bool = False

    def __post_init__(self) -> None:
        one_of("adapter gate", self.gate, GATES)
        one_of("adapter init", self.init, INITS)
        if self.size < 1:
            raise ValueError(
                f"config.surgery: adapter of layer {self.layer} has size {self.size}; at least 1 is needed"
            )


@dataclass(frozen=True)
class LocalLossSpec:
    """Weights of the adapters' local losses; 0 is off."""

    l1: float = 0.0
    cross_entropy: float = 0.0

    def __post_init__(self) -> None:
        weight("local_loss l1", self.l1)
        weight("local_loss cross_entropy", self.cross_entropy)


@dataclass(frozen=True)
class SlotSpec:
    """Slot `slot` of PMoE in one layer: a LoRA of `rank` at the layer's modules `targets`.

    Its product counts times `scale` (LoRA's alpha / rank). Slots of one `group` are computed as one product; those of
    another group by themselves, so that what earlier groups compute never changes, to the bit, when one is added.
    `ranks` and `scales` name the targets where the LoRA is of another rank or counts differently.
    """

    slot: int
    rank: int
    targets: tuple[str, ...]
    scale: float = 1.0
    dropout: float = 0.0
    group: int = 0
    frozen: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)

    def at(self, target: str) -> SlotSpec:
        """The slot as it is at one of its targets."""
        return replace(
            self,
            targets=(target,),
            rank=self.ranks.get(target, self.rank),
            scale=self.scales.get(target, self.scale),
            ranks={},
            scales={},
        )

    def __post_init__(self) -> None:
        for rank in (self.rank, *self.ranks.values()):
            if rank < 1:
                raise ValueError(f"config.surgery: slot {self.slot} has rank {rank}; at least 1 is needed")
        for scale in (self.scale, *self.scales.values()):
            if not math.isfinite(scale):
                raise ValueError(f"config.surgery: slot {self.slot} has scale {scale}; a finite number is needed")
        strangers = sorted({*self.ranks, *self.scales} - set(self.targets))
        if strangers:
            raise ValueError(f"config.surgery: slot {self.slot} has a rank or scale at {strangers}, no targets of it")
        if not self.targets:
            raise ValueError(f"config.surgery: slot {self.slot} targets no module")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"config.surgery: slot {self.slot} has dropout {self.dropout}; it must lie in [0, 1)")


@dataclass(frozen=True)
class ExpertsSpec:
    """The slots of one layer; `routed` says that the router's distribution weighs them (layers above τ)."""

    layer: int
    routed: bool
    slots: tuple[SlotSpec, ...]


@dataclass(frozen=True)
class RouterSlotSpec:
    """One column of the router. The first of a group after the first holds the group's mass."""

    slot: int
    group: int = 0
    frozen: bool = False


@dataclass(frozen=True)
class RouterSpec:
    """PMoE's router, which reads what goes into `layer`: h_τ."""

    layer: int
    slots: tuple[RouterSlotSpec, ...]


@dataclass(frozen=True)
class RouterLossSpec:
    """Weight of −log G_k for tokens of a known task (PMoE, Eq. 7); 0 is off."""

    task_id: float = 0.0

    def __post_init__(self) -> None:
        weight("router_loss task_id", self.task_id)


@dataclass(frozen=True)
class StatesSpec:
    """Which blocks of a layer carry a control state."""

    layer: int
    sites: tuple[str, ...]

    def __post_init__(self) -> None:
        for site in self.sites:
            one_of("control state's site", site, SITES)
        if not self.sites or len(set(self.sites)) != len(self.sites):
            raise ValueError(f"config.surgery: control states of layer {self.layer} name the sites {self.sites}")


@dataclass(frozen=True)
class MixtureSpec:
    """How control states mix (Mixture-of-Control, Eq. 9 and 10, section 4.2 and appendix B)."""

    rank: int
    top_k: int = 1
    alpha: float = 0.95
    gate: str = "linear"
    shared: str = "all"
    projection: int = 256
    temperature: float = 0.3
    train_routing: str = "batch_mean"
    inference_routing: str = "prefix_mean"
    balance_weight: float = 0.01
    straight_through: bool = True
    frozen: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or self.top_k < 0 or self.projection < 1:
            raise ValueError(
                f"config.surgery: mixture has rank {self.rank}, top_k {self.top_k}, projection {self.projection};"
                " they must be at least 1, 0 and 1"
            )
        fraction("mixture alpha", self.alpha)
        one_of("mixture gate", self.gate, MIXTURE_GATES)
        one_of("mixture shared", self.shared, GATE_SHARING)
        one_of("mixture train_routing", self.train_routing, TRAIN_ROUTINGS)
        one_of("mixture inference_routing", self.inference_routing, INFERENCE_ROUTINGS)
        weight("mixture balance_weight", self.balance_weight)
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"config.surgery: mixture temperature is {self.temperature}; it must be positive")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """ValueError where `value` is none of `allowed`."""
    if value not in allowed:
        raise ValueError(f"config.surgery: {name} is `{value}`; it must be one of {', '.join(allowed)}")


def fraction(name: str, value: float) -> None:
    """ValueError where `value` is not from 0 to 1."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"config.surgery: {name} is {value}; it must lie between 0 and 1")


def weight(name: str, value: float) -> None:
    """ValueError where `value` is no weight of a loss."""
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"config.surgery: {name} is {value}; it must be a finite number, at least 0")
