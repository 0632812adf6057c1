"""What `config.surgery` says: which grafts stand where. Plain data, checked when it is read.

    {"trunk_layers": 8,
     "control": [{"layer": 3, "branch": 8,
                  "interpolator": {"kind": "lerp", "alpha": 0.5, "inference_alpha": null, "learnable": false},
                  "divergence": {"kind": "mse", "weight": 1.0}}],
     "adapters": [{"layer": 0, "size": 64, "gate": "relu", "init": "low_variance"}],
     "local_loss": {"l1": 0.01, "cross_entropy": 0.0},
     "new_layers": []}

Layers 0 … trunk_layers - 1 are the trunk; every `branch` is a layer of the tail, which exists so that caches
and masks are allocated for it, and stands at run time at `layers[layer].expanded`. An adapter's `layer` may
be of the trunk or of the tail. `new_layers` are trunk layers that a surgery inserted whole. A graft marked
`frozen` belongs to an earlier surgery and does not train.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

INTERPOLATORS = ("lerp", "dlerp", "dlerp_in", "moe", "plerp", "slerp", "proj")
# Those whose α is one number, so that another can take its place at inference.
SCALAR_ALPHA = ("lerp", "plerp", "slerp", "proj")
DIVERGENCES = ("mse", "cosine", "none")
GATES = ("relu", "sigmoid", "none")
INITS = ("low_variance", "he")


@dataclass(frozen=True)
class InterpolatorSpec:
    """How two branches become one: α in training and at inference (None: the same), learned or fixed."""

    kind: str = "lerp"
    alpha: float = 0.5
    inference_alpha: float | None = None
    learnable: bool = False

    def __post_init__(self) -> None:
        _one_of("interpolator kind", self.kind, INTERPOLATORS)
        _fraction("alpha", self.alpha)
        if self.inference_alpha is not None:
            _fraction("inference_alpha", self.inference_alpha)
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
        _one_of("divergence kind", self.kind, DIVERGENCES)
        _weight("divergence weight", self.weight)


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
        _one_of("adapter gate", self.gate, GATES)
        _one_of("adapter init", self.init, INITS)
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
        _weight("local_loss l1", self.l1)
        _weight("local_loss cross_entropy", self.cross_entropy)


@dataclass(frozen=True)
class Surgery:
    """All grafts of a model, by the layer they belong to."""

    trunk_layers: int
    controls: Mapping[int, ControlSpec] = field(default_factory=dict)
    adapters: Mapping[int, AdapterSpec] = field(default_factory=dict)
    local_loss: LocalLossSpec = field(default_factory=LocalLossSpec)
    new_layers: tuple[int, ...] = ()

    @property
    def diverges(self) -> bool:
        """Whether a divergence loss is to be computed in training."""
        return any(c.divergence.kind != "none" and c.divergence.weight > 0 for c in self.controls.values())

    @property
    def needs_domains(self) -> bool:
        """Whether a local loss is asked for, so that training needs `domain_ids`."""
        return bool(self.adapters) and (self.local_loss.l1 > 0 or self.local_loss.cross_entropy > 0)


def read_surgery(config: Any) -> Surgery:
    """The grafts described by `config.surgery` (None: no graft), checked against the rest of the config.

    Raises ValueError naming the entry that does not fit: a branch that is not a tail layer or is used twice,
    an attention type that differs from the twin's, a key that this version does not know.
    """
    layers: int = config.num_hidden_layers
    raw = config.surgery
    if raw is None:
        return Surgery(trunk_layers=layers)
    _known(raw, ("trunk_layers", "control", "adapters", "local_loss", "new_layers"), "surgery")
    surgery = Surgery(
        trunk_layers=raw["trunk_layers"],
        controls=_by_layer([_control(entry) for entry in raw.get("control", ())], "control"),
        adapters=_by_layer([_build(AdapterSpec, entry, "adapter") for entry in raw.get("adapters", ())], "adapter"),
        local_loss=_build(LocalLossSpec, raw.get("local_loss") or {}, "local_loss"),
        new_layers=tuple(raw.get("new_layers", ())),
    )
    _check_layers(surgery, layers, getattr(config, "layer_types", None))
    _check_losses(surgery)
    return surgery


def _check_layers(surgery: Surgery, layers: int, layer_types: list[str] | None) -> None:
    tail = range(surgery.trunk_layers, layers)
    branches = sorted(control.branch for control in surgery.controls.values())
    if branches != list(tail):
        raise ValueError(
            f"config.surgery: branches {branches} must be the tail layers {list(tail)}, each once "
            f"(num_hidden_layers {layers} = trunk_layers {surgery.trunk_layers} + one for each control block)"
        )
    for named, what, bound in (
        (surgery.controls, "control", surgery.trunk_layers),
        (surgery.adapters, "adapter", layers),
        (surgery.new_layers, "new_layers", surgery.trunk_layers),
    ):
        outside = [layer for layer in named if not 0 <= layer < bound]
        if outside:
            raise ValueError(f"config.surgery: {what} names layers {outside}; there are {bound}")
    for control in surgery.controls.values():
        if layer_types is not None and layer_types[control.branch] != layer_types[control.layer]:
            raise ValueError(
                f"config.layer_types: layer {control.branch} is the branch of layer {control.layer} and must "
                f"have its type, `{layer_types[control.layer]}`, not `{layer_types[control.branch]}`"
            )


def _check_losses(surgery: Surgery) -> None:
    for control in surgery.controls.values():
        if control.interpolator.kind == "proj" and control.divergence.kind == "none":
            raise ValueError(
                f"config.surgery: layer {control.layer} projects for a divergence that is `none`; "
                "its matrix would never train: use `lerp`"
            )
    ungated = [adapter.layer for adapter in surgery.adapters.values() if adapter.gate != "sigmoid"]
    if surgery.local_loss.cross_entropy > 0 and ungated:
        raise ValueError(
            "config.surgery: local_loss cross_entropy classifies domains by a sigmoid gate; adapters of "
            f"layers {ungated} have none"
        )


def _control(entry: Mapping[str, Any]) -> ControlSpec:
    parts = dict(entry)
    interpolator = _build(InterpolatorSpec, parts.pop("interpolator", {}), "interpolator")
    divergence = _build(DivergenceSpec, parts.pop("divergence", {}), "divergence")
    built: ControlSpec = _build(
        ControlSpec, parts | {"interpolator": interpolator, "divergence": divergence}, "control"
    )
    return built


def _build(kind: Any, entry: Mapping[str, Any], name: str) -> Any:
    _known(entry, tuple(kind.__dataclass_fields__), name)
    return kind(**entry)


def _known(entry: Mapping[str, Any], keys: tuple[str, ...], name: str) -> None:
    unknown = sorted(set(entry) - set(keys))
    if unknown:
        raise ValueError(f"config.surgery: {name} has unknown keys {unknown}; known are {', '.join(keys)}")


def _by_layer(specs: list[Any], name: str) -> dict[int, Any]:
    named = {spec.layer: spec for spec in specs}
    if len(named) != len(specs):
        raise ValueError(f"config.surgery: two {name} entries name the same layer")
    return named


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"config.surgery: {name} is `{value}`; it must be one of {', '.join(allowed)}")


def _fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"config.surgery: {name} is {value}; it must lie between 0 and 1")


def _weight(name: str, value: float) -> None:
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"config.surgery: {name} is {value}; it must be a finite number, at least 0")
